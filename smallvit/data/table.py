"""A table of images: a CSV file with a row for each file, its label and perhaps its split and its group."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOUND = ("labels.csv", "metadata.csv")  # without being named; the second is Hugging Face's
FILE = ("file", "file_name", "filename", "path", "image")
LABEL = ("label", "class")
SPLIT, GROUP = "split", "group"
SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


class Row(NamedTuple):
    path: Path
    part: str  # train, val or test; "" where there is no such column
    label: str  # "" where there is no such column
    group: str  # "" for none


class Table(NamedTuple):
    path: Path
    labelled: bool
    group: str | None  # the name of the column
    rows: list[Row]


def find_table(folder: Path) -> Path | None:
    return next((folder / name for name in FOUND if (folder / name).is_file()), None)


def read_table(path: Path, folder: Path, group: str | None = None) -> Table:
    """The rows, each file once. Files are relative to the table's folder, or to `folder` if the first one is there.

    Args:
        path: The table: comma, semicolon or tab between the cells, names of the columns in the first row, UTF-8.
        folder: The folder of images.
        group: The name of the column with the groups, if it is not "group".

    A ValueError names the table, the row (the first is that of the names) and what is wrong.
    """
    header, records = _records(path)
    columns = [name.strip().casefold() for name in header]

    def find(names: Sequence[str]) -> int | None:
        return next((columns.index(name.casefold()) for name in names if name.casefold() in columns), None)

    present = ", ".join(header)
    file, label, split, groups = find(FILE), find(LABEL), find([SPLIT]), find([group or GROUP])
    if file is None:
        raise ValueError(f"{path} has no column with the files, named {_either(FILE)}: its columns are {present}")
    if group is not None and groups is None:
        raise ValueError(f"{path} has no column {group!r} for the groups: its columns are {present}")
    if label is None and groups is None:
        raise ValueError(f"{path} has no column with the labels, named {_either(LABEL)}: its columns are {present}")

    base: Path | None = None
    first: dict[str, tuple[int, Row]] = {}
    for number, cells in records:
        where = f"{path}, row {number}"
        if any(cell.strip() for cell in cells[len(header) :]):
            rule = "put a text that holds the delimiter in quotes"
            raise ValueError(f"{where} has {len(cells)} cells, but there are {len(header)} columns: {rule}")
        cells = [cell.strip() for cell in cells] + [""] * (len(header) - len(cells))
        name = cells[file]
        if not name:
            raise ValueError(f"{where} names no file")
        base = base or next((each for each in (path.parent, folder) if (each / name).is_file()), path.parent)
        if label is not None and not cells[label]:
            raise ValueError(f"{where}: {name} has no label")
        part = "" if split is None else SPLIT_NAMES.get(cells[split].casefold(), "")
        if split is not None and not part:
            raise ValueError(f"{where}: the split {cells[split]!r} must be {_either([*SPLIT_NAMES])}")
        found = _located(base, name, where)
        row = Row(found, part, "" if label is None else cells[label], "" if groups is None else cells[groups])
        before, other = first.setdefault(os.path.abspath(found), (number, row))
        if other[1:] != row[1:]:
            kind = next(k for k, a, b in zip(("split", "label", "group"), other[1:], row[1:], strict=True) if a != b)
            raise ValueError(f"{where}: {name} has another {kind} than in row {before}: leave one of them out")
    if not first:
        raise ValueError(f"{path} has no rows below the names of its columns")
    column = None if groups is None else header[groups].strip()
    return Table(path, label is not None, column, [row for _, row in first.values()])


def _records(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of the columns, and all other rows with their numbers; empty ones are left out."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, row {row} is not UTF-8 (byte {content[error.start]:#04x}): save the table as CSV in UTF-8"
        ) from None
    head = text.lstrip().partition("\n")[0]
    # By the names alone: csv.Sniffer also looks at the cells, and takes a letter or a space for a delimiter there.
    delimiter = max(",;\t", key=head.count)
    try:
        records = list(enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), start=1))
    except csv.Error as error:
        raise ValueError(f"cannot read {path} as a table: {error}") from None
    records = [(number, cells) for number, cells in records if any(cell.strip() for cell in cells)]
    if not records:
        raise ValueError(f"{path} is empty: it needs a row with the names of its columns, such as file,label")
    return records[0][1], records[1:]


def _located(base: Path, name: str, where: str) -> Path:
    if not (base / name).is_file() and "\\" in name:  # written on Windows
        name = name.replace("\\", "/")
    path = Path(os.path.normpath(base / name))
    if not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(base)):
        raise ValueError(f"{where}: {name} lies outside of {base}, the folder that the files must be in")
    if not path.is_file():
        raise ValueError(f"{where}: there is no file {name} in {base}")
    return path


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
