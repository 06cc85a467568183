"""Tables and progress on the terminal, and input from it."""

import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from smallvit.common.text import shown

T = TypeVar("T")


def with_standard_input(named: list[Path], paths: tuple[str, ...]) -> list[Path | io.BytesIO]:
    return [*named, *([io.BytesIO(sys.stdin.buffer.read())] if "-" in paths else [])]


def with_progress(results: Iterable[T], number: int) -> Iterable[T]:
    """Adds a progress bar on a terminal."""
    console = Console(stderr=True)
    return track(results, "", number, console=console, transient=True, disable=not console.is_terminal)


def open_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=1000)  # no wrapped lines in files and pipes


def new_table(*titles: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(plain(title), overflow="fold")
    return table


def plain(text: str) -> Text:
    """Removes markup, escape sequences and undecodable bytes."""
    return Text(shown(text))
