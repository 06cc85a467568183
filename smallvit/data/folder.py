"""A folder of images: PATH/<class>/*, PATH/{train,val,test}/<class>/*, or images listed in a table."""

import errno
import hashlib
import io
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt

from smallvit.data.cache import decoded
from smallvit.data.dataset import Dataset, Fit, Preprocess, Scanned, Split
from smallvit.data.decoding import header
from smallvit.data.listing import LAYOUT, count, first_few, list_images, list_to_test, natural
from smallvit.data.near import near_notes
from smallvit.data.progress import in_threads
from smallvit.data.splits import GIVEN_TEST, Fold, Groups, choose_size, mean_and_std, split_rest

WAITS = (0.2, 1.0)  # seconds before each retry of a failed read
LEAST_RESERVE = 1.1  # a smaller one is not worth another decoding
SETTLED = 10 * 10**9  # nanoseconds: the times of a file that changed more recently may not show the next change


class Listed(NamedTuple):
    path: Path
    part: str
    label: int
    group: str


class Readable(NamedTuple):
    path: Path
    part: str
    label: int
    group: str
    content: str  # hash
    state: tuple[int, ...] | None  # of the file before it was read
    size: tuple[int, int]
    grey: bool
    deep: bool
    frames: int


def scan_folder(
    folder: Path,
    *,
    image_size: tuple[int, int] | None,
    fit: Fit,
    seed: int,
    cache_dir: Path,
    labels: Path | None = None,
    group: str | None = None,
    fold: Fold | None = None,
    reserve: float = 1.0,
) -> Scanned:
    classes, files, grouped_by, notes = list_images(folder, labels, group)
    numbers = {name: number for number, name in enumerate(classes)}
    part_of = {"train": "train", "val": "val" if fold is None else "train", "test": "test"}
    listed = [Listed(file.path, part_of[file.part], numbers[file.name], file.group) for file in files]
    scanned = in_threads(_scan, listed, f"reading {len(listed):,} files")

    def load(readable: list[Readable], unreadable: list[str], *, blank: bool) -> Dataset:
        _check(folder, classes, readable, unreadable)
        channels, depth, kind = _kind(folder, readable)
        size = image_size or choose_size((f.size for f in readable), np.array([min(f.size) for f in readable]))
        large = _larger(size, reserve, fit, (f.size for f in readable))
        parts, how = _split(readable, classes, seed, grouped_by, fold)
        rows = [entry for part in parts.values() for entry in part]

        def pixels(entries: list[Readable], size: tuple[int, int]) -> UInt[np.ndarray, "n H W c"] | dict[int, str]:
            if blank:
                return np.broadcast_to((np.uint8 if depth == 8 else np.uint16)(0), (len(entries), *size, channels))
            return _decoded(entries, size, channels, depth, fit, cache_dir)

        def without(broken: dict[int, str]) -> Dataset:
            """Splits again without files whose header is valid, but the rest is broken."""
            paths = {rows[row].path for row in broken}
            sound = [entry for entry in readable if entry.path not in paths]
            return load(sound, [*unreadable, *broken.values()], blank=False)

        images = pixels(rows, size)
        if isinstance(images, dict):
            return without(images)
        larger = None if large == size else pixels(rows[: len(parts["train"]) + len(parts["val"])], large)
        if isinstance(larger, dict):
            return without(larger)

        splits, start = {}, 0
        for part, entries in parts.items():
            splits[part] = Split(
                images[start : start + len(entries)],
                np.array([entry.label for entry in entries], np.int32),
                [_name(folder, entry) for entry in entries],
            )
            start += len(entries)
        mean, std = ((0.0,) * channels, (1.0,) * channels) if blank else mean_and_std(splits["train"].images)
        lines = [
            _summary(classes, readable),
            how,
            *kind,
            *notes,
            *_unreadable_note(folder, unreadable),
            *_missing_classes(classes, parts),
            *_duplicates(folder, parts),
            *_shared_groups(grouped_by, parts),
            *([] if blank else near_notes(splits, known=_equal_rows(parts))),
        ]
        return Dataset(
            folder.resolve().name,
            tuple(classes),
            splits["train"],
            splits["val"],
            splits.get("test"),
            Preprocess(size, channels, fit, mean, std, depth),
            tuple(lines),
            given_test=splits.get(GIVEN_TEST),
            larger=larger,
        )

    readable = [entry for entry in scanned if isinstance(entry, Readable)]
    unreadable = [entry for entry in scanned if isinstance(entry, str)]
    return Scanned(load(readable, unreadable, blank=True), partial(load, readable, unreadable, blank=False))


def load_test_folder(
    folder: Path, classes: Sequence[str], preprocess: Preprocess, cache_dir: Path
) -> tuple[str, Split, list[str]]:
    """Loads images to test a model with these classes on: test if it exists, else val, else train or all."""
    part, top, files = list_to_test(folder)
    if not files:
        raise ValueError(f"{top} holds no images in class folders: expected {LAYOUT}")
    numbers = {name: number for number, name in enumerate(classes)}
    if unknown := sorted({file.name for file in files} - {*classes}, key=natural):
        raise unknown_classes(str(top), unknown, classes)
    listed = [Listed(file.path, part, numbers[file.name], file.group) for file in files]

    scanned = in_threads(_scan, listed, f"reading {len(listed):,} files")
    readable = [entry for entry in scanned if isinstance(entry, Readable)]
    unreadable = [entry for entry in scanned if isinstance(entry, str)]
    while readable:
        images = _decoded(readable, preprocess.size, preprocess.channels, preprocess.depth, preprocess.fit, cache_dir)
        if not isinstance(images, dict):
            labels = np.array([entry.label for entry in readable], np.int32)
            names = [_name(folder, entry) for entry in readable]
            where = folder.name if top == folder else part  # without splits, everything counts as train
            notes = [*_unreadable_note(folder, unreadable), *_missing_classes(classes, {where: readable})]
            if preprocess.depth == 8 and (deep := [entry for entry in readable if entry.deep]):
                notes.append(f"warning: {count(deep, 'image')} of 16 bits converted to 8, which the model takes")
            return part, Split(images, labels, names), notes
        unreadable += images.values()
        readable = [entry for row, entry in enumerate(readable) if row not in images]
    (why,) = _unreadable_note(folder, unreadable)
    raise ValueError(f"{top} holds no readable images: {why}")


def unknown_classes(where: str, unknown: Sequence[str], classes: Sequence[str]) -> ValueError:
    rule = f"its classes are {first_few(classes)}; use the same names, or leave others out"
    return ValueError(f"{where} has classes that the model does not know: {first_few(unknown)}; {rule}")


def _scan(entry: Listed) -> Readable | str:
    """Reads the content hash and the header of a file, or returns why it cannot be used."""
    try:
        state = _state(entry.path)
        content = _read(entry.path)
        height, width, grey, deep, frames = header(_Bytes(content, entry.path))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT):  # an error of disk or network, not the file
            raise ValueError(f"cannot read {entry.path}: {error.strerror}") from None
        return f"cannot read {entry.path}: {error.strerror}"
    except ValueError as error:
        return str(error)
    return Readable(*entry, _hash(content), state, (height, width), grey, deep, frames)


class _Bytes(io.BytesIO):
    """The content of a file, with the file's name."""

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(content)
        self.name = str(path)


def _hash(content: bytes) -> str:
    # With the instructions of today's CPUs it is twice as fast as blake2b.
    return hashlib.sha256(content).hexdigest()[:32]


def _state(path: Path) -> tuple[int, ...] | None:
    """Size and times of a file, which differ once it has changed; None if they might not, or are not known."""
    try:
        stat = path.stat()
    except OSError:
        return None
    if time.time_ns() - stat.st_mtime_ns < SETTLED:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _read(path: Path) -> bytes:
    """Reads a file, with retries: errors of disks and networks are often temporary."""
    for wait in WAITS:
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENFILE, errno.EMFILE):
                raise
            time.sleep(wait)
    return path.read_bytes()


def _read_again(entry: Readable) -> io.BytesIO:
    """Reads the same bytes that were hashed; other bytes would be cached under the wrong name."""
    content = _read(entry.path)
    # Decoding a large photograph takes ten times as long as hashing it.
    unchanged = entry.state is not None and _state(entry.path) == entry.state
    if not unchanged and _hash(content) != entry.content:
        raise OSError(errno.ESTALE, "it changed while the folder was read, start again when it is complete", entry.path)
    return _Bytes(content, entry.path)


def _decoded(
    entries: Sequence[Readable], size: tuple[int, int], channels: int, depth: int, fit: Fit, cache_dir: Path
) -> UInt[np.ndarray, "n H W c"] | dict[int, str]:
    files = [(partial(_read_again, entry), entry.content) for entry in entries]
    try:
        return decoded(files, size, channels, fit, cache_dir, depth)
    except OSError as error:
        if error.filename is None:
            raise
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None


def _larger(size: tuple[int, int], reserve: float, fit: Fit, files: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The size with the reserve, or with the largest one that at least half of the files reach."""
    height, width = size
    reached = [(min if fit == "crop" else max)(high / height, wide / width) for high, wide in files]
    reserve = min(reserve, float(np.quantile(reached, 0.5, method="higher")))
    return size if reserve < LEAST_RESERVE else (round(height * reserve), round(width * reserve))


def _kind(folder: Path, readable: Sequence[Readable]) -> tuple[int, int, list[str]]:
    """The number of channels, the bits per channel, and notes about unusual ones."""
    depth = 16 if all(entry.deep for entry in readable) else 8
    frames = {entry.frames for entry in readable}
    notes = []
    if depth == 8 and any(entry.deep for entry in readable):
        others = [_name(folder, entry) for entry in readable if not entry.deep]
        deep = count(range(len(readable) - len(others)), "image")
        notes.append(f"warning: {deep} of 16 bits converted to 8, since others have 8: {first_few(others)}")
    if len(frames) > 1:
        notes.append(
            f"warning: TIFF stacks have from {min(frames)} to {max(frames)} frames: only the first one is used"
        )
        frames = {1}
    (channels,) = frames
    if channels > 1:
        notes.append(f"the {channels} frames of each TIFF stack are its channels")
    elif not all(entry.grey for entry in readable):
        channels = 3
    if depth == 16:
        notes.append("images have 16 bits per channel, which are kept")
    return channels, depth, notes


def _check(folder: Path, classes: Sequence[str], readable: Sequence[Readable], unreadable: Sequence[str]) -> None:
    skipped = "".join(f" ({note})" for note in _unreadable_note(folder, unreadable))
    if len(classes) < 2:
        raise ValueError(f"{folder} has only the class {classes[0]!r}, at least 2 are needed: expected {LAYOUT}")
    counts = Counter(entry.label for entry in readable if entry.part == "train")
    # One training image is enough if there are validation images.
    minimum = 1 if any(entry.part == "val" for entry in readable) else 2
    if few := [f"{name!r} ({counts[label]})" for label, name in enumerate(classes) if counts[label] < minimum]:
        images = f"{minimum} image{'s' * (minimum > 1)}{' in train' * any(entry.part != 'train' for entry in readable)}"
        raise ValueError(
            f"{folder} has classes with fewer than {images}: {first_few(few)}; add some or remove them{skipped}"
        )


def _split(
    readable: Sequence[Readable], classes: Sequence[str], seed: int, grouped_by: str | None, fold: Fold | None
) -> tuple[dict[str, list[Readable]], str]:
    given: dict[str, list[Readable]] = {}
    for entry in readable:
        given.setdefault(entry.part, []).append(entry)
    labels = {part: np.array([entry.label for entry in entries]) for part, entries in given.items()}
    groups = None if grouped_by is None else Groups(grouped_by, [entry.group for entry in given["train"]])
    rows, how = split_rest(labels, classes, seed, (entry.content for entry in given["train"]), groups, fold)
    return {
        part: given[source] if indices is None else [given[source][i] for i in indices]
        for part, (source, indices) in rows.items()
    }, how


def _summary(classes: Sequence[str], readable: Sequence[Readable]) -> str:
    sizes = sorted({entry.size for entry in readable}, key=lambda size: (size[0] * size[1], size))
    text = [f"{height} x {width}" for height, width in sizes]
    spread = f"all {text[0]}" if len(sizes) == 1 else f"from {text[0]} to {text[-1]} pixels"
    counts = Counter(entry.label for entry in readable).most_common()
    (most, largest), (least, smallest) = counts[0], counts[-1]
    balance = f"{largest:,} of each"
    if smallest != largest:
        balance = f"from {smallest:,} ({classes[least]}) to {largest:,} ({classes[most]}) of each"
    return f"{len(readable):,} images of {len(classes)} classes, {balance}, {spread}"


def _unreadable_note(folder: Path, unreadable: Sequence[str]) -> list[str]:
    short = [reason.removeprefix("cannot read ").replace(f"{folder}{os.sep}", "") for reason in unreadable]
    return [f"skipped {count(short, 'file')} that cannot be read: {first_few(short)}"] if short else []


def _missing_classes(classes: Sequence[str], parts: dict[str, list[Readable]]) -> list[str]:
    notes = []
    for part, entries in parts.items():
        present = {entry.label for entry in entries}
        if missing := [name for label, name in enumerate(classes) if label not in present]:
            notes.append(f"{part} has no images of {first_few(missing)}")
    return notes


def _shared_groups(grouped_by: str | None, parts: dict[str, list[Readable]]) -> list[str]:
    groups = {part: {entry.group for entry in entries} - {""} for part, entries in parts.items()}
    notes = []
    for part in groups:
        if part != "train" and (shared := sorted(groups["train"] & groups[part], key=natural)):
            what = f"{count(shared, 'group')} of `{grouped_by}`"
            notes.append(
                f"warning: {what} both in train and in {part}, whose score may be too high: {first_few(shared)}"
            )
    return notes


def _name(folder: Path, entry: Readable) -> str:
    return Path(os.path.relpath(entry.path, folder)).as_posix()


def _equal_rows(parts: dict[str, list[Readable]]) -> dict[str, set[int]]:
    """The rows of each split whose content is also in train."""
    trained = {entry.content for entry in parts["train"]}
    return {part: {row for row, e in enumerate(entries) if e.content in trained} for part, entries in parts.items()}


def _duplicates(folder: Path, parts: dict[str, list[Readable]]) -> list[str]:
    """Warns of equal files in train and another split, which inflate the score, and in two classes, which lower it."""
    trained = {entry.content: entry for entry in parts["train"]}
    notes = []
    for part, entries in parts.items():
        pairs = [(trained[e.content], e) for e in entries if e.content in trained and part != "train"]
        if pairs:
            names = [f"{_name(folder, b)} = {_name(folder, a)}" for a, b in pairs]
            notes.append(f"warning: {count(pairs, 'image')} of {part} also in train: {first_few(names)}")
    first: dict[str, Readable] = {}
    clashes = []
    for entry in (entry for entries in parts.values() for entry in entries):
        other = first.setdefault(entry.content, entry)
        if other.label != entry.label:
            clashes.append(f"{_name(folder, other)} = {_name(folder, entry)}")
    if clashes:
        notes.append(f"warning: {count(clashes, 'image')} in two classes: {first_few(clashes)}")
    return notes
