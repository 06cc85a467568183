"""Files that are written completely or not at all."""

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
    """The user's cache folder of smallvit."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "smallvit"
    try:
        return Path.home() / ".cache" / "smallvit"
    except RuntimeError:  # no HOME and no entry in /etc/passwd, as in a container that is given a user's number
        folder = Path(tempfile.gettempdir()) / f"smallvit-{os.getuid()}" if hasattr(os, "getuid") else None
        return Path(tempfile.mkdtemp(prefix="smallvit-")) if folder is None else _private(folder)


def _private(folder: Path) -> Path:
    """A folder of this user's alone, or another: programs are kept in it, and run."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    stat = folder.lstat()
    mine = stat.st_uid == os.getuid() and S_ISDIR(stat.st_mode) and not stat.st_mode & 0o022
    return folder if mine else Path(tempfile.mkdtemp(prefix="smallvit-"))


def write_safely(path: Path, write: Callable[[Path], object], keep: Callable[[], bool] = lambda: True) -> None:
    """Under a name of its own until it is whole and on the disk: nobody, after a crash either, sees half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = temporary_name(path)
        handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)  # less what the user's umask takes away
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
    """Beside it, for what will be renamed to it when it is whole."""
    return path.parent / f".{fitting(path.name, 200)}.{token_hex(8)}.tmp"


def fitting(name: str, most: int) -> str:
    """The beginning of a name that takes so many bytes: file systems know 255, and more may be added to it."""
    return os.fsencode(name)[:most].decode(errors="ignore") if len(os.fsencode(name)) > most else name


def trim(folder: Path, limit: int) -> None:
    """Removes files of a cache, those used longest ago first, until the others take no more than `limit` bytes."""
    found = []
    for path in folder.glob("*"):
        with suppress(OSError):  # another process may trim it, too
            stat = path.stat()
            if path.is_file() and not path.name.endswith(".tmp"):
                found.append((stat.st_mtime, stat.st_size, path))
    taken = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if taken <= limit:
            break
        with suppress(OSError):
            path.unlink()
            taken -= size


def sync_folder(folder: Path) -> None:
    """Names are data of their folder: until it is on the disk, too, a power cut undoes a rename."""
    if os.name == "nt":  # which opens no folders, and writes names by itself
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network drives cannot
            raise
    finally:
        os.close(handle)


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
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also of numbers that are too long, and lists that are too deep
        raise ValueError(f"{path} is not valid JSON ({error})") from None
