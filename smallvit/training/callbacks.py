"""Callbacks that observe a run or end it: begin, step, evaluation, end."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """Information for a callback at the beginning of a run."""

    folder: Path
    model: str
    data: str
    config: Mapping[str, Any]  # all settings, as in config.json
    steps: int  # planned in total; a run with a time limit may plan again
    step: int  # steps done before, above 0 in a resumed run
    say: Callable[[str], None]  # prints a line and writes it to log.txt


class Callback:
    """Base class whose methods do nothing: override those you need. Only the first process calls them."""

    def begin(self, run: Run) -> None:
        """Called once, before the first step."""

    def step(self, step: int, loss: float) -> None:
        """Called after each step, with the loss of its batch."""

    def evaluation(self, rows: Sequence[Row]) -> bool | None:
        """Called after each evaluation with the rows of metrics.csv, newest last; return True to end the training."""

    def end(self, result: Row | None) -> None:
        """Called last, with the content of result.json, or None if the run was stopped or failed."""


def check_callbacks(callbacks: Sequence[object]) -> None:
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ValueError(
                f"a callback must be an instance of smallvit.Callback, not {callback!r}: derive yours from it"
            )


@dataclass(frozen=True)
class Callbacks:
    """Calls several callbacks in order."""

    _callbacks: list[Callback]

    def begin(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.begin(run)

    def step(self, step: int, loss: float) -> None:
        for callback in self._callbacks:
            callback.step(step, loss)

    def evaluation(self, rows: Sequence[Row]) -> str:
        """The names of the callbacks that ask to stop."""
        return ", ".join([type(callback).__name__ for callback in self._callbacks if callback.evaluation(rows)])

    def end(self, result: Row | None) -> None:
        for callback in reversed(self._callbacks):
            callback.end(result)


class Patience(Callback):
    """Ends a run after a number of evaluations in a row without a gain beyond chance.

    A gain counts if it exceeds twice the standard error of the score. It depends only on the rows, so a resumed run
    ends at the same step.
    """

    def __init__(self, evaluations: int) -> None:
        self.evaluations = evaluations

    def evaluation(self, rows: Sequence[Row]) -> bool:
        return self.waited(rows) >= self.evaluations

    def waited(self, rows: Sequence[Row]) -> int:
        """The number of evaluations since the last gain."""
        best, waited = -math.inf, 0
        for row in rows:
            score = row.get("val_mean_recall", row["val_top1"])
            if score > best + 2 * row.get("val_error", 0.0):  # rows of older versions have none
                best, waited = score, 0
            else:
                waited += 1
        return waited
