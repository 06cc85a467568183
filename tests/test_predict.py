"""Prediction with a saved model."""

import csv
import io
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from smallvit import cli
from smallvit.data import Preprocess, find_images
from smallvit.runs.answers import Unreadable, as_csv
from smallvit.runs.prediction import Predictor, predict_files
from smallvit.runs.saved import Spec, save_model

SPEC = Spec("sl_vit_tiny_data", 3, (8, 12), dict(dim=16, depth=1, heads=2, mlp_dim=16, patch_size=4))
PREPROCESS = Preprocess((8, 12), 3, "crop", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    variables = jax.jit(SPEC.create().init)(jax.random.key(0), jnp.zeros((1, 8, 12, 3)))
    save_model(folder, SPEC, variables, ("a", "b", "c"), PREPROCESS)
    return folder


def test_any_number_of_images_with_few_compilations(folder: Path):
    predict = Predictor(folder, largest=8)
    images = np.random.default_rng(0).integers(0, 256, (19, 8, 12, 3)).astype(np.uint8)
    all_at_once = predict(images)
    np.testing.assert_allclose(all_at_once.sum(axis=1), 1, atol=1e-5)
    for number in (1, 2, 3, 5, 8, 9):
        np.testing.assert_allclose(predict(images[:number]), all_at_once[:number], atol=1e-5)
    assert predict._predict._cache_size() == 3  # 1, 4 and 8


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


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *args: object) -> int:
    monkeypatch.setenv("SMALLVIT_FAST_ENV", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["smallvit", "predict", *map(str, args)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command(folder: Path, pictures: Path, tmp_path: Path, monkeypatch, capfd):
    out = {kind: tmp_path / "new" / f"predictions.{kind}" for kind in ("csv", "json")}
    assert run(monkeypatch, tmp_path, folder, pictures, "--csv", out["csv"], "--json", out["json"], "--top", 2) == 1
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
        assert run(monkeypatch, tmp_path, folder, "-", pictures / "2.png", "--json", "-", "--top", 99) == 0
    file, standard_input = json.loads(capfd.readouterr().out)
    assert standard_input["file"] == "-"
    assert standard_input["predictions"] == file["predictions"]
    assert len(file["predictions"]) == 3


def test_names_of_files_may_be_any_bytes(folder: Path, pictures: Path, tmp_path: Path, monkeypatch, capfd):
    name = os.fsdecode(b"caf\xe9\x1b[31m.png")
    os.rename(pictures / "2.png", pictures / name)
    assert run(monkeypatch, tmp_path, folder, pictures / name) == 0
    assert "caf\ufffd\ufffd[31m.png" in capfd.readouterr().out
    (prediction,) = predict_files(folder, [pictures / name])
    assert os.fsencode(as_csv([prediction]).splitlines()[1]).startswith(os.fsencode(pictures / name))


MISTAKES = {
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
    assert run(monkeypatch, tmp_path, *(arg.format(**places) for arg in args)) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"smallvit: {message.format(**places)}")
    assert sorted(pictures.rglob("*")) == before
