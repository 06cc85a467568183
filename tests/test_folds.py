"""Cross-validation: folds, their runs, the ensemble of their models, likely label errors."""

import csv
import io
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import smallvit
from smallvit.common.errors import Preempted
from smallvit.common.files import read_json, write_json
from smallvit.data import Dataset, load_data
from smallvit.data.splits import Groups, deal_folds
from smallvit.evaluation import Evaluation
from smallvit.exporting.formats import export
from smallvit.runs.folder import fold_folders
from smallvit.runs.prediction import Predictor
from smallvit.runs.saved import from_pretrained
from smallvit.training import TrainConfig, loop
from smallvit.training.callbacks import Callback, Run
from smallvit.training.crossvalidation import rank_label_errors
from smallvit.training.options import MachineOptions
from tests.runs import assert_same, draw_photos

pytestmark = pytest.mark.xdist_group("folds")
PLANTED = {"blue/red-3.png", "green/blue-7.png", "red/green-20.png"}  # where they lie, and what they show
TINY: dict[str, Any] = dict(
    model="vit_tiny_data", fields=dict(dim=16, depth=1, heads=2, mlp_dim=16), image_size=12,
    epochs=8, batch_size=16, learning_rate=0.01, ema=0.1,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(5, 60), min_size=2, max_size=5),
    number=st.integers(2, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_folds_are_stratified(counts: list[int], number: int, seed: int):
    labels = np.repeat(np.arange(len(counts)), counts)
    names = [str(label) for label in range(len(counts))]
    folds = deal_folds(labels, names, number, seed, range(len(labels)))
    assert {*folds.tolist()} == {*range(1, number + 1)}
    sizes = np.array([np.bincount(labels[folds == fold], minlength=len(counts)) for fold in range(1, number + 1)])
    assert (np.ptp(sizes, axis=0) <= 1).all()
    assert np.ptp(sizes.sum(axis=1)) <= 1
    again = deal_folds(labels, names, number, seed, range(len(labels)))
    np.testing.assert_array_equal(folds, again)


@pytest.mark.parametrize("seed", range(8))
def test_groups_and_equal_images_are_in_one_fold(seed: int):
    draw = np.random.default_rng(seed)
    labels, group, content = draw.integers(0, 3, 600), draw.integers(0, 80, 600), draw.permutation(600)
    content[:20] = content[20:40]  # which joins groups
    groups = Groups("patient", [f"p{i}" if i else "" for i in group])  # 0: of no group
    folds = deal_folds(labels, "abc", 5, seed, content.tolist(), groups)
    for keys in (group, content):
        for key in {*keys.tolist()} - ({0} if keys is group else set()):
            assert len({*folds[keys == key].tolist()}) == 1
    shares = np.array([np.bincount(labels[folds == fold], minlength=3) for fold in range(1, 6)]) / np.bincount(labels)
    assert (abs(shares - 0.2) < 0.05).all()


def parts(data: Dataset) -> list[set[str]]:
    return [{*split.names} for split in (data.train, data.val, data.test) if split is not None]


def test_folds_of_an_npz_file_take_validation_images_too(tmp_path: Path):
    draw = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 40), ("val", 14), ("test", 6)):
        arrays[f"{part}_images"] = draw.integers(0, 256, (n, 8, 8)).astype(np.uint8)
        arrays[f"{part}_labels"] = np.arange(n) % 2
    np.savez(tmp_path / "some.npz", **arrays)
    folds = [load_data(tmp_path / "some.npz", fold=(k, 3)) for k in (1, 2, 3)]
    own = {f"train[{i}]" for i in range(40)} | {f"val[{i}]" for i in range(14)}
    tested = [name for data in folds for name in (data.test.names if data.test else ())]
    assert sorted(tested) == sorted(own)
    for data in folds:
        train, val, test = parts(data)
        assert train | val | test == own
        assert len(train) + len(val) + len(test) == len(own)
        assert data.given_test is not None
        assert list(data.given_test.names) == [f"test[{i}]" for i in range(6)]
        np.testing.assert_array_equal(data.given_test.images[..., 0], arrays["test_images"])
        assert data.test is not None
        for name, image in zip(data.test.names, data.test.images, strict=True):
            part, _, row = name.rstrip("]").partition("[")
            np.testing.assert_array_equal(image[..., 0], arrays[f"{part}_images"][int(row)])


def test_folds_of_a_folder_keep_groups(photos: Path, tmp_path: Path):
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    group = {name: f"p{int(Path(name).stem) // 3}" for name in names}  # each group has images of all classes
    (folder / "labels.csv").write_text("file,group\n" + "".join(f"{name},{group[name]}\n" for name in names))
    tested = []
    for k in (1, 2, 3, 4):
        data = load_data(folder, fold=(k, 4), cache_dir=tmp_path / "cache")
        sides = [{group[name] for name in part} for part in parts(data)]
        assert sum(map(len, sides)) == len({*group.values()})
        assert data.test is not None
        assert np.bincount(data.test.labels).tolist() == [6, 6, 6]
        tested += data.test.names
    assert sorted(tested) == names
    with pytest.raises(ValueError, match="class 'blue' has 8 different images or groups of `group`, fewer than 9"):
        load_data(folder, fold=(1, 9), cache_dir=tmp_path / "cache")


def test_too_few_images_are_said_before_any_training(photos: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="class 'blue' has 24 different images, fewer than 25 folds: use fewer"):
        smallvit.train(photos, folds=25, runs=tmp_path / "runs", **TINY)
    assert not (tmp_path / "runs" / "photos-25-folds").exists()
    with pytest.raises(ValueError, match="folds=1 must be at least 2"):
        smallvit.train(photos, folds=1)
    with pytest.raises(ValueError, match="1 fold cannot be both trained and tested on: use at least 2"):
        load_data(photos, fold=(1, 1))
    with pytest.raises(ValueError, match="fold 4 of 3 does not exist"):
        load_data(photos, fold=(4, 3))
    # Two folds of three images leave one of two to train and to validate on.
    images = np.random.default_rng(0).integers(0, 256, (13, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "few.npz", images=images, labels=np.array([0] * 10 + [1] * 3))
    with pytest.raises(ValueError, match=r"without fold . of 2, class '1' has 1 image to train and validate on"):
        load_data(tmp_path / "few.npz", fold=(2, 2))
    with pytest.raises(ValueError, match="folds are trained in one process: leave out num_processes"):
        TrainConfig(folds=3, machine=MachineOptions(num_processes=2))


@dataclass
class StopsIn(Callback):
    """Sends a signal in the middle of a fold."""

    fold: str
    here: bool = False

    def begin(self, run: Run) -> None:
        self.here = run.folder.name == self.fold

    def step(self, step: int, loss: float) -> None:
        if self.here and step == 9:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def quick() -> Iterator[pytest.MonkeyPatch]:
    """Skips the pictures and reports of single runs, which take longer than the runs."""
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        for name in ("finish.pictures", "finish.report"):
            patch.setattr(f"smallvit.training.{name}", lambda *_: None)
        patch.setattr(Evaluation, "draw", lambda *_: None)
        jaxtyping.config.update("jaxtyping_disable", True)  # as in `as_a_user`
        yield patch
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def stopped(quick: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation of photographs with three wrong labels, stopped in its second fold."""
    top = tmp_path_factory.mktemp("folds")
    draw_photos(top / "photos")
    for name in PLANTED:
        shown = Path(name).stem.replace("-", "/")
        (top / "photos" / f"{shown}.png").rename(top / "photos" / name)
    stops = [StopsIn("fold-2")]
    with pytest.raises(Preempted) as stop:
        smallvit.train(top / "photos", folds=3, runs=top / "runs", callbacks=stops, **TINY)
    folder = top / "runs" / "photos-3-folds"
    assert str(stop.value) == f"stopped at step 10: `smallvit train --resume {folder}` resumes it"
    return folder


@pytest.fixture(scope="module")
def folder(stopped: Path) -> Path:
    """The same cross-validation, resumed."""
    assert [(fold / "result.json").exists() for fold in fold_folders(stopped)] == [True, False, False]
    with pytest.raises(ValueError, match=r"has 1 of 3 folds: `smallvit train --resume .*` trains the others"):
        smallvit.load(stopped)
    with pytest.raises(ValueError, match="a resumed run keeps its settings: leave out folds"):
        smallvit.train(resume=stopped, folds=4)
    with pytest.raises(ValueError, match="from_scratch is for a single fold: give it with --resume"):
        smallvit.train(resume=stopped, from_scratch=True)
    with pytest.raises(ValueError, match="was started without your own loss: leave it out"):
        smallvit.train(resume=stopped, loss=lambda logits, targets: logits[:, 0])
    first = (stopped / "fold-1/model/model.safetensors").stat().st_mtime_ns
    with redirect_stdout(io.StringIO()) as printed:
        result = smallvit.train(resume=stopped)
    assert "warning: only 72 out-of-fold images: the true accuracy is somewhere" in printed.getvalue()
    assert f"{result['label_errors']} images with a label that was not predicted" in printed.getvalue()
    assert result == {"folder": str(stopped), **read_json(stopped / "folds.json")}
    assert (stopped / "fold-1/model/model.safetensors").stat().st_mtime_ns == first
    return stopped


def test_a_stopped_fold_ends_with_the_same_weights(folder: Path, tmp_path: Path):
    config = TrainConfig.from_json(read_json(folder / "fold-2/config.json")["config"])
    assert (config.fold, config.folds) == (2, 3)
    loop.train(replace(config, run=replace(config.run, runs=tmp_path, name="whole")))
    assert_same(folder / "fold-2", tmp_path / "whole")


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_results_are_out_of_fold_and_errors_come_first(folder: Path):
    photos = folder.parents[1] / "photos"
    rows = table(folder / "out-of-fold.csv")
    assert sorted(row["file"] for row in rows) == sorted(map(str, photos.rglob("*.png")))
    for number, fold in enumerate(fold_folders(folder), 1):
        predictor = Predictor(fold)
        mine = [row for row in rows if row["fold"] == str(number)]
        found = predictor(np.stack([predictor.decode(row["file"]) for row in mine]))
        sure = [float(row["probability"]) for row in mine]
        np.testing.assert_allclose(found.max(axis=1), sure, atol=2e-6)
        assert [predictor.saved.classes[i] for i in found.argmax(axis=1)] == [row["predicted_class"] for row in mine]

    result = read_json(folder / "folds.json")
    right = [row["label"] == row["predicted_class"] for row in rows]
    assert result["out_of_fold"]["top1"] == pytest.approx(100 * np.mean(right), abs=1e-3)
    top1 = [each["top1"] for each in result["folds"]]
    assert (result["mean"], result["standard_deviation"]) == pytest.approx(
        (np.mean(top1), np.std(top1, ddof=1)), abs=2e-3
    )
    assert result["ensemble_test"] is None
    errors = table(folder / "label-errors.csv")
    assert len(errors) == result["label_errors"] == right.count(False)
    assert {str(Path(row["file"]).relative_to(photos)) for row in errors[:3]} == PLANTED
    assert all(Path(row["file"]).name.startswith(row["predicted_class"]) for row in errors[:3])
    for picture in ("folds.png", "label-errors.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def test_label_errors_are_ranked_by_the_probability_of_the_label():
    probabilities = np.array([[0.9, 0.1, 0], [0.3, 0.7, 0], [0.1, 0.5, 0.4], [0.4, 0.6, 0]], np.float32)
    assert rank_label_errors(probabilities, np.array([0, 0, 0, 1])).tolist() == [2, 1]


def test_the_ensemble_is_the_mean_of_its_models(folder: Path):
    images = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3)).astype(np.uint8)
    each = [Predictor(fold)(images) for fold in fold_folders(folder)]
    assert np.ptp(each, axis=0).max() > 1e-3
    np.testing.assert_allclose(Predictor(folder)(images), np.mean(each, axis=0), atol=1e-6)
    model = smallvit.load(folder)
    assert len(model.members) == 3
    assert [p.probabilities[0] for p in model.predict(images)] == pytest.approx(
        np.mean(each, axis=0).max(axis=1).tolist(), abs=1e-6
    )
    with pytest.raises(ValueError, match=r"an ensemble has no validation images .*: give a threshold"):
        model.choose_threshold(0.9)


def test_evaluate_scores_no_image_with_a_model_that_has_seen_it(folder: Path, photos: Path):
    result, data = read_json(folder / "folds.json"), folder.parents[1] / "photos"
    evaluation = smallvit.evaluate(folder, data)
    assert (evaluation.part, len(evaluation.split)) == ("folds", 72)
    assert evaluation.scores.top1 == pytest.approx(result["out_of_fold"]["top1"], abs=1e-3)
    assert any("the one that was not trained on its fold" in note for note in evaluation.notes)
    fold = smallvit.evaluate(folder / "fold-3")
    assert (fold.part, fold.scores.top1) == ("test", pytest.approx(result["folds"][2]["top1"], abs=1e-3))

    other = smallvit.evaluate(folder, photos)  # with other data, the ensemble
    assert (other.part, len(other.split)) == ("train", 72)
    np.testing.assert_allclose(other.scores.probabilities, Predictor(folder)(other.split.images), atol=1e-6)


def test_test_images_that_the_data_came_with_are_for_the_ensemble(folder: Path, photos: Path, tmp_path: Path):
    shutil.copytree(folder.parents[1] / "photos", tmp_path / "photos/train")
    for name in ("blue", "green", "red"):
        (tmp_path / "photos/test" / name).mkdir(parents=True)
        Image.open(photos / name / "1.png").rotate(90).save(tmp_path / "photos/test" / name / "other.png")
    shutil.copytree(folder, tmp_path / "copy")
    for fold in fold_folders(tmp_path / "copy"):
        stored = read_json(fold / "config.json")
        write_json(fold / "config.json", stored | {"config": stored["config"] | {"data": str(tmp_path / "photos")}})
    evaluation = smallvit.evaluate(tmp_path / "copy")
    assert (evaluation.part, len(evaluation.split)) == ("test", 3)
    assert evaluation.notes == (
        "the test images of the data set, which are in none of the folds",
        "the mean of the probabilities of 3 models",
    )
    np.testing.assert_allclose(evaluation.scores.probabilities, Predictor(folder)(evaluation.split.images), atol=1e-6)


def test_what_needs_one_model_says_so(folder: Path, tmp_path: Path):
    one = "has the models of 3 folds, one is needed: give .*fold-1, for example"
    photo = folder.parents[1] / "photos/red/1.png"
    for use in (
        lambda: from_pretrained(folder),
        lambda: export(folder, "safetensors", tmp_path / "model.safetensors"),
        lambda: smallvit.explain(folder, photo, out=tmp_path),
        lambda: smallvit.train(photo.parents[1], init=str(folder)),
    ):
        with pytest.raises(ValueError, match=one):
            use()
    with pytest.raises(ValueError, match=r"photos-3-folds is finished: its results are in .*folds\.json"):
        smallvit.train(resume=folder)
    with pytest.raises(ValueError, match="photos-3-folds exists: choose another --name"):
        smallvit.train(photo.parents[1], folds=3, runs=folder.parent, name=folder.name)


def test_runs_from_before_there_were_folds(folder: Path, tmp_path: Path):
    stored = json.loads((folder / "fold-1/config.json").read_text())
    del stored["config"]["fold"], stored["config"]["folds"]
    write_json(tmp_path / "fold-1/config.json", stored)
    assert TrainConfig.from_json(stored["config"]).folds is None
    assert fold_folders(tmp_path) == []
