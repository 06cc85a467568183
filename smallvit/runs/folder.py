"""The run folder: configuration, results, and all that is needed to resume."""

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
    """The run folder of a model folder, or the path itself."""
    path = Path(path)
    return path.parent if path.name == MODEL else path


def check_name(runs: Path, name: str | None) -> None:
    """Raises if the folder exists: nothing is ever written into an existing folder."""
    if name and (runs / name).exists():
        raise ValueError(f"{runs / name} exists: choose another --name, or resume it with --resume {runs / name}")


def create_run(runs: Path, name: str | None, default: str, config: dict[str, Any]) -> Path:
    """Creates a folder with the configuration: `name`, or the first free one of default, default-2, ..."""
    check_name(runs, name)
    names = chain([default], (f"{default}-{i}" for i in count(2)))
    free = name or next(each for each in names if not (runs / each).exists())
    try:
        (runs / free).mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cannot create {runs / free}: {error.strerror}") from None
    command = (
        shlex.join(["smallvit", *sys.argv[1:]])
        if Path(sys.argv[0]).name in ("smallvit", "__main__.py", "cli.py")
        else None
    )
    write_json(runs / free / CONFIG, {"command": command, "config": config, "versions": versions()})
    return runs / free


def open_run(folder: Path) -> dict[str, Any]:
    """The configuration of an unfinished run."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a run folder of `smallvit train`")
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} is not a run folder, it has no {CONFIG}: give a run folder of `smallvit train`")
    if (folder / RESULT).exists():
        raise ValueError(f"{folder} is finished: its results are in {folder / RESULT}")
    return read_json(folder / CONFIG)["config"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from the run; the lock ends with the process, however it ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use by another process: wait until it ends") from None
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
