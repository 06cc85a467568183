"""The run folder: what was asked for, what came out, and all that is needed to go on."""

import csv
import fcntl
import io
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from typing import Any

from smallvit.common.files import read_json, write_bytes, write_json

CONFIG, PLAN, RESULT, METRICS = "config.json", "plan.json", "result.json", "metrics.csv"
MODEL, CHECKPOINTS, LOG, REPORT = "model", "checkpoints", "log.txt", "report.html"
CACHE = ".cache"  # of decoded images, beside the run folders


def run_folder(path: str | Path) -> Path:
    """The run folder that a path means: itself, or the one that a model folder lies in."""
    path = Path(path)
    return path.parent if path.name == MODEL else path


def check_name(runs: Path, name: str | None) -> None:
    """A folder that exists is never written into, be it a run or not."""
    if name and (runs / name).exists():
        raise ValueError(f"{runs / name} exists: choose another --name, or go on with it by --resume {runs / name}")


def create_run(runs: Path, name: str | None, default: str, config: dict[str, Any]) -> Path:
    """A new folder with the configuration in it: `name`, or the first of default, default-2, ... that is free."""
    check_name(runs, name)
    names = chain([default], (f"{default}-{i}" for i in count(2)))
    free = name or next(each for each in names if not (runs / each).exists())
    try:
        (runs / free).mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cannot make {runs / free}: {error.strerror}") from None
    command = (
        shlex.join(["smallvit", *sys.argv[1:]])
        if Path(sys.argv[0]).name in ("smallvit", "__main__.py", "cli.py")
        else None
    )
    write_json(runs / free / CONFIG, {"command": command, "config": config, "versions": versions()})
    return runs / free


def open_run(folder: Path) -> dict[str, Any]:
    """The configuration of a run that was begun and is not finished."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the run folder that `smallvit train` made")
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} is no run of ours, it has no {CONFIG}: give the folder that `smallvit train` made")
    if (folder / RESULT).exists():
        raise ValueError(f"{folder} is finished: its results are in {folder / RESULT}")
    return read_json(folder / CONFIG)["config"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two processes must not work on one run; the lock goes with the process, however it ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use by another process: wait until that one ends") from None
        yield


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("smallvit", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pillow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def write_metrics(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(folder / METRICS, text.getvalue().encode())
