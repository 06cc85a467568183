"""User mistakes in training: one line each, an exit code, and nothing left behind."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from smallvit import compare
from smallvit.training.checkpoint import Checkpoints
from tests.runs import QUICK, TINY, assert_same, checkpoints, command, run_command

pytestmark = pytest.mark.usefixtures("as_a_user")


def images(folder: Path, number: int) -> None:
    folder.mkdir(parents=True)
    for i in range(number):
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(folder / f"{i}.png")


def empty(path: Path) -> None:
    path.mkdir()


def one_class(path: Path) -> None:
    images(path / "cats", 4)


def lonely(path: Path) -> None:
    images(path / "cats", 4)
    images(path / "dogs", 1)


def flat(path: Path) -> None:
    images(path, 4)


def fine(path: Path) -> None:
    images(path / "cats", 4)
    images(path / "dogs", 4)


def label_out_of_range(path: Path) -> None:
    np.savez(path.with_suffix(".npz"), images=np.zeros((6, 8, 8), np.uint8), labels=[0, 1, 0, 1, 0, -1])


def a_class_to_validate_alone(path: Path) -> None:
    arrays = dict(train_images=np.zeros((6, 8, 8), np.uint8), train_labels=[0, 2, 0, 2, 0, 2])
    np.savez(path.with_suffix(".npz"), **arrays, val_images=np.zeros((3, 8, 8), np.uint8), val_labels=[0, 1, 2])


MISTAKES: dict[str, tuple[Callable[[Path], None] | None, list[str], str]] = {
    "missing": (None, ["{data}"], "there is no such folder or file"),
    "empty": (empty, ["{data}"], "{data}"),
    "one class": (one_class, ["{data}"], "at least 2 are needed"),
    "a class of one": (lonely, ["{data}"], "dogs"),
    "no class folders": (flat, ["{data}"], "class"),
    "label": (label_out_of_range, ["{data}.npz"], "-1"),
    "a name nearly right": (None, ["cifar11"], "did you mean"),
    "model": (fine, ["{data}", "--model", "vit_tinny_data"], "did you mean 'vit_tiny_data'"),
    "field": (fine, ["{data}", "--fields", "dept=2"], "did you mean 'depth'"),
    "value of a field": (
        fine,
        ["{data}", "--fields", "depth=abc"],
        "cannot be created with depth=abc",
    ),
    "value of a field of a named model": (
        fine,
        ["{data}", "--model", "vit_tiny_data", "--fields", "dim=x"],
        "vit_tiny_data cannot be created with dim=x",
    ),
    "time": (fine, ["{data}", "--minutes", "1", "--epochs", "1"], "both minutes and epochs"),
    "endless": (fine, ["{data}", "--minutes", "inf"], "minutes=inf must be a finite number"),
    "not a number": (fine, ["{data}", "--lr", "nan"], "learning_rate=nan must be a finite number"),
    "seed": (fine, ["{data}", "--seed", "-1"], "seed=-1 must not be negative"),
    "mesh": (fine, ["{data}", *TINY, "--mesh", "data=3"], "mesh 'data=3' is for 3 devices, but there are 1"),
    "batch": (fine, ["{data}", *TINY, "--batch-size", "4", "--accumulate", "3"], "must be divisible by"),
    "balance": (
        a_class_to_validate_alone,
        ["{data}.npz", *TINY, "--balance"],
        "there are no images of '1' to train on, so --balance cannot weigh classes",
    ),
    "resume nothing": (None, ["--resume", "{data}"], "there is no such folder"),
    "resume a foreign folder": (fine, ["--resume", "{data}"], "is not a run folder"),
    "resume otherwise": (fine, ["--resume", "{data}", "--epochs", "3"], "leave out epochs"),
    "from scratch": (fine, ["{data}", "--from-scratch"], "give the run with --resume"),
    "processes": (fine, ["{data}", "--num-processes", "2"], "belong together"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    prepare, args, message = MISTAKES[mistake]
    data, runs = tmp_path / "data", tmp_path / "runs"
    if prepare is not None:
        prepare(data)
    args = [arg.format(data=data) for arg in args]
    where = [] if "--resume" in args else ["--runs", str(runs)]
    assert run_command(monkeypatch, tmp_path, "train", *args, *where) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("smallvit: ")
    assert message.format(data=data) in line
    assert not [path for path in runs.glob("*") if path.name != ".cache"]


@pytest.mark.xdist_group("train_run")
def test_a_loss_that_is_no_number_ends_the_run(photos: Path, env: dict[str, str], tmp_path: Path):
    args = [photos, *TINY, "--epochs", 3, "--learning-rate", "1e38", "--clip", 0, "--warmup", 0, "--runs", tmp_path]
    run = subprocess.run(command(*args), env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "smaller --learning-rate" in run.stderr.splitlines()[-1]


@pytest.mark.xdist_group("train_run")
def test_a_full_disk_keeps_the_last_state(reference: Path, photos: Path, env: dict[str, str], tmp_path: Path):
    env = {**env, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    args = [photos, *QUICK, "--runs", tmp_path, "--name", "full", "--image-size", 12, "--checkpoint-seconds", 0]
    folder = tmp_path / "full"
    # As on a disk that is full for all but small files, of 3 kB.
    limited = [
        "bash",
        "-c",
        'ulimit -f 3; exec "$@"',
        "bash",
        *command(*args, "--cache-dir", reference.parent / ".cache"),
    ]
    run = subprocess.run(limited, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stderr
    # Among the complaints of orbax's threads about a disk that fills up under them.
    assert f"smallvit: cannot write to {folder} (File too large)" in run.stderr
    assert checkpoints(folder) == []
    again = subprocess.run(command("--resume", folder), env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert_same(folder, reference)


def test_a_checkpoint_is_not_begun_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(OSError, match="No space left"):
        Checkpoints(tmp_path / "checkpoints").save(1, {"a": np.zeros(3)}, {})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_comparison_that_cannot_start_claims_nothing(photos: Path, tmp_path: Path):
    out = tmp_path / "comparison"
    with pytest.raises(ValueError, match="nowhere: there is no such folder or file"):
        compare(tmp_path / "nowhere", out=out)
    assert not out.exists()
    for labels in ("first.csv", "second.csv"):
        with pytest.raises(ValueError, match=f"cannot read .*{labels}"):
            compare(photos, labels=tmp_path / labels, out=out)
