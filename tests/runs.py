"""Helpers for the tests of whole training runs."""

import csv
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from PIL import Image

TINY = ["--model", "sl_vit_tiny_data", "--fields", "dim=16", "depth=1", "heads=2", "mlp_dim=16", "drop_path=0.1"]
QUICK = [*TINY, "--epochs", "6", "--batch-size", "16", "--learning-rate", "0.01", "--ema", "0.1"]


def missing(reason: str) -> NoReturn:
    """Skips a test, or fails it in an environment that has everything (.ci/run)."""
    if os.environ.get("SMALLVIT_TEST_ALL"):
        pytest.fail(reason)
    pytest.skip(reason)


def required(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        missing(f"{package} is not installed")


def draw_photos(folder: Path) -> None:
    """Three easy classes of small coloured images."""
    draw = np.random.default_rng(0)
    for label, name in enumerate(("blue", "green", "red")):
        (folder / name).mkdir(parents=True)
        for i in range(24):
            image = draw.integers(0, 120, (12, 12, 3))
            image[..., 2 - label] += 120
            Image.fromarray(image.astype(np.uint8)).save(folder / name / f"{i}.png")


def run_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *args: object) -> int:
    """Runs `smallvit ARGS` in this process, with its own cache, and returns the exit code."""
    from smallvit import cli  # after conftest.py has installed the type checks

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["smallvit", *map(str, args)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "smallvit", "train", *map(str, args)]


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("*.json"))


def assert_same(folder: Path, reference: Path) -> None:
    """Both runs have bitwise the same model and the same metrics."""
    assert (folder / "model/model.safetensors").read_bytes() == (reference / "model/model.safetensors").read_bytes()
    tables = []
    for run in (folder, reference):
        with (run / "metrics.csv").open() as file:
            rows = csv.DictReader(file)
            tables.append([[row[k] for k in ("step", "train_loss", "train_top1", "val_loss")] for row in rows])
    assert tables[0] == tables[1]
