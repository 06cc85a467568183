"""Which images a folder has, and of which class, split and group: by its folders, or by a table in it."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from smallvit.data.decoding import SUFFIXES
from smallvit.data.table import LABEL, SPLIT_NAMES, Table, find_table, read_table

LAYOUT = (
    "one folder for each class, PATH/<class>/*.jpg, or PATH/{train,val,test}/<class>/*.jpg, "
    "or a table PATH/labels.csv with the columns file and label"
)
SHOWN = 3  # names in a note


class Named(NamedTuple):
    path: Path
    part: str
    name: str  # of its class
    group: str  # "" for none


class Listing(NamedTuple):
    classes: list[str]
    files: list[Named]
    grouped_by: str | None  # the column of the table
    notes: list[str]


def list_images(folder: Path, labels: Path | None, group: str | None) -> Listing:
    """All files that look like images or are in the table, with their classes, and notes about the layout."""
    tables, notes = _tables(folder, labels, group)
    if any(table.labelled for table in tables.values()):
        return _list_tables(folder, tables)
    listing = _list_folders(folder)
    notes = [*notes, *listing.notes]
    if not tables:
        return Listing(listing.classes, listing.files, None, notes)
    table = next(iter(tables.values()))
    groups = {os.path.abspath(row.path): row.group for each in tables.values() for row in each.rows}
    files = [file._replace(group=groups.get(os.path.abspath(file.path), "")) for file in listing.files]
    if without := [file.path.name for file in files if not file.group]:
        notes.append(f"{count(without, 'image')} without a group in {table.path.name}: {some(without)}")
    return Listing(listing.classes, files, table.group, notes)


def _tables(folder: Path, labels: Path | None, group: str | None) -> tuple[dict[str, Table], list[str]]:
    """The table by the split that it is for, which is "" for one of all splits; and what to say about it."""
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
            rule = f"the class folders are; --labels {path} takes the table instead"
            notes = [f"{path.name} is not used, {rule}"] if table.labelled else []
    elif (path := find_table(folder)) is not None:
        tables, notes = {"": read_table(path, folder, group)}, []
    else:
        found = {part: path for part, top in parts.items() if (path := find_table(top)) is not None}
        tables, notes = {part: read_table(path, parts[part], group) for part, path in found.items()}, []
    if group is not None and not tables:
        raise ValueError(f"the column {group!r} of groups needs a table: give one with --labels, or as labels.csv")
    return tables, notes


def _list_tables(folder: Path, tables: dict[str, Table]) -> Listing:
    files = [file for part, table in tables.items() for file in _rows(table, part)]
    paths = [table.path for table in tables.values()]
    names = some([str(path.relative_to(folder) if path.is_relative_to(folder) else path) for path in paths])
    present = {part: {file.name for file in files if file.part == part} for part in ("train", "val", "test")}
    if not present["train"]:
        raise ValueError(f"{names} of {folder} has no images to train on: the split of some must be train")
    for part, classes in present.items():
        if unknown := sorted(classes - present["train"], key=natural):
            raise ValueError(f"{names} of {folder} has classes in {part} that train has not: {some(unknown)}")
    notes = [f"labels of {names}"]
    listed = {os.path.abspath(file.path) for file in files}
    if ignored := [path.name for path in images_below(folder) if os.path.abspath(path) not in listed]:
        notes.append(f"ignored {count(ignored, 'image')} that {names} does not list: {some(ignored)}")
    grouped_by = next((table.group for table in tables.values() if table.group), None)
    return Listing(sorted(present["train"], key=natural), files, grouped_by, notes)


def _rows(table: Table, part: str) -> list[Named]:
    """The files of a table, which may be that of a split."""
    if not table.labelled:
        raise ValueError(f"{table.path} has no column with the labels, named {' or '.join(LABEL)}")
    # Where the table has no splits, its folders may tell: train/0.png, test/1.png.
    tops = [os.path.relpath(row.path, table.path.parent).split(os.sep)[0].lower() for row in table.rows]
    tops = [SPLIT_NAMES.get(top, "") for top in tops]
    tops = tops if "train" in tops and all(tops) else [""] * len(tops)
    for row in table.rows:
        if part and row.part and row.part != part:
            raise ValueError(f"{table.path} has {row.path.name} in {row.part}, but lies in the folder of {part}")
    return [
        Named(row.path, part or row.part or top or "train", row.label, row.group)
        for row, top in zip(table.rows, tops, strict=True)
    ]


def list_to_test(folder: Path) -> tuple[str, Path, list[Named]]:
    """The split to test on (test if there is one, else val, else train), where it is, and its files."""
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
    return part, top, [Named(file, part, each.name, "") for each in classes for file in images_below(each)]


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
                raise ValueError(f"{path} has {flat} images that lie in no class folder: expected {LAYOUT}")
            notes.append(f"ignored {flat} images in {path.name} that lie in no class folder")
        if unknown := sorted(set(names[part]) - set(classes), key=natural):
            raise ValueError(f"{path} has classes that {parts['train']} has not: {some(unknown)}")

    closed: list[OSError] = []
    files = [
        Named(file, part, name, "")
        for part, path in parts.items()
        for name in classes
        for file in images_below(path / name, closed.append)
    ]
    if closed:
        names_of = [f"{os.path.relpath(error.filename, folder)} ({error.strerror})" for error in closed]
        notes.append(f"warning: skipped {count(closed, 'folder')} that cannot be read: {some(names_of)}")
    if not files:
        raise ValueError(
            f"{folder} holds no images: expected {LAYOUT}, with files such as .jpg, .png, .webp, .bmp, .gif or .tif"
        )
    return Listing(classes, files, None, notes)


def _split_folders(folder: Path) -> dict[str, Path]:
    """The folders of the splits; none if those in the folder are classes."""
    folders = _folders(folder)
    parts = _parts(folder, folders)
    if "train" in parts and len(parts) >= min(2, len(folders)):
        return parts
    if parts and len(parts) == len(folders):
        raise ValueError(f"{folder} has {' and '.join(p.name for p in parts.values())} but no train: expected {LAYOUT}")
    return {}


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


def natural(name: str) -> tuple[list[str | int], str]:
    """A key to sort by: image2 stands before image10."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name.casefold())], name


def count(items: Sequence[object], noun: str) -> str:
    return f"{len(items):,} {noun}{'s' * (len(items) != 1)}"


def some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")
