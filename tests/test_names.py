"""Harmful names of classes and files: in training, report, pictures, prediction and server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from smallvit.common.text import shown
from smallvit.runs.prediction import Predictor
from smallvit.serving import make_app
from tests.runs import QUICK, command
from tests.served import photo

CLASSES = {
    "latin-1": b"caf\xe9",
    "escape sequence": b"\x1b[31mred\x1b]0;title\x07",
    "right to left": "\u05e9\u05dc\u05d5\u05dd".encode(),
    "turned around": "\u202egpj.exe".encode(),
    "255 bytes": b"x" * 255,
    "markup": b"<b>[red]$x_1$",
}


def test_what_is_shown():
    assert shown("café 日本 שלום <b>") == "café 日本 שלום <b>"
    assert shown(os.fsdecode(b"caf\xe9")) == "caf\ufffd"
    assert shown("\x1b[31m\u202e\n\ud800") == "\ufffd[31m\ufffd\ufffd\ufffd"


@pytest.fixture(scope="module")
def run(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A run on such a folder, and its output."""
    top = tmp_path_factory.mktemp("names")
    data = os.fsencode(top) + b"/d\xe4ta"
    for label, name in enumerate(CLASSES.values()):
        os.makedirs(data + b"/" + name)
        for i in range(6):
            pixels = np.random.default_rng(100 * label + i).integers(0, 60, (12, 12, 3)) + 30 * label
            Image.fromarray(pixels.astype(np.uint8)).save(os.fsdecode(data + b"/" + name + b"/\x1b[2J%d.png" % i))
    args = command(os.fsdecode(data), *QUICK, "--epochs", 1, "--runs", top / "runs", "--image-size", 12)
    done = subprocess.run(args, env={**env, "PYTHONUTF8": "1"}, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in (top / "runs").iterdir() if path.name != ".cache")
    return folder, done.stdout + done.stderr


@pytest.mark.xdist_group("train_run")
def test_training_says_nothing_harmful_and_writes_everything(run: tuple[Path, bytes]):
    folder, printed = run
    text = printed.decode()  # it is UTF-8
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "images of 6 classes" in text
    page = (folder / "report.html").read_text()
    for harmful in ("\x1b", "\u202e", "<b>"):
        assert harmful not in page
    assert "\u05e9\u05dc\u05d5\u05dd" in page
    mistakes = (folder / "mistakes.csv").read_bytes()
    assert b"/d\xe4ta/" in mistakes
    assert "%1B%5B2J" in page  # links to the files
    for picture in ("confusion.png", "worst-mistakes.png", "attention.png"):
        with Image.open(folder / picture) as image:
            image.load()
    assert "\x1b" not in (folder / "log.txt").read_text()
    # What is stored is the name itself.
    assert set(json.loads((folder / "model/config.json").read_text())["classes"]) == set(
        map(os.fsdecode, CLASSES.values())
    )


@pytest.mark.xdist_group("train_run")
def test_prediction_and_explanation(run: tuple[Path, bytes], env: dict[str, str], tmp_path: Path):
    folder, _ = run
    files = [tmp_path / name for name in (os.fsdecode(b"\xe9\x1b[31m.png"), "y" * 251 + ".png")]
    for i, file in enumerate(files):
        file.write_bytes(photo(i))
    broken = tmp_path / "\x1b[31m.jpg"
    broken.write_bytes(b"no image")
    for words in (["predict", folder, *files, broken], ["explain", folder, *files, broken, "--out", tmp_path / "out"]):
        ask = [sys.executable, "-m", "smallvit.cli", *map(str, words)]
        done = subprocess.run(ask, env={**env, "PYTHONUTF8": "1"}, capture_output=True, timeout=200)
        assert done.returncode == 1, done.stderr
        assert b"Traceback" not in done.stderr
        assert b"\x1b" not in done.stdout + done.stderr
        (done.stdout + done.stderr).decode()
    assert len(list((tmp_path / "out").iterdir())) == 2


@pytest.mark.xdist_group("train_run")
def test_the_server_answers(run: tuple[Path, bytes]):
    folder, _ = run
    with TestClient(make_app(Predictor(folder)), base_url="http://localhost") as client:
        answer = client.post("/predict", files={"image": ("\x1b[31m.png", photo())})
        assert answer.status_code == 200
        assert "\x1b" not in answer.json()["images"][0]["name"]
        classes = client.get("/model").json()["classes"]
        assert "caf\ufffd" in classes
        assert {each["class"] for each in answer.json()["images"][0]["classes"]} == set(classes)
