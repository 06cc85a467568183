"""A folder of images: PATH/<class>/*, or PATH/{train,val,test}/<class>/*."""

import errno
import hashlib
import io
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from smallvit.data.cache import decoded
from smallvit.data.dataset import Dataset, Fit, Preprocess, Split
from smallvit.data.decoding import SUFFIXES, header
from smallvit.data.progress import in_threads
from smallvit.data.splits import choose_size, mean_and_std, split_rest

LAYOUT = "one folder for each class, PATH/<class>/*.jpg, or PATH/{train,val,test}/<class>/*.jpg"
SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
SHOWN = 3  # names in a note
WAITS = (0.2, 1.0)  # seconds, before a file is read again


class Listed(NamedTuple):
    path: Path
    part: str
    label: int


class Found(NamedTuple):
    path: Path
    part: str
    label: int
    content: str  # hash
    size: tuple[int, int]
    grey: bool


def load_folder(folder: Path, *, image_size: tuple[int, int] | None, fit: Fit, seed: int, cache_dir: Path) -> Dataset:
    classes, listed, notes = _list(folder)
    scanned = in_threads(_scan, listed, f"reading {len(listed):,} files")
    found = [entry for entry in scanned if isinstance(entry, Found)]
    unreadable = [entry for entry in scanned if isinstance(entry, str)]

    while True:
        _check(folder, classes, found, unreadable)
        channels = 1 if all(entry.grey for entry in found) else 3
        size = image_size or choose_size((f.size for f in found), np.array([min(f.size) for f in found]))
        parts, how = _split(found, classes, seed)
        rows = [entry for part in parts.values() for entry in part]
        images = _decoded(rows, size, channels, fit, cache_dir)
        if not isinstance(images, dict):
            break
        # Sound at its beginning, broken further on. The split must not count it.
        unreadable += images.values()
        broken = {rows[row].path for row in images}
        found = [entry for entry in found if entry.path not in broken]

    splits, start = {}, 0
    for part, entries in parts.items():
        splits[part] = Split(
            images[start : start + len(entries)],
            np.array([entry.label for entry in entries], np.int32),
            [entry.path.relative_to(folder).as_posix() for entry in entries],
        )
        start += len(entries)
    mean, std = mean_and_std(splits["train"].images)
    notes = [
        _summary(classes, found),
        how,
        *notes,
        *_unreadable_note(folder, unreadable),
        *_missing_classes(classes, parts),
        *_duplicates(folder, parts),
    ]
    return Dataset(
        folder.resolve().name,
        tuple(classes),
        splits["train"],
        splits["val"],
        splits.get("test"),
        Preprocess(size, channels, fit, mean, std),
        tuple(notes),
    )


def load_test_folder(
    folder: Path, classes: Sequence[str], preprocess: Preprocess, cache_dir: Path
) -> tuple[str, Split, list[str]]:
    """What to test a model of these classes on: test if there is one, else val, else train or all of the folder."""
    folders = _folders(folder)
    parts = _parts(folder, folders)
    split = bool(parts) and (len(parts) == len(folders) or ("train" in parts and len(parts) > 1))
    part = next(part for part in ("test", "val", "train") if part in parts) if split else "train"
    top = parts[part] if split else folder
    numbers = {name: number for number, name in enumerate(classes)}
    listed = [Listed(file, part, numbers.get(path.name, -1)) for path in _folders(top) for file in images_below(path)]
    if not listed:
        raise ValueError(f"{top} holds no images in class folders: expected {LAYOUT}")
    if unknown := sorted({entry.path.relative_to(top).parts[0] for entry in listed if entry.label < 0}, key=natural):
        raise unknown_classes(str(top), unknown, classes)

    scanned = in_threads(_scan, listed, f"reading {len(listed):,} files")
    found = [entry for entry in scanned if isinstance(entry, Found)]
    unreadable = [entry for entry in scanned if isinstance(entry, str)]
    while found:
        images = _decoded(found, preprocess.size, preprocess.channels, preprocess.fit, cache_dir)
        if not isinstance(images, dict):
            labels = np.array([entry.label for entry in found], np.int32)
            names = [entry.path.relative_to(folder).as_posix() for entry in found]
            notes = [*_unreadable_note(folder, unreadable), *_missing_classes(classes, {part: found})]
            return part, Split(images, labels, names), notes
        unreadable += images.values()
        found = [entry for row, entry in enumerate(found) if row not in images]
    (why,) = _unreadable_note(folder, unreadable)
    raise ValueError(f"{top} holds no images that can be read: {why}")


def unknown_classes(where: str, unknown: Sequence[str], classes: Sequence[str]) -> ValueError:
    rule = f"it knows {_some(classes)}; name them alike, or leave others out"
    return ValueError(f"{where} has classes that the model does not know: {_some(unknown)}; {rule}")


def natural(name: str) -> tuple[list[str | int], str]:
    """A key to sort by: image2 stands before image10."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name.casefold())], name


def _list(folder: Path) -> tuple[list[str], list[Listed], list[str]]:
    """The classes and all files that look like images, and notes about the layout."""
    folders = _folders(folder)
    parts = _parts(folder, folders)
    notes = []
    if "train" in parts and len(parts) >= min(2, len(folders)):
        if ignored := [path.name for path in folders if path not in parts.values()]:
            notes.append(f"ignored {', '.join(ignored)} beside {', '.join(path.name for path in parts.values())}")
    elif parts and len(parts) == len(folders):
        raise ValueError(f"{folder} has {' and '.join(p.name for p in parts.values())} but no train: expected {LAYOUT}")
    else:
        parts = {"train": folder}

    names = {part: [path.name for path in _folders(path)] for part, path in parts.items()}
    classes = sorted(names["train"], key=natural)
    for part, path in parts.items():
        if flat := sum(_is_image(file) for file in path.iterdir()):
            if not names[part]:
                raise ValueError(f"{path} has {flat} images that lie in no class folder: expected {LAYOUT}")
            notes.append(f"ignored {flat} images in {path.name} that lie in no class folder")
        if unknown := sorted(set(names[part]) - set(classes), key=natural):
            raise ValueError(f"{path} has classes that {parts['train']} has not: {_some(unknown)}")

    closed: list[OSError] = []
    listed = [
        Listed(file, part, label)
        for part, path in parts.items()
        for label, name in enumerate(classes)
        for file in images_below(path / name, closed.append)
    ]
    if closed:
        names_of = [f"{os.path.relpath(error.filename, folder)} ({error.strerror})" for error in closed]
        notes.append(f"warning: skipped {_count(closed, 'folder')} that cannot be read: {_some(names_of)}")
    if not listed:
        raise ValueError(
            f"{folder} holds no images: expected {LAYOUT}, with files such as .jpg, .png, .webp, .bmp, .gif or .tif"
        )
    return classes, listed, notes


def _parts(folder: Path, folders: Sequence[Path]) -> dict[str, Path]:
    """Of these folders in it, those that are named like a split."""
    parts: dict[str, Path] = {}
    for path in folders:
        if (part := SPLIT_NAMES.get(path.name.lower())) is None:
            continue
        if part in parts:
            raise ValueError(f"{folder} has both {parts[part].name} and {path.name}: which is the {part} split?")
        parts[part] = path
    return parts


def _folders(path: Path) -> list[Path]:
    ignored = (".", "__MACOSX", "@eaDir")  # of archives made on a Mac and of network drives
    try:
        folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(ignored)]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    return sorted(folders, key=lambda entry: natural(entry.name))


def _refuse(error: OSError) -> None:
    raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None


def images_below(folder: Path, failed: Callable[[OSError], None] = _refuse) -> Iterable[Path]:
    """In natural order; `failed` is told of folders that cannot be read."""
    if not folder.is_dir():
        return
    for parent, folders, files in os.walk(folder, onerror=failed):
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural)
        yield from (path for name in sorted(files, key=natural) if _is_image(path := Path(parent, name)))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _scan(entry: Listed) -> Found | str:
    """The hash of the content and what the header says; or why the file cannot be used."""
    try:
        content = _read(entry.path)
        height, width, grey = header(_Bytes(content, entry.path))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT):  # of the disk or network, not of the file
            raise ValueError(f"cannot read {entry.path}: {error.strerror}") from None
        return f"cannot read {entry.path}: {error.strerror}"
    except ValueError as error:
        return str(error)
    return Found(*entry, _hash(content), (height, width), grey)


class _Bytes(io.BytesIO):
    """The content of a file, with its name."""

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(content)
        self.name = str(path)


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content).hexdigest()[:32]


def _read(path: Path) -> bytes:
    """Again after a moment where the disk or the network fails: such errors often pass."""
    for wait in WAITS:
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENFILE, errno.EMFILE):
                raise
            time.sleep(wait)
    return path.read_bytes()


def _read_again(entry: Found) -> io.BytesIO:
    """The very bytes that were hashed: others would be kept under a name that is not theirs."""
    content = _read(entry.path)
    if _hash(content) != entry.content:
        raise OSError(errno.ESTALE, "it changed while the folder was read, start again when it is whole", entry.path)
    return _Bytes(content, entry.path)


def _decoded(
    entries: Sequence[Found], size: tuple[int, int], channels: int, fit: Fit, cache_dir: Path
) -> UInt8[np.ndarray, "n H W c"] | dict[int, str]:
    files = [(partial(_read_again, entry), entry.content) for entry in entries]
    try:
        return decoded(files, size, channels, fit, cache_dir)
    except OSError as error:
        if error.filename is None:
            raise
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None


def _check(folder: Path, classes: Sequence[str], found: Sequence[Found], unreadable: Sequence[str]) -> None:
    why = "".join(f" ({note})" for note in _unreadable_note(folder, unreadable))
    if len(classes) < 2:
        raise ValueError(f"{folder} has the only class {classes[0]!r}, there must be 2 at least: expected {LAYOUT}")
    counts = Counter(entry.label for entry in found if entry.part == "train")
    # One to train on is enough where there are others to validate on.
    least = 1 if any(entry.part == "val" for entry in found) else 2
    if few := [f"{name!r} ({counts[label]})" for label, name in enumerate(classes) if counts[label] < least]:
        images = f"{least} image{'s' * (least > 1)}{' in train' * any(entry.part != 'train' for entry in found)}"
        raise ValueError(f"{folder} has classes with fewer than {images}: {_some(few)}; add some or remove them{why}")


def _split(found: Sequence[Found], classes: Sequence[str], seed: int) -> tuple[dict[str, list[Found]], str]:
    given: dict[str, list[Found]] = {}
    for entry in found:
        given.setdefault(entry.part, []).append(entry)
    labels = {part: np.array([entry.label for entry in entries]) for part, entries in given.items()}
    rows, how = split_rest(labels, classes, seed, (entry.content for entry in given["train"]))
    return {
        part: given[source] if indices is None else [given[source][i] for i in indices]
        for part, (source, indices) in rows.items()
    }, how


def _summary(classes: Sequence[str], found: Sequence[Found]) -> str:
    sizes = sorted({entry.size for entry in found}, key=lambda size: (size[0] * size[1], size))
    text = [f"{height} x {width}" for height, width in sizes]
    spread = f"all {text[0]}" if len(sizes) == 1 else f"from {text[0]} to {text[-1]} pixels"
    counts = Counter(entry.label for entry in found).most_common()
    (most, largest), (least, smallest) = counts[0], counts[-1]
    balance = f"{largest:,} of each"
    if smallest != largest:
        balance = f"from {smallest:,} ({classes[least]}) to {largest:,} ({classes[most]}) of each"
    return f"{len(found):,} images of {len(classes)} classes, {balance}, {spread}"


def _unreadable_note(folder: Path, unreadable: Sequence[str]) -> list[str]:
    short = [reason.removeprefix("cannot read ").replace(f"{folder}{os.sep}", "") for reason in unreadable]
    return [f"skipped {_count(short, 'file')} that cannot be read: {_some(short)}"] if short else []


def _missing_classes(classes: Sequence[str], parts: dict[str, list[Found]]) -> list[str]:
    notes = []
    for part, entries in parts.items():
        present = {entry.label for entry in entries}
        if missing := [name for label, name in enumerate(classes) if label not in present]:
            notes.append(f"{part} has no images of {_some(missing)}")
    return notes


def _duplicates(folder: Path, parts: dict[str, list[Found]]) -> list[str]:
    """The same file in train and elsewhere makes results look better than they are; in two classes, worse."""
    trained = {entry.content: entry for entry in parts["train"]}
    notes = []
    for part, entries in parts.items():
        pairs = [(trained[e.content], e) for e in entries if e.content in trained and part != "train"]
        if pairs:
            names = [f"{a.path.relative_to(folder)} = {b.path.relative_to(folder)}" for a, b in pairs]
            notes.append(f"warning: {_count(pairs, 'image')} of {part} also in train: {_some(names)}")
    first: dict[str, Found] = {}
    clashes = []
    for entry in (entry for entries in parts.values() for entry in entries):
        other = first.setdefault(entry.content, entry)
        if other.label != entry.label:
            clashes.append(f"{other.path.relative_to(folder)} = {entry.path.relative_to(folder)}")
    if clashes:
        notes.append(f"warning: {_count(clashes, 'image')} in two classes: {_some(clashes)}")
    return notes


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items):,} {noun}{'s' * (len(items) != 1)}"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")
