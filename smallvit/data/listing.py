"""The images of a folder with their class, split and group, from the folder's structure or from a table in it."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from smallvit.data.decoding import SUFFIXES
from smallvit.data.table import LABEL, SPLIT_NAMES, Table, find_table, read_table

LAYOUT = (
    "one folder per class, PATH/<class>/*.jpg, or PATH/{train,val,test}/<class>/*.jpg, "
    "or a table PATH/labels.csv with the columns file and label"
)
SHOWN = 3  # names per note


class Named(NamedTuple):
    path: Path
    part: str
    name: str  # of the class
    group: str  # "" if none


class Listing(NamedTuple):
    classes: list[str]
    files: list[Named]
    grouped_by: str | None  # name of the table's column
    notes: list[str]


def list_images(folder: Path, labels: Path | None, group: str | None) -> Listing:
    """Lists all files that look like images or are in the table, with their classes, and notes on the layout."""
    tables, notes = _tables(folder, labels, group)
    if any(table.labelled for table in tables.values()):
        return _list_tables(folder, tables)
    listing = _list_folders(folder)
    notes = [*notes, *listing.notes]
    if not tables:
        return Listing(listing.classes, listing.files, None, notes)
    table = next(iter(tables.values()))
    groups = {os.path.abspath(row.path): row.group for t in tables.values() for row in t.rows}
    files = [file._replace(group=groups.get(os.path.abspath(file.path), "")) for file in listing.files]
    if without := [file.path.name for file in files if not file.group]:
        notes.append(f"{count(without, 'image')} without a group in {table.path.name}: {first_few(without)}")
    return Listing(listing.classes, files, table.group, notes)


def _tables(folder: Path, labels: Path | None, group: str | None) -> tuple[dict[str, Table], list[str]]:
    """The table of each split, or of all splits under the key "", and notes about them."""
    if labels is not None:
        path = labels if labels.exists() or not (folder / labels).exists() else folder / labels
        return {"": read_table(path, folder, group)}, []
    parts = _split_folders(folder)
    if len(_folders(parts.get("train", folder))) > 1:  # class folders
        if (path := find_table(folder)) is None:
            tables, notes = {}, []
        else:
            try:
                table = read_table(path, folder, group)
            except ValueError as error:
                if group is not None:
                    raise
                return {}, [f"{path.name} is not used: {error}"]
            tables = {} if table.labelled else {"": table}
            rule = f"the class folders are; use --labels {path} to use the table"
            notes = [f"{path.name} is not used, {rule}"] if table.labelled else []
    elif (path := find_table(folder)) is not None:
        tables, notes = {"": read_table(path, folder, group)}, []
    else:
        paths = {part: path for part, top in parts.items() if (path := find_table(top)) is not None}
        tables, notes = {part: read_table(path, parts[part], group) for part, path in paths.items()}, []
    if group is not None and not tables:
        raise ValueError(f"the group column {group!r} needs a table: give one with --labels, or add a labels.csv")
    return tables, notes


def _list_tables(folder: Path, tables: dict[str, Table]) -> Listing:
    files = [file for part, table in tables.items() for file in _rows(table, part)]
    paths = [table.path for table in tables.values()]
    names = first_few([str(path.relative_to(folder) if path.is_relative_to(folder) else path) for path in paths])
    present = {part: {file.name for file in files if file.part == part} for part in ("train", "val", "test")}
    if not present["train"]:
        raise ValueError(f"{names} of {folder} has no images to train on: some must have the split train")
    for part, classes in present.items():
        if unknown := sorted(classes - present["train"], key=natural):
            raise ValueError(f"{names} of {folder} has classes in {part} that are not in train: {first_few(unknown)}")
    notes = [f"labels of {names}"]
    listed = {os.path.abspath(file.path) for file in files}
    if ignored := [path.name for path in images_below(folder) if os.path.abspath(path) not in listed]:
        notes.append(f"ignored {count(ignored, 'image')} that {names} does not list: {first_few(ignored)}")
    grouped_by = next((table.group for table in tables.values() if table.group), None)
    return Listing(sorted(present["train"], key=natural), files, grouped_by, notes)


def _rows(table: Table, part: str) -> list[Named]:
    """The files of a table; `part` is its split, or "" if the table is for all splits."""
    if not table.labelled:
        raise ValueError(f"{table.path} has no column with the labels, named {' or '.join(LABEL)}")
    # Without a split column, the top folders may name the splits: train/0.png, test/1.png.
    tops = [os.path.relpath(row.path, table.path.parent).split(os.sep)[0].lower() for row in table.rows]
    tops = [SPLIT_NAMES.get(top, "") for top in tops]
    tops = tops if "train" in tops and all(tops) else [""] * len(tops)
    for row in table.rows:
        if part and row.part and row.part != part:
            raise ValueError(f"{table.path} has {row.path.name} in {row.part}, but is in the folder of {part}")
    return [
        Named(row.path, part or row.part or top or "train", row.label, row.group)
        for row, top in zip(table.rows, tops, strict=True)
    ]


def list_to_test(folder: Path) -> tuple[str, Path, list[Named]]:
    """The split to test on (test if it exists, else val, else train), its path, and its files."""
    folders = _folders(folder)
    parts = _parts(folder, folders)
    split = bool(parts) and (len(parts) == len(folders) or ("train" in parts and len(parts) > 1))
    part = next(part for part in ("test", "val", "train") if part in parts) if split else "train"
    top = parts[part] if split else folder
    classes = _folders(top)
    path = find_table(top) or find_table(folder)
    if path is not None and len(classes) < 2 and (table := read_table(path, path.parent)).labelled:
        files = _rows(table, part if split and path.parent == top else "")
        part = next(part for part in ("test", "val", "train") if any(file.part == part for file in files))
        return part, path, [file for file in files if file.part == part]
    return part, top, [Named(file, part, path.name, "") for path in classes for file in images_below(path)]


def _list_folders(folder: Path) -> Listing:
    folders = _folders(folder)
    parts = _split_folders(folder)
    notes = []
    if not parts:
        parts = {"train": folder}
    elif ignored := [path.name for path in folders if path not in parts.values()]:
        notes.append(f"ignored {', '.join(ignored)} beside {', '.join(path.name for path in parts.values())}")

    names = {part: [path.name for path in _folders(path)] for part, path in parts.items()}
    classes = sorted(names["train"], key=natural)
    for part, path in parts.items():
        if flat := sum(_is_image(file) for file in path.iterdir()):
            if not names[part]:
                raise ValueError(f"{path} has {flat} images outside of class folders: expected {LAYOUT}")
            notes.append(f"ignored {flat} images in {path.name} outside of class folders")
        if unknown := sorted(set(names[part]) - set(classes), key=natural):
            raise ValueError(f"{path} has classes that are not in {parts['train']}: {first_few(unknown)}")

    errors: list[OSError] = []
    tops = {path / name for path in parts.values() for name in classes}

    def skip(error: OSError) -> None:
        if Path(error.filename) in tops:  # a whole class
            _refuse(error)
        errors.append(error)

    files = [
        Named(file, part, name, "")
        for part, path in parts.items()
        for name in classes
        for file in images_below(path / name, skip)
    ]
    if errors:
        names_of = [f"{os.path.relpath(error.filename, folder)} ({error.strerror})" for error in errors]
        notes.append(f"warning: skipped {count(errors, 'folder')} that cannot be read: {first_few(names_of)}")
    if not files:
        raise ValueError(
            f"{folder} holds no images: expected {LAYOUT}, with files such as .jpg, .png, .webp, .bmp, .gif or .tif"
        )
    return Listing(classes, files, None, notes)


def _split_folders(folder: Path) -> dict[str, Path]:
    """The folders of the splits; empty if the subfolders are classes."""
    folders = _folders(folder)
    parts = _parts(folder, folders)
    if "train" in parts and len(parts) >= min(2, len(folders)):
        return parts
    if parts and len(parts) == len(folders):
        raise ValueError(f"{folder} has {' and '.join(p.name for p in parts.values())} but no train: expected {LAYOUT}")
    return {}


def _parts(folder: Path, folders: Sequence[Path]) -> dict[str, Path]:
    """The folders that are named like a split."""
    parts: dict[str, Path] = {}
    for path in folders:
        if (part := SPLIT_NAMES.get(path.name.lower())) is None:
            continue
        if part in parts:
            raise ValueError(f"{folder} has both {parts[part].name} and {path.name}: which is the {part} split?")
        parts[part] = path
    return parts


def _folders(path: Path) -> list[Path]:
    ignored = (".", "__MACOSX", "@eaDir")  # created by macOS archives and network drives
    try:
        folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(ignored)]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    return sorted(folders, key=lambda entry: natural(entry.name))


def _refuse(error: OSError) -> None:
    raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None


def images_below(folder: Path, failed: Callable[[OSError], None] = _refuse) -> Iterable[Path]:
    """Yields the images below a folder in natural order; calls `failed` for folders that cannot be read."""
    if not folder.is_dir():
        return
    for parent, folders, files in os.walk(folder, onerror=failed):
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural)
        yield from (path for name in sorted(files, key=natural) if _is_image(path := Path(parent, name)))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def natural(name: str) -> tuple[list[str | int], str]:
    """A sort key that orders numbers by value: image2 before image10."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name.casefold())], name


def count(items: Sequence[object], noun: str) -> str:
    return f"{len(items):,} {noun}{'s' * (len(items) != 1)}"


def first_few(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")
