"""Prediction with a saved model."""

import csv
import errno
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import smallvit
from smallvit.data import Preprocess, find_images
from smallvit.runs import prediction
from smallvit.runs.answers import Prediction, Unreadable, as_csv
from smallvit.runs.calibration import Calibration
from smallvit.runs.prediction import Predictor, make_predict, predict_files
from smallvit.runs.saved import Spec, save_calibration, save_model
from tests.runs import run_command

SPEC = Spec("sl_vit_tiny_data", 3, (8, 12), dict(dim=16, depth=1, heads=2, mlp_dim=16, patch_size=4))
PREPROCESS = Preprocess((8, 12), 3, "crop", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    variables = jax.jit(SPEC.create().init)(jax.random.key(0), jnp.zeros((1, 8, 12, 3)))
    save_model(folder, SPEC, variables, ("a", "b", "c"), PREPROCESS)
    return folder


@pytest.mark.parametrize("constant", [0, 2**24], ids=["weights as arguments", "weights as constants"])
def test_any_number_of_images_with_few_compilations(folder: Path, constant: int, monkeypatch: pytest.MonkeyPatch):
    traced = []

    def make_recorded(*args: Any, **settings: Any) -> Any:
        predict = make_predict(*args, **settings)

        def recorded(variables: Any, images: Any, normalisation: Any) -> Any:
            traced.append(len(images))
            return predict(variables, images, normalisation)

        return recorded

    monkeypatch.setattr(prediction, "make_predict", make_recorded)
    monkeypatch.setattr(prediction, "CONSTANT", constant)
    predict = Predictor(folder, largest=8)
    images = np.random.default_rng(0).integers(0, 256, (19, 8, 12, 3)).astype(np.uint8)
    all_at_once = predict(images)
    np.testing.assert_allclose(all_at_once.sum(axis=1), 1, atol=1e-5)
    for number in (1, 2, 3, 5, 8, 9):
        np.testing.assert_allclose(predict(images[:number]), all_at_once[:number], atol=1e-5)
    assert sorted(traced) == [1, 4, 8]


@pytest.mark.parametrize(
    "number, sizes", [(1, [1]), (3, [4]), (5, [4, 1]), (30, [16, 16]), (50, [64]), (70, [64, 4, 1, 1])]
)
def test_a_cpu_computes_little_padding(folder: Path, number: int, sizes: list[int]):
    batches = list(Predictor(folder)._batches(number))
    assert [size for _, size in batches] == sizes
    assert [start for start, _ in batches] == [sum(sizes[:i]) for i in range(len(sizes))]


def test_files_are_answered_in_order_across_batches(folder: Path, tmp_path: Path):
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 12, 3)).astype(np.uint8)
    files = [tmp_path / f"{i}.png" for i in range(len(images))]
    for file, image in zip(files, images, strict=True):
        Image.fromarray(image).save(file)
    files[17].write_bytes(b"broken")
    predictor = Predictor(folder, largest=16)
    found = list(predict_files(predictor, files, top=3))
    assert [each.file for each in found] == [str(file) for file in files]
    assert [i for i, each in enumerate(found) if isinstance(each, Unreadable)] == [17]
    for each, image in zip(found, images, strict=True):
        if isinstance(each, Prediction):
            np.testing.assert_allclose(each.probabilities, np.sort(predictor(image[None])[0])[::-1], atol=1e-5)


def test_test_time_flips_answer_an_image_and_its_mirror_image_alike(folder: Path):
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 12, 3)).astype(np.uint8)
    mirrored = images[:, :, ::-1]
    plain, flipping = Predictor(folder), Predictor(folder, flip=True)
    assert np.abs(plain(images) - plain(mirrored)).max() > 1e-3
    np.testing.assert_allclose(flipping(images), flipping(mirrored), atol=1e-6)
    mean = np.sqrt(plain(images) * plain(mirrored))  # the mean of the logits is the geometric one of the probabilities
    np.testing.assert_allclose(flipping(images), mean / mean.sum(axis=1, keepdims=True), atol=1e-5)


def test_a_file_is_decoded_as_in_training(folder: Path, tmp_path: Path):
    predict = Predictor(folder)
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    path = tmp_path / "image.png"
    path.write_bytes(file.getvalue())
    for source in (path, str(path), io.BytesIO(file.getvalue())):
        np.testing.assert_array_equal(predict.decode(source), image)
    with pytest.raises(ValueError):
        predict.decode(io.BytesIO(b"no image"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Five images, two of them further down, one file that is broken, and one that is no image."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    (folder / "deep/er").mkdir(parents=True)
    for name in ("2.png", "10.png", "[red]1.png", "deep/3.jpg", "deep/er/4.png"):
        Image.fromarray(draw.integers(0, 256, (8, 12, 3)).astype(np.uint8)).save(folder / name)
    (folder / "broken.png").write_bytes((folder / "2.png").read_bytes()[:60])
    (folder / "notes.txt").write_text("no image")
    return folder


def test_files_folders_and_patterns_are_found_once(pictures: Path):
    def names(*paths: object) -> list[str]:
        return [path.relative_to(pictures).as_posix() for path in find_images([str(path) for path in paths])]

    assert names(pictures / "deep") == ["deep/3.jpg", "deep/er/4.png"]
    assert names(pictures / "notes.txt", pictures / "2.png", pictures / "2.png") == ["notes.txt", "2.png"]
    assert names(pictures / "[12]*.png") == ["2.png", "10.png"]
    assert names(pictures / "[red]1.png") == ["[red]1.png"]  # a file of that name is no pattern
    assert names(pictures / "**/*.jpg") == ["deep/3.jpg"]
    assert len(names(pictures / "**")) == 7
    assert len(names(pictures)) == 6


def test_files_in_order_with_what_cannot_be_read(folder: Path, pictures: Path):
    predict = Predictor(folder, largest=2)
    files = [pictures / "10.png", pictures / "broken.png", pictures / "2.png", pictures / "deep/er/4.png"]
    first, broken, *others = predict_files(predict, files, top=2)
    assert isinstance(broken, Unreadable)
    assert str(files[1]) in broken.reason
    sound = [files[0], *files[2:]]
    expected = predict(np.stack([predict.decode(file) for file in sound]))
    for file, each, row in zip(sound, [first, *others], expected, strict=True):
        assert each.file == str(file)
        assert each.classes == tuple("abc"[i] for i in np.argsort(-row)[:2])
        np.testing.assert_allclose(each.probabilities, np.sort(row)[:0:-1], atol=1e-6)


def test_the_command(folder: Path, pictures: Path, tmp_path: Path, monkeypatch, capfd):
    out = {kind: tmp_path / "new" / f"predictions.{kind}" for kind in ("csv", "json")}
    assert (
        run_command(
            monkeypatch, tmp_path, "predict", folder, pictures, "--csv", out["csv"], "--json", out["json"], "--top", 2
        )
        == 1
    )
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"smallvit: cannot read {pictures / 'broken.png'}: ")
    assert f"{pictures}/[red]1.png" in printed.out

    with out["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "class", "probability", "class_2", "probability_2"]
    assert [Path(row["file"]).name for row in rows] == ["2.png", "10.png", "[red]1.png", "3.jpg", "4.png"]
    for row, stored in zip(rows, json.loads(out["json"].read_text()), strict=True):
        assert row["file"] == stored["file"]
        assert [row["class"], row["class_2"]] == [each["class"] for each in stored["predictions"]]
        assert float(row["probability"]) == stored["predictions"][0]["probability"]
        assert stored["predictions"][0]["probability"] >= stored["predictions"][1]["probability"]


def test_standard_input_and_output(folder: Path, pictures: Path, tmp_path: Path, monkeypatch, capfd):
    with (pictures / "2.png").open("rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        assert (
            run_command(monkeypatch, tmp_path, "predict", folder, "-", pictures / "2.png", "--json", "-", "--top", 99)
            == 0
        )
    file, standard_input = json.loads(capfd.readouterr().out)
    assert standard_input["file"] == "-"
    assert standard_input["predictions"] == file["predictions"]
    assert len(file["predictions"]) == 3


def test_names_of_files_may_be_any_bytes(folder: Path, pictures: Path, tmp_path: Path, monkeypatch, capfd):
    name = os.fsdecode(b"caf\xe9\x1b[31m.png")
    os.rename(pictures / "2.png", pictures / name)
    assert run_command(monkeypatch, tmp_path, "predict", folder, pictures / name) == 0
    assert "caf\ufffd\ufffd[31m.png" in capfd.readouterr().out
    (prediction,) = predict_files(folder, [pictures / name])
    assert os.fsencode(as_csv([prediction]).splitlines()[1]).startswith(os.fsencode(pictures / name))


@pytest.fixture(scope="module")
def calibrated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, with scores of 1,000 validation images; all that it is sure of is right."""
    copy = tmp_path_factory.mktemp("calibrated") / "model"
    shutil.copytree(folder, copy)
    save_calibration(copy, Calibration(1.5, 1000, ((0.0, 1000, 500), (0.4, 500, 490), (0.99, 10, 10))))
    return copy


def test_below_the_threshold_it_is_unsure(calibrated: Path, pictures: Path):
    model = smallvit.load(calibrated)
    files = [pictures / name for name in ("2.png", "10.png", "deep/3.jpg", "deep/er/4.png")]
    plain = model.predict(files)
    assert [each.decision for each in plain] == [None] * 4
    middle = float(np.median([each.probabilities[0] for each in plain]))
    decided = model.predict(files, threshold=middle)
    assert {each.decision == "unsure" for each in decided} == {True, False}
    for before, after in zip(plain, decided, strict=True):
        assert (before.classes, before.probabilities) == (after.classes, after.probabilities)
        assert after.decision == (after.classes[0] if after.probabilities[0] >= middle else "unsure")
    images = np.stack([Predictor(model).decode(file) for file in files])
    assert [each.decision for each in model.predict(images, threshold=middle)] == [each.decision for each in decided]
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        model.predict(files, threshold=90.0)


def test_decisions_in_table_csv_and_json(calibrated: Path, pictures: Path, tmp_path: Path, monkeypatch, capfd):
    out = {kind: tmp_path / f"predictions.{kind}" for kind in ("csv", "json")}
    args = [calibrated, pictures / "deep", "--csv", out["csv"], "--json", out["json"], "--precision", 0.95]
    assert run_command(monkeypatch, tmp_path, "predict", *args) == 0
    printed = capfd.readouterr()
    assert printed.err.startswith(
        "smallvit: threshold 0.4: 500 of 1,000 validation images are kept, 98.0% of them correct"
    )
    assert printed.out.split()[:2] == ["file", "decision"]
    assert printed.out.splitlines()[-1].endswith("of 2 images are unsure, below 0.4")
    with out["csv"].open() as file:
        rows = list(csv.DictReader(file))
    for row, stored in zip(rows, json.loads(out["json"].read_text()), strict=True):
        assert row["decision"] == stored["decision"]
        assert row["decision"] == (row["class"] if float(row["probability"]) >= 0.4 else "unsure")


def decided(file: Path, name: str) -> Prediction:
    return Prediction(str(file), ("a",), (0.5,), name)


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("link", [False, True])
def test_files_are_sorted_once_and_never_overwritten(link: bool, tmp_path: Path):
    classes = ("T-shirt/top", "t-shirt_top", "..")
    for name in ("one/x.jpg", "two/x.jpg", "three/x.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(name.encode())
    one, two, three = (tmp_path / name / "x.jpg" for name in ("one", "two", "three"))
    answers = [decided(one, "T-shirt/top"), decided(two, "T-shirt/top"), decided(three, "unsure")]
    answers += [decided(one, "t-shirt_top"), decided(two, "..")]
    out = tmp_path / "out"
    assert smallvit.sort_into(out, answers, classes, link=link) == (5, 0)
    expected = {
        "T-shirt_top/x.jpg": b"one/x.jpg",
        "T-shirt_top/x-2.jpg": b"two/x.jpg",
        "t-shirt_top-2/x.jpg": b"one/x.jpg",
        "_/x.jpg": b"two/x.jpg",
        "unsure/x.jpg": b"three/x.jpg",
    }
    assert tree(out) == expected
    assert os.path.samefile(out / "T-shirt_top/x.jpg", one) == link
    assert smallvit.sort_into(out, answers, classes, link=link) == (0, 5)
    assert tree(out) == expected
    assert one.read_bytes() == b"one/x.jpg"  # where it was


def test_links_to_another_disk_are_symbolic(tmp_path: Path, monkeypatch):
    (tmp_path / "x.jpg").write_bytes(b"x")

    def another_disk(*_: object) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", another_disk)
    smallvit.sort_into(tmp_path / "links", [decided(tmp_path / "x.jpg", "a")], ("a",), link=True)
    assert (tmp_path / "links/a/x.jpg").is_symlink()
    smallvit.sort_into(tmp_path / "copies", [decided(tmp_path / "x.jpg", "a")], ("a",))
    assert [path.name for path in (tmp_path / "copies/a").iterdir()] == ["x.jpg"]


def test_the_command_sorts_and_leaves_out_what_is_sorted(
    folder: Path, pictures: Path, tmp_path: Path, monkeypatch, capfd
):
    (pictures / "broken.png").unlink()
    out = pictures / "sorted"
    args = [folder, pictures, "--threshold", 1, "--sort-into", out]
    assert run_command(monkeypatch, tmp_path, "predict", *args) == 0
    assert capfd.readouterr().err == f"sorted 5 images into {out}: 5 copied, 0 there already\n"
    assert sorted(tree(out)) == [f"unsure/{name}" for name in ("10.png", "2.png", "3.jpg", "4.png", "[red]1.png")]
    assert run_command(monkeypatch, tmp_path, "predict", *args) == 0
    assert capfd.readouterr().err == f"sorted 5 images into {out}: 0 copied, 5 there already\n"


MISTAKES = {
    "both": (["{model}", "{pictures}", "--threshold", "0.9", "--precision", "0.9"], "threshold and precision both"),
    "threshold": (["{model}", "{pictures}", "--threshold", "90"], "threshold=90 must be between 0 and 1"),
    "precision": (["{model}", "{pictures}", "--precision", "0.9"], "the model has no stored validation scores"),
    "link": (["{model}", "{pictures}", "--link"], "--link needs --sort-into"),
    "sort stdin": (["{model}", "-", "--sort-into", "{pictures}/new"], "--sort-into cannot copy standard input"),
    "sort to a file": (["{model}", "{pictures}", "--sort-into", "{pictures}/2.png"], "{pictures}/2.png is a file"),
    "sorted": (["{model}", "{pictures}", "--sort-into", "{pictures}"], "all images are in {pictures} already"),
    "no model": (["{pictures}", "{pictures}"], "{pictures} holds no model"),
    "nothing": (["{model}"], "no images given"),
    "missing": (["{model}", "{pictures}/cat.png"], "{pictures}/cat.png: there is no such file or folder"),
    "no match": (["{model}", "{pictures}/*.gif"], "{pictures}/*.gif: there is no such file or folder"),
    "no images": (["{model}", "{model}"], "{model} holds no images"),
    "a pipe": (["{model}", "/dev/null"], "/dev/null is neither a file nor a folder"),
    "top": (["{model}", "{pictures}", "--top", "0"], "top=0 must be at least 1"),
    "one output": (["{model}", "{pictures}", "--csv", "-", "--json", "-"], "--csv and --json both write to -"),
    "a folder": (["{model}", "{pictures}", "--csv", "{pictures}"], "{pictures} is a folder"),
    "below a file": (["{model}", "{pictures}/2.png", "--csv", "{pictures}/2.png/x.csv"], "cannot write to"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, folder: Path, pictures: Path, tmp_path: Path, monkeypatch, capfd):
    args, message = MISTAKES[mistake]
    places = {"model": folder, "pictures": pictures}
    before = sorted(pictures.rglob("*"))
    assert run_command(monkeypatch, tmp_path, "predict", *(arg.format(**places) for arg in args)) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"smallvit: {message.format(**places)}")
    assert sorted(pictures.rglob("*")) == before
