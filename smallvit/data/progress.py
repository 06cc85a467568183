"""Work in threads, with a progress bar in a terminal and one plain line elsewhere."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 32  # maximum items per task: decoding a small image is faster than waking a thread
TASKS = 16  # minimum tasks per core, as far as there are items: so a few large photographs keep all cores busy


@contextmanager
def progress_bar(description: str, total: int | None, *, of_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar and yields a function that advances it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(description, highlight=False, markup=False, soft_wrap=True)
        yield lambda advance: None
        return
    count = DownloadColumn() if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda advance: progress.advance(task, advance)


def in_threads(work: Callable[[T], R], items: Sequence[T], description: str) -> list[R]:
    """Maps `work` over the items in threads: reading, hashing and Pillow's decoders release the GIL."""
    size = max(1, min(CHUNK, len(items) // (TASKS * (os.cpu_count() or 1))))
    chunks = [items[start : start + size] for start in range(0, len(items), size)]
    results: list[R] = []
    with progress_bar(description, len(items)) as advance, ThreadPoolExecutor() as pool:
        for done in pool.map(lambda chunk: [work(item) for item in chunk], chunks):
            results += done
            advance(len(done))
    return results
