"""Files that are written completely or not at all."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def user_cache() -> Path:
    """The user's cache folder of smallvit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smallvit"


def write_safely(path: Path, write: Callable[[Path], object], keep: Callable[[], bool] = lambda: True) -> None:
    """Under a name of its own until it is whole and on the disk: nobody, after a crash either, sees half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise ValueError(f"cannot write to {path.parent}: {error.strerror}; choose another folder") from None
    try:
        with os.fdopen(handle, "rb") as file:
            write(Path(name))
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's are for their owner alone
        if keep():
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def check_file(path: Path) -> None:
    """Raises, before long work, if its result cannot be written there."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file to write")


def check_folder(path: Path) -> None:
    """The same for a folder."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: give the name of a folder to write to")


def write_bytes(path: Path, content: bytes) -> None:
    write_safely(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """What `write_json` wrote, or a ValueError that names the file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
