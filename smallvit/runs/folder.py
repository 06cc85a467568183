"""The run folder: configuration, results, and everything needed to resume."""

import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from typing import Any

from smallvit.common.files import (
    make_folder,
    read_json,
    sync_folder,
    temporary_name,
    truncated,
    write_bytes,
    write_json,
)
from smallvit.common.text import as_csv, shown

CONFIG, PLAN, RESULT, METRICS = "config.json", "plan.json", "result.json", "metrics.csv"
MODEL, CHECKPOINTS, LOG, REPORT = "model", "checkpoints", "log.txt", "report.html"
DAY = 86_400
FOLDS = "folds.json"  # results of a cross-validation, next to the run folders of its folds
CACHE = ".cache"  # decoded images, next to the run folders


def run_folder(path: str | Path) -> Path:
    """Returns the run folder of a model folder, or the path itself."""
    path = Path(path)
    return path.parent if path.name == MODEL else path


def fold_folder(folder: Path, number: int) -> Path:
    return folder / f"fold-{number}"


def fold_folders(path: str | Path) -> list[Path]:
    """Returns the run folders of a cross-validation, finished or not; an empty list for other folders."""
    config = fold_folder(Path(path), 1) / CONFIG
    number = (read_json(config)["config"].get("folds") or 0) if config.exists() else 0
    return [fold_folder(Path(path), i) for i in range(1, number + 1)]


def finished_folds(path: str | Path) -> list[Path]:
    """Returns the run folders of a cross-validation; raises a ValueError if some are not finished."""
    folders = fold_folders(path)
    done = sum((folder / RESULT).exists() for folder in folders)
    if done < len(folders):
        raise ValueError(
            f"{path} has {done} of {len(folders)} folds: `smallvit train --resume {path}` trains the others"
        )
    return folders


def check_name(runs: Path, name: str | None) -> None:
    """Raises a ValueError if the folder exists: existing folders are never written to."""
    _check_path(runs / (name or ""))
    if name and (runs / name).exists() and not _is_empty(runs / name):
        raise ValueError(f"{runs / name} exists: choose another --name, or resume it with --resume {runs / name}")


def _check_path(folder: Path) -> None:
    path = folder.absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path} is not UTF-8, as checkpoints need: choose another folder") from None


def new_name(runs: Path, name: str | None, default: str) -> str:
    """Returns `name`, or the first free one of default, default-2, ...; raises a ValueError if `name` is taken."""
    check_name(runs, name)
    default = truncated(shown(default).replace("\N{REPLACEMENT CHARACTER}", "_"), 200)
    names = chain([default], (f"{default}-{i}" for i in count(2)))
    return name or next(free for free in names if not (runs / free).exists())


def create_run(runs: Path, name: str | None, default: str, config: dict[str, Any]) -> Path:
    """Creates a folder with the configuration, named by `new_name`."""
    free = new_name(runs, name, default)
    started_by = Path(sys.argv[0]).name in ("smallvit", "__main__.py", "cli.py")
    command = shlex.join(["smallvit", *sys.argv[1:]]) if started_by else None
    for left in runs.glob(".*.tmp"):  # left by killed processes
        if time.time() - left.stat().st_mtime > DAY:
            shutil.rmtree(left, ignore_errors=True)
    making = temporary_name(runs / free)
    try:
        make_folder(making)
        write_json(making / CONFIG, {"command": command, "config": config, "versions": versions()})
        making.rename(runs / free)  # atomic: a run folder never lacks its configuration
        sync_folder(runs)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        raise ValueError(f"cannot create {runs / free}: {error.strerror}") from None
    return runs / free


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def open_run(folder: Path) -> dict[str, Any]:
    """Returns the configuration of an unfinished run."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give a run folder of `smallvit train`")
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} is not a run folder, it has no {CONFIG}: give a run folder of `smallvit train`")
    if (folder / RESULT).exists():
        raise ValueError(f"{folder} is finished: its results are in {folder / RESULT}")
    _check_path(folder)
    stored = read_json(folder / CONFIG)
    if not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
        raise ValueError(f"{folder / CONFIG} is not that of a run: give a run folder of `smallvit train`")
    return stored["config"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the run against other processes; the lock is released when the process ends, however it ends."""
    from filelock import FileLock, Timeout

    try:
        held = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout:
        raise ValueError(f"{folder} is in use by another process: wait until it ends") from None
    with held:
        for left in chain(folder.glob(".*.tmp"), (folder / MODEL).glob(".*.tmp")):  # left by a killed process
            left.unlink(missing_ok=True)
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
    names = list(rows[0])
    write_bytes(folder / METRICS, as_csv([names, *([row[name] for name in names] for row in rows)]).encode())
