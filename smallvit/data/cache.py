"""A cache of decoded images on disk, memory-mapped: a large folder opens at once and does not fill the memory."""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from jaxtyping import UInt

from smallvit.common.files import trim, write_safely
from smallvit.data.dataset import Fit
from smallvit.data.decoding import Source, decode
from smallvit.data.progress import in_threads

VERSION = 1  # increase it whenever `decode` changes the pixels it makes of a file
DAY = 86_400
LIMIT = 50 * 10**9  # bytes, size limit of the cache folder; the least recently used entries are removed first


def decoded(
    files: Sequence[tuple[Callable[[], Source], str]],
    size: tuple[int, int],
    channels: int,
    fit: Fit,
    cache_dir: Path,
    depth: int = 8,
) -> UInt[np.ndarray, "n H W c"] | dict[int, str]:
    """Decodes the files, each given with a hash of its content; or returns the errors by row.

    Both results are cached. An OSError says nothing about the image: it is raised and not cached. The name of an entry
    depends only on the contents, so an entry is wrong only if it is damaged, and runs that write it at the same time
    write the same bytes.
    """
    contents = [content for _, content in files]
    settings = json.dumps([VERSION, size, channels, fit, contents, *([] if depth == 8 else [depth])])
    key = hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()
    shape, dtype = (len(files), *size, channels), np.dtype(np.uint8 if depth == 8 else np.uint16)
    images_file, unreadable_file = cache_dir / f"{key}.npy", cache_dir / f"{key}.json"

    if (images := _open(images_file, shape, dtype)) is not None:
        return images
    try:
        return {int(row): reason for row, reason in json.loads(unreadable_file.read_text()).items()}
    except (OSError, ValueError, AttributeError):  # missing or damaged
        pass

    unreadable: dict[int, str] = {}

    def write(temporary: Path) -> None:
        images = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        _reserve(temporary)

        def decode_row(row: int) -> None:
            try:
                images[row] = decode(
                    files[row][0](), size, channels, fit, depth=depth
                )  # from memory: the bytes that were hashed
            except ValueError as error:
                unreadable[row] = str(error)

        in_threads(decode_row, range(len(files)), f"decoding {len(files):,} images")
        images.flush()

    _make_room(cache_dir, int(np.prod(shape)) * dtype.itemsize)
    write_safely(images_file, write, keep=lambda: not unreadable)
    if unreadable:
        write_safely(unreadable_file, lambda temporary: temporary.write_text(json.dumps(unreadable)))
        return unreadable
    images = _open(images_file, shape, dtype)
    assert images is not None
    return images


def _open(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> UInt[np.ndarray, "n H W c"] | None:
    try:
        images = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError):  # missing or incomplete
        return None
    whole = path.stat().st_size == images.offset + images.nbytes
    if not (whole and images.shape == shape and images.dtype == dtype):
        return None
    with suppress(OSError):  # the file may belong to another user
        os.utime(path)  # marks it as recently used
    return images


def _make_room(cache_dir: Path, size: int) -> None:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        for left in cache_dir.glob(".*.tmp"):  # from runs that were killed
            if time.time() - left.stat().st_mtime > DAY:
                left.unlink(missing_ok=True)
        trim(cache_dir, LIMIT - size)
        free = shutil.disk_usage(cache_dir).free
    except OSError as error:
        raise ValueError(f"cannot write to {cache_dir}: {error.strerror}; choose another cache folder") from None
    if free < size * 1.01 + 1e6:
        raise _no_room(size, cache_dir, free)


def _reserve(path: Path) -> None:
    """Reserves the disk space: if the disk fills up while a memory map is written, the process is killed."""
    size = path.stat().st_size
    if not hasattr(os, "posix_fallocate"):  # Linux only
        return
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _no_room(size, path.parent, shutil.disk_usage(path.parent).free) from None
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a disk that cannot reserve space
                raise


def _no_room(size: int, cache_dir: Path, free: int) -> ValueError:
    return ValueError(
        f"the decoded images take {size / 1e9:.1f} GB, {cache_dir} has {free / 1e9:.1f} GB: "
        "choose a smaller image size or another cache folder"
    )
