"""Every figure can be drawn from the smallest and largest inputs, and has the right text."""

import os
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from smallvit import plots
from smallvit.data import Split
from smallvit.evaluation import Evaluation
from smallvit.plots.scores import without_short_end
from smallvit.training.crossvalidation import draw_label_errors, rank_label_errors

RNG = np.random.default_rng(0)


def images(count: int, height: int = 28, width: int = 28, channels: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (count, height, width, channels), np.uint8)


def words(figure: Figure) -> str:
    """All text of a figure, drawn once so that its ticks have labels."""
    figure.draw_without_rendering()
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))  # type: ignore[attr-defined]


def row(epoch: int) -> dict:
    return dict(
        epoch=epoch, train_loss=2.0, val_loss=2.1, train_top1=40.0, val_top1=50.0 - epoch, learning_rate=1e-3 / epoch
    )


@pytest.mark.parametrize("epochs", [0, 1, 2, 40])
def test_curves_of_any_length(epochs, tmp_path):
    figure = plots.curves([row(i) for i in range(1, epochs + 1)])
    plots.save(figure, tmp_path / "curves.png")
    assert (f"{50 - epochs}.0 at epoch {epochs}, kept" in words(figure)) == (epochs > 0)


def test_curves_mark_the_row_that_is_kept():
    figure = plots.curves([row(i) for i in range(1, 6)], kept=1)
    assert "48.0 at epoch 2, kept" in words(figure)
    assert list(figure.axes[1].lines[-1].get_xdata()) == [2]


def test_curves_leave_out_what_was_not_measured():
    figure = plots.curves([{**row(1), "val_loss": None, "val_top1": None}, row(2)])
    training, validation = figure.axes[0].lines
    assert list(training.get_xdata()) == [1, 2]
    assert list(validation.get_xdata()) == [2]


def test_confusion_shows_numbers_for_few_classes():
    text = words(plots.confusion(np.array([[41, 7], [3, 52]]), ["good", "bad"]))
    assert all(word in text.split() for word in ("41", "7", "3", "52", "good", "bad"))
    assert "90.3% of 103 images" in text


def test_confusion_colours_are_shares_of_the_row():
    figure = plots.confusion(np.array([[30, 10], [0, 0]]), ["many", "none"])
    np.testing.assert_allclose(figure.axes[0].get_images()[0].get_array(), [[0.75, 0.25], [0, 0]])


@pytest.mark.parametrize("k", [10, 45, 100, 200])
def test_confusion_labels_get_fewer(k, tmp_path):
    figure = plots.confusion(np.eye(k, dtype=int) * 9, [f"class {i}" for i in range(k)])
    plots.save(figure, tmp_path / "confusion.png")
    assert (f"class {k - 1}" in words(figure)) == (k <= 60)
    with Image.open(tmp_path / "confusion.png") as picture:
        assert max(picture.size) < 1400


@pytest.mark.parametrize("length", [3, 16])
def test_confusion_has_a_margin(length: int, tmp_path: Path):
    names = [str(i).rjust(length, "x") for i in range(9)]
    plots.save(plots.confusion(np.full((9, 9), 7), names), tmp_path / "confusion.png")
    with Image.open(tmp_path / "confusion.png") as picture:
        pixels = np.asarray(picture.convert("L"))
    edges = pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]
    assert all((edge == 255).all() for edge in edges)


def test_confusion_refuses_other_classes(as_a_user):
    with pytest.raises(ValueError, match="must be 3 x 3"):
        plots.confusion(np.eye(2, dtype=int), ["a", "b", "c"])


def test_mistakes_are_the_most_confident_wrong_ones():
    true, predicted = np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1])
    probability = np.array([0.99, 0.6, 0.98, 0.9])
    assert list(plots.worst_mistakes(true, predicted, probability)) == [3, 1]
    text = words(plots.mistakes(images(4), true, predicted, probability, ["cat", "dog"]))
    assert text.index("dog 90%") < text.index("cat 60%")
    assert "label: cat" in text
    assert "99%" not in text
    rows = np.array([1, 3])
    text = words(plots.mistakes(images(4), true, predicted, probability, ["cat", "dog"], rows=rows))
    assert text.index("cat 60%") < text.index("dog 90%")


def test_mistakes_are_limited(tmp_path):
    many = 100
    figure = plots.mistakes(images(many, 9, 20, 1), np.zeros(many, int), np.ones(many, int), RNG.random(many), "ab")
    plots.save(figure, tmp_path / "mistakes.png")
    assert sum(bool(axes.get_images()) for axes in figure.axes) == 24


def test_mistakes_have_the_names_of_their_files():
    true, predicted = np.array([0, 0]), np.array([1, 1])
    names = ["photos/cat/" + "x" * 40 + "-0815.jpg", os.fsdecode(b"caf\xe9.png")]
    text = words(plots.mistakes(images(2), true, predicted, np.array([0.9, 0.8]), ["cat", "dog"], names))
    assert "x" * 11 + "…" + "xxx-0815.jpg" in text
    assert "caf\ufffd.png" in text


def test_calibration_before_and_after():
    correct = RNG.random(200) < 0.7
    text = words(plots.reliability(np.full(200, 0.7), correct, before=np.full(200, 0.99)))
    assert "Before temperature scaling: ECE" in text
    assert "After: ECE" in text


def test_no_mistakes_is_said():
    label = np.zeros(5, int)
    assert "No mistakes: all 5 images" in words(plots.mistakes(images(5), label, label, RNG.random(5), ["a"]))


def evaluation(logits: list[list[float]], labels: list[int]) -> Evaluation:
    split = Split(images(len(labels)), np.array(labels, np.int32), [f"{i}.jpg" for i in range(len(labels))])
    return Evaluation("vit", "pets", "test", ("cat", "dog", "owl"), split, np.array(logits), 1.0, 1.0, 1, "cpu", ())


def test_an_evaluation_without_mistakes_counts_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.update({path.name: words(figure)}))
    evaluation([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]], [0, 1]).draw(tmp_path)
    assert "No mistakes: all 2 images were classified correctly." in drawn["worst-mistakes.png"]


def test_label_errors_are_pictured_in_the_order_of_their_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(words(figure)))
    found = evaluation([[2.0, 0.0, 2.5], [3.0, 0.0, 3.1], [9.0, 0.0, 0.0]], [0, 1, 0])
    order = rank_label_errors(found.scores.probabilities, found.split.labels)
    assert list(order) == [1, 0]  # by the probability of the label; the prediction is surer of the other
    assert found.scores.probabilities.max(axis=1)[0] > found.scores.probabilities.max(axis=1)[1]
    draw_label_errors(tmp_path / "label-errors.png", found, order)
    assert drawn[0].index("1.jpg") < drawn[0].index("0.jpg")


@pytest.mark.parametrize("count, channels", [(1, 1), (3, 3), (11, 3)])
def test_grids_of_images(count, channels, tmp_path):
    batch = images(count, 12, 20, channels)
    heat = RNG.random((count, 3, 5), np.float32)
    titles = [f"no {i}" for i in range(count)]
    for shown, figure in (
        (1, plots.image_grid(batch, titles, 4)),
        (2, plots.augmented(batch, batch)),
        (3, plots.attention(batch, heat, titles)),
    ):
        plots.save(figure, tmp_path / "grid.png")
        assert sum(len(axes.get_images()) for axes in figure.findobj(matplotlib.axes.Axes)) == shown * count  # type: ignore[attr-defined]


def test_a_name_is_no_formula(tmp_path):
    figure = plots.image_grid(images(1), ["$\\frac{ costs 5$"], 1)
    plots.save(figure, tmp_path / "names.png")
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]  # type: ignore[attr-defined]
    assert [(text.get_text(), text.get_parse_math()) for text in texts] == [("$\\frac{ costs 5$", False)]  # type: ignore[attr-defined]


def test_overlay_is_warm_where_the_map_is():
    heat = np.zeros((4, 4), np.float32)
    heat[0, 0] = 1
    shown = plots.overlay(np.full((8, 8, 1), 128, np.uint8), heat).astype(int)
    assert np.ptp(shown[-1, -1]) < 20
    assert shown[0, 0, 0] - shown[0, 0, 2] > 50


def test_small_images_stay_crisp():
    image = images(1, 28, 28, 1)[0]
    big = plots.upscaled(image)
    assert big.shape == (224, 224, 3)
    np.testing.assert_array_equal(big[::8, ::8, 1], image[..., 0])


def test_save_replaces_the_whole_file_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.png"
    plots.save(plots.image_grid(images(1), ["one"], 1), path)
    before = path.read_bytes()
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plots.save(plots.image_grid(images(2), ["one", "two"], 2), path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["a.png"]


def test_nothing_global_is_left_behind():
    before = dict(matplotlib.rcParams)
    plots.curves([row(1)])
    assert dict(matplotlib.rcParams) == before


def test_a_few_last_steps_are_no_point_of_their_own():
    epochs, values = without_short_end([1.0, 2.0, 3.0, 3.25], [4.0, 3.0, 2.0, 1.0])
    assert epochs == [1.0, 2.0, 3.25]
    assert values == [4.0, 3.0, pytest.approx((2.0 + 0.25 * 1.0) / 1.25)]
    even = [1.0, 2.0, 3.0, 3.75], [4.0, 3.0, 2.0, 1.0]
    assert without_short_end(*even) == even
