"""Atomic file writes, and the user's cache."""

import errno
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from stat import S_ISDIR
from typing import Any


def user_cache() -> Path:
    """The cache folder of smallvit for this user."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "smallvit"
    try:
        return Path.home() / ".cache" / "smallvit"
    except RuntimeError:  # no HOME and no entry in /etc/passwd, as in a container run with a numeric user id
        folder = Path(tempfile.gettempdir()) / f"smallvit-{os.getuid()}" if hasattr(os, "getuid") else None
        return Path(tempfile.mkdtemp(prefix="smallvit-")) if folder is None else _private(folder)


def _private(folder: Path) -> Path:
    """Returns the folder if only this user can write to it, else a new one: programs from it are run."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    stat = folder.lstat()
    mine = stat.st_uid == os.getuid() and S_ISDIR(stat.st_mode) and not stat.st_mode & 0o022
    return folder if mine else Path(tempfile.mkdtemp(prefix="smallvit-"))


def write_safely(path: Path, write: Callable[[Path], object], keep: Callable[[], bool] = lambda: True) -> None:
    """Writes to a temporary file and renames it once it is on disk: a crash never leaves a partial file."""
    try:
        make_folder(path.parent)
        name = temporary_name(path)
        handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)  # the umask applies
    except OSError as error:
        raise ValueError(f"cannot write to {path.parent}: {error.strerror}; choose another folder") from None
    try:
        with os.fdopen(handle, "rb") as file:
            write(name)
            os.fsync(file.fileno())
        if keep():
            os.replace(name, path)
            sync_folder(path.parent)
    finally:
        name.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """A temporary name in the same folder, to be renamed to `path` when complete."""
    return path.parent / f".{truncated(path.name, 200)}.{token_hex(8)}.tmp"


def truncated(name: str, most: int) -> str:
    """Truncates a name to `most` bytes; file systems allow 255, and a suffix may follow."""
    return os.fsencode(name)[:most].decode(errors="ignore") if len(os.fsencode(name)) > most else name


def trim(folder: Path, limit: int) -> None:
    """Removes the least recently used files of a cache until the rest take at most `limit` bytes."""
    files = []
    for path in folder.glob("*"):
        with suppress(OSError):  # another process may trim it at the same time
            stat = path.stat()
            if path.is_file() and not path.name.endswith(".tmp"):
                files.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            break
        with suppress(OSError):
            path.unlink()
            total -= size


def make_folder(folder: Path) -> None:
    """Creates the folder and its parents, and flushes each new entry to disk, since files in it are to survive."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flushes a folder to disk: until then, a power failure can undo a rename in it."""
    if os.name == "nt":  # folders cannot be opened there, and renames are flushed anyway
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network drives cannot sync
            raise
    finally:
        os.close(handle)


def check_file(path: Path) -> None:
    """Raises a ValueError if no file can be written at `path`; call it before long work."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file to write")


def check_folder(path: Path) -> None:
    """Raises a ValueError if no folder can be written at `path`; call it before long work."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: give the name of a folder to write to")


def write_bytes(path: Path, content: bytes) -> None:
    write_safely(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads a JSON file, or raises a ValueError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also numbers that are too long and lists that are too deep
        raise ValueError(f"{path} is not valid JSON ({error})") from None
