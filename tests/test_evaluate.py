"""Evaluation of a trained model on its own test images and on others."""

import csv
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from smallvit.data import Preprocess
from smallvit.evaluation import evaluate
from smallvit.runs.calibration import Calibration
from smallvit.runs.prediction import Predictor
from smallvit.runs.saved import Spec, from_pretrained, save_calibration, save_model
from smallvit.runs.scores import softmax
from tests.runs import run_command

SPEC = Spec("sl_vit_tiny_data", 3, (12, 12), dict(dim=16, depth=1, heads=2, mlp_dim=16, patch_size=4))
CLASSES = ("red", "green", "blue")  # not in the order of the folders


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    variables = jax.jit(SPEC.create().init)(jax.random.key(0), jnp.zeros((1, 12, 12, 3)))
    save_model(folder, SPEC, variables, CLASSES, Preprocess((12, 12), 3, "crop", (0.5,) * 3, (0.2,) * 3))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SMALLVIT_FAST_ENV", "0")


def test_all_images_of_a_folder_under_the_models_labels(model: Path, photos: Path):
    found = evaluate(model, photos, batch_size=50)
    assert (found.data, found.part, len(found.split)) == ("photos", "train", 72)
    predictor = Predictor(from_pretrained(model))
    right = 0
    for number, name in enumerate(CLASSES):
        files = sorted((photos / name).iterdir())
        predicted = predictor(np.stack([predictor.decode(file) for file in files])).argmax(axis=1)
        np.testing.assert_array_equal(found.scores.confusion[number], np.bincount(predicted, minlength=3))
        right += (predicted == number).sum()
    assert found.scores.top1 == pytest.approx(100 * right / 72)


@pytest.mark.parametrize("parts", [["train", "val", "test"], ["train", "val"], ["test"], ["val"]])
def test_test_before_val(parts: list[str], model: Path, photos: Path, tmp_path: Path):
    for number, part in enumerate(parts, start=1):
        for name in ("blue", "red"):  # one class less than the model has, and few images
            (tmp_path / "split" / part / name).mkdir(parents=True)
            for i in range(number):
                shutil.copy(photos / name / f"{i}.png", tmp_path / "split" / part / name)
    found = evaluate(model, tmp_path / "split")
    assert found.part == parts[-1]
    assert found.scores.confusion.sum(axis=1).tolist() == [len(parts), 0, len(parts)]
    assert found.notes == (f"{parts[-1]} has no images of green",)


def test_a_folder_without_splits_and_without_a_class(model: Path, photos: Path, tmp_path: Path):
    for name in ("blue", "red"):
        shutil.copytree(photos / name, tmp_path / "field" / name)
    assert evaluate(model, tmp_path / "field").notes == ("field has no images of green",)


def test_arrays_of_other_sizes_and_channels(model: Path, tmp_path: Path):
    grey = np.random.default_rng(0).integers(0, 256, (6, 24, 24)).astype(np.uint8)
    classes = np.array(["blue", "red"])
    np.savez(tmp_path / "a.npz", images=grey, labels=[0, 1, 0, 1, 1, 1], classes=classes)
    found = evaluate(model, tmp_path / "a.npz")
    assert found.split.images.shape == (6, 12, 12, 3)
    assert found.scores.confusion.sum(axis=1).tolist() == [4, 0, 2]


def test_broken_images_are_left_out(model: Path, photos: Path, tmp_path: Path):
    (tmp_path / "few/red").mkdir(parents=True)
    shutil.copy(photos / "red/0.png", tmp_path / "few/red")
    (tmp_path / "few/red/1.png").write_bytes((photos / "red/1.png").read_bytes()[:-200])
    found = evaluate(model, tmp_path / "few")
    assert len(found.split) == 1
    assert "skipped 1 file that cannot be read: red/1.png" in found.notes[0]
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["per_class"][1]["recall"] is None


def test_test_time_flips_are_said(model: Path, photos: Path):
    plain, flipped = evaluate(model, photos), evaluate(model, photos, flip=True)
    assert np.abs(plain.logits - flipped.logits).max() > 1e-3
    assert "test-time flips" in " ".join(flipped.to_json()["notes"])
    assert "test-time flips" not in " ".join(plain.notes)


def test_a_temperature_changes_probabilities_but_no_answers(model: Path, photos: Path, tmp_path: Path):
    warm = tmp_path / "warm"
    shutil.copytree(model, warm)
    save_calibration(warm, Calibration(2.0, 60, ((0.0, 60, 30),)))
    before, after = evaluate(model, photos), evaluate(warm, photos)
    assert (before.temperature, after.temperature) == (1, 2)
    np.testing.assert_array_equal(before.scores.confusion, after.scores.confusion)
    np.testing.assert_allclose(before.scores.loss, after.uncalibrated.loss, rtol=1e-6)
    assert before.scores.probabilities.max() > after.scores.probabilities.max()
    stored = after.to_json()
    assert stored["uncalibrated"] == {key: before.to_json()[key] for key in ("loss", "ece")}
    assert stored["ece"] != stored["uncalibrated"]["ece"]

    images = np.stack([Predictor(model).decode(file) for file in sorted((photos / "red").iterdir())[:3]])
    logits = np.log(Predictor(model)(images))
    np.testing.assert_allclose(Predictor(warm)(images), softmax(logits / 2), atol=1e-5)


def test_mistakes_are_listed_with_their_files(model: Path, photos: Path, tmp_path: Path):
    shutil.copytree(photos, tmp_path / "photos")
    name = os.fsdecode(b'caf\xe9, "x"\n.png')
    os.rename(tmp_path / "photos/red/0.png", tmp_path / "photos/red" / name)
    found = evaluate(model, tmp_path / "photos", out=tmp_path / "out")
    with (tmp_path / "out/mistakes.csv").open(errors="surrogateescape", newline="") as file:
        rows = list(csv.DictReader(file))
    predictor, wrong = Predictor(model), {}
    for file in (tmp_path / "photos").rglob("*.png"):
        (row,) = predictor(predictor.decode(file)[None])
        if CLASSES[row.argmax()] != file.parent.name:
            wrong[str(file)] = (file.parent.name, CLASSES[row.argmax()])
    assert 0 < len(wrong) == len(found.mistakes)
    assert {row["file"]: (row["true_class"], row["predicted_class"]) for row in rows} == wrong
    probabilities = [float(row["probability"]) for row in rows]
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(each.is_file for each in found.mistakes)


def test_images_without_files_keep_their_names(model: Path, tmp_path: Path):
    images = np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3)).astype(np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=[0, 1, 0, 1, 1, 1], classes=np.array(["blue", "red"]))
    mistakes = evaluate(model, tmp_path / "a.npz").mistakes
    assert mistakes
    assert not any(each.is_file for each in mistakes)
    assert all(each.file.startswith("train[") for each in mistakes)


@pytest.mark.xdist_group("train_run")
def test_a_run_on_its_own_test_images(reference: Path, photos: Path, tmp_path: Path, monkeypatch, capfd):
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    result = json.loads((folder / "result.json").read_text())
    assert run_command(monkeypatch, tmp_path, "evaluate", folder) == 0
    stored = json.loads((folder / "evaluation/evaluation.json").read_text())
    assert (stored["top1"], stored["top1_interval"]) == (result["test_top1"], result["test_interval"])
    assert stored["uncalibrated"]["loss"] == result["test_loss"]
    assert (stored["part"], stored["images"], stored["top5"]) == ("test", 6, 100)
    assert stored["images_per_second"] > 0
    assert [sum(row) for row in stored["confusion"]] == [2, 2, 2]
    assert {row["class"] for row in stored["per_class"]} == {"blue", "green", "red"}
    for name in ("confusion", "reliability", "worst-mistakes"):
        with Image.open(folder / f"evaluation/{name}.png") as picture:
            picture.load()
    printed = capfd.readouterr().out
    assert f"{result['test_top1']:.2f} %" in printed
    assert "top-5" not in printed  # of three classes
    low, high = result["test_interval"]
    assert f"(95 % interval {low:.1f} to {high:.1f})" in printed
    assert f"warning: only 6 test images: the true accuracy is somewhere between {low:.0f} and {high:.0f} %" in printed

    # The folder that it was trained on, named: not the images that it has seen.
    found = evaluate(folder / "model", photos)
    assert (found.part, len(found.split)) == ("test", 6)

    config = json.loads((folder / "config.json").read_text())
    changed = tmp_path / "changed"
    shutil.copytree(photos, changed)
    (changed / "red/3.png").unlink()
    config["config"]["data"] = str(changed)
    (folder / "config.json").write_text(json.dumps(config))
    assert "has changed since training" in evaluate(folder).notes[-1]

    shutil.rmtree(changed)
    assert run_command(monkeypatch, tmp_path, "evaluate", folder, "--out", tmp_path / "none") == 2
    assert f"is not available ({changed}: there is no such folder or file): give other data" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()


MISTAKES = {
    "no model": (["{photos}"], "{photos} holds no model"),
    "no data": (["{model}"], "the data that {model} was trained on is unknown: give the data"),
    "missing": (["{model}", "{tmp}/x"], "{tmp}/x: there is no such folder or file"),
    "a name nearly right": (["{model}", "cifar11"], "cifar11: there is no such folder or file, did you mean 'cifar10'"),
    "other classes": (["{model}", "{tmp}/other"], "{tmp}/other has classes that the model does not know: cat, dog; it"),
    "other names": (["{model}", "fashion-mnist-10k"], "fashion-mnist-10k has classes that the model does not know: T-"),
    "no class folders": (["{model}", "{photos}/red"], "{photos}/red holds no images in class folders"),
    "all broken": (["{model}", "{tmp}/broken"], "{tmp}/broken holds no readable images: skipped 1 file"),
    "batch": (["{model}", "{photos}", "--batch-size", "0"], "batch_size=0 must be at least 1"),
    "out": (["{model}", "{photos}", "--out", "{photos}/red/0.png"], "cannot write to {photos}/red/0.png"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, model: Path, photos: Path, tmp_path: Path, monkeypatch, capfd):
    for name in ("other/cat", "other/dog", "broken/red"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.png").write_bytes(b"none")
    args, message = MISTAKES[mistake]
    places = {"model": model, "photos": photos, "tmp": tmp_path}
    before = sorted(model.rglob("*"))
    assert run_command(monkeypatch, tmp_path, "evaluate", *(arg.format(**places) for arg in args)) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    *_, line = printed.err.splitlines()
    assert line.startswith(f"smallvit: {message.format(**places)}")
    assert sorted(model.rglob("*")) == before
