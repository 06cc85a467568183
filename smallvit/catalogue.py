"""The registered models with their sizes and costs, stored in catalogue.csv to be listed without importing jax."""

import csv
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_suffix(".csv")


class Entry(NamedTuple):
    name: str
    cls: str
    paper: str
    image_size: tuple[int, int]
    parameters: int  # with a head of 1,000 classes
    multiply_adds: int  # per image


def catalogue(pattern: str = "*") -> list[Entry]:
    """All models whose name matches, sorted; `smallvit.count` writes the file."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    entries = [
        Entry(
            row["name"],
            row["class"],
            row["paper"],
            _size(row["image_size"]),
            int(row["parameters"]),
            int(row["multiply_adds"]),
        )
        for row in csv.DictReader(lines)
    ]
    return [entry for entry in entries if fnmatch(entry.name, pattern)]


def _size(text: str) -> tuple[int, int]:
    height, width = map(int, text.split("x"))
    return height, width
