"""A table of images: a CSV file with one row per file, its label and optionally its split and group."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOUND = ("labels.csv", "metadata.csv")  # default names; the second is Hugging Face's
FILE = ("file", "file_name", "filename", "path", "image")
LABEL = ("label", "class")
SPLIT, GROUP = "split", "group"
SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


class Row(NamedTuple):
    path: Path
    part: str  # train, val or test; "" without such a column
    label: str  # "" without such a column
    group: str  # "" if none


class Table(NamedTuple):
    path: Path
    labelled: bool
    group: str | None  # column name
    rows: list[Row]


def find_table(folder: Path) -> Path | None:
    return next((folder / name for name in FOUND if (folder / name).is_file()), None)


def read_table(path: Path, folder: Path, group: str | None = None) -> Table:
    """Reads the rows of a table, each file once.

    Files are relative to the table's folder, or to `folder` if the first one is found there. A ValueError names the
    table, the row (row 1 has the column names) and the error.

    Args:
        path: A UTF-8 file with column names in the first row and comma, semicolon or tab as the delimiter.
        folder: The folder of images.
        group: The column with the groups. Defaults to "group".
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
            rule = "quote text that contains the delimiter"
            raise ValueError(f"{where} has {len(cells)} cells, but there are {len(header)} columns: {rule}")
        cells = [cell.strip() for cell in cells] + [""] * (len(header) - len(cells))
        name = cells[file]
        if not name:
            raise ValueError(f"{where} has no file name")
        base = base or next((top for top in (path.parent, folder) if (top / name).is_file()), path.parent)
        if label is not None and not cells[label]:
            raise ValueError(f"{where}: {name} has no label")
        part = "" if split is None else SPLIT_NAMES.get(cells[split].casefold(), "")
        if split is not None and not part:
            raise ValueError(f"{where}: the split {cells[split]!r} must be {_either([*SPLIT_NAMES])}")
        location = _located(base, name, where)
        row = Row(location, part, "" if label is None else cells[label], "" if groups is None else cells[groups])
        before, other = first.setdefault(os.path.abspath(location), (number, row))
        if other[1:] != row[1:]:
            kind = next(k for k, a, b in zip(("split", "label", "group"), other[1:], row[1:], strict=True) if a != b)
            raise ValueError(f"{where}: {name} has a different {kind} in row {before}: remove one of the rows")
    if not first:
        raise ValueError(f"{path} has no rows below its column names")
    column = None if groups is None else header[groups].strip()
    return Table(path, label is not None, column, [row for _, row in first.values()])


def _records(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The column names, and all other non-empty rows with their numbers."""
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
    # By the column names alone: csv.Sniffer also looks at the cells, where it may take a letter or a space for a
    # delimiter.
    delimiter = max(",;\t", key=head.count)
    try:
        records = list(enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), start=1))
    except csv.Error as error:
        raise ValueError(f"cannot read {path} as a table: {error}") from None
    records = [(number, cells) for number, cells in records if any(cell.strip() for cell in cells)]
    if not records:
        raise ValueError(f"{path} is empty: it needs a row of column names, such as file,label")
    return records[0][1], records[1:]


def _located(base: Path, name: str, where: str) -> Path:
    if not (base / name).is_file() and "\\" in name:  # a Windows path
        name = name.replace("\\", "/")
    path = Path(os.path.normpath(base / name))
    if not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(base)):
        raise ValueError(f"{where}: {name} is outside of {base}, where the files must be")
    if not path.is_file():
        raise ValueError(f"{where}: there is no file {name} in {base}")
    return path


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
