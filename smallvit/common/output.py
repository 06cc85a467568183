"""Standard output and error that may close: a long run outlives the terminal, or the pipe, that it was started in."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Lasting:
    """A stream whose errors are nobody's concern: what cannot be written is dropped, from then on for good."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """What waits in the buffer has to go somewhere, or Python's own end fails on it."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """While it lasts, printing never fails."""
    before = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed from the start
            stream = open(os.devnull, "w")  # noqa: SIM115, it stays: what prints later must not fail either
        before[name] = stream, Lasting(stream)
        setattr(sys, name, before[name][1])
    try:
        yield
    finally:
        for name, (stream, lasting) in before.items():
            lasting.flush()
            if getattr(sys, name) is lasting:
                setattr(sys, name, stream)
