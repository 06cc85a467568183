"""Standard output and error that may close: a long run can outlive the terminal or pipe that started it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Lasting:
    """A stream that ignores write errors: after the first one, all output is dropped."""

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
        """Redirects the stream to the null device; else flushing its buffer fails when Python exits."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_closed_streams() -> None:
    """Opens the null device for each standard stream that is closed, as after `>&-`.

    Otherwise the next file that is opened would have its number, and receive what libraries print.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115, for the whole process


@contextmanager
def lasting_output() -> Iterator[None]:
    """Within this context, printing never fails."""
    before = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when the process started
            stream = open(os.devnull, "w")  # noqa: SIM115, stays open: later prints must not fail
        before[name] = stream, Lasting(stream)
        setattr(sys, name, before[name][1])
    try:
        yield
    finally:
        for name, (stream, lasting) in before.items():
            lasting.flush()
            if getattr(sys, name) is lasting:
                setattr(sys, name, stream)
