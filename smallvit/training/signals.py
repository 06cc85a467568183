"""Ctrl-C and termination signals: they stop a run so that it can be resumed."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from smallvit.common.errors import RESUME, Preempted


class _Signal(BaseException):
    """Not an Exception, so that no handler on the way catches it."""


class Stopping(threading.Event):
    """Set by a signal. The training loop stops at its next step; before and after the loop, the signal ends the run."""

    folder: Path | None = None
    _steps, _when = False, "before the first step"

    @contextmanager
    def at_a_step(self) -> Iterator[None]:
        self._steps = True
        yield
        self._steps, self._when = False, "after the last step"
        if self.is_set():  # since the loop last checked
            self._leave()

    def signalled(self, number: int, _: object) -> None:
        """Handles a signal. Only a second Ctrl-C interrupts a step: schedulers repeat theirs while a state is saved."""
        again = self.is_set()
        self.set()
        if number == signal.SIGINT and (again or self.folder is None):
            raise KeyboardInterrupt
        if not (again or self._steps):
            self._leave()

    def _leave(self) -> None:
        line = "stopped before there was a run folder: start it again"
        if self.folder is not None:
            line = f"stopped {self._when}: `smallvit train --resume {self.folder}` resumes it"
        if jax.process_count() == 1:
            raise _Signal(line)
        # The normal exit of Python waits for the other processes, which may wait for this one.
        print(f"smallvit: {line}", file=sys.stderr, flush=True)
        os._exit(RESUME)


def _stop_signals() -> list[signal.Signals]:
    """Slurm sends SIGTERM, and SIGUSR1 on request; a closing terminal sends SIGHUP, which `nohup` ignores."""
    names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGBREAK")  # the last: Windows, which lacks two others
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_IGN:
        numbers.remove(hangup)
    return numbers


def watch_signals(folder: Path | None) -> Stopping:
    """Handles signals until the end of `own_signals`; `folder` is the run folder, if it exists already."""
    stopping = Stopping()
    stopping.folder = folder
    if threading.current_thread() is threading.main_thread():
        for number in _stop_signals():
            signal.signal(number, stopping.signalled)
    return stopping


@contextmanager
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _stop_signals()}
    try:
        yield
    except _Signal as error:
        raise Preempted(str(error)) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
