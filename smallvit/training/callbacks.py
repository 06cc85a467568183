"""What happens in a run, for those who want to watch it or to end it: begin, step, evaluation, end."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What a callback learns at the beginning."""

    folder: Path
    model: str
    data: str
    config: Mapping[str, Any]  # every setting, as in config.json
    steps: int  # planned in all; a run with a time limit may plan again
    step: int  # steps done before, more than 0 if it is resumed
    say: Callable[[str], None]  # prints a line, and writes it to log.txt


class Callback:
    """Does nothing: override what you need. With several processes, only the first one calls it."""

    def begin(self, run: Run) -> None:
        """Once, before the first step."""

    def step(self, step: int, loss: float) -> None:
        """After each step, with the loss of its batch."""

    def evaluation(self, rows: Sequence[Row]) -> bool | None:
        """After each evaluation, with the rows of metrics.csv so far, the newest last; True ends the training here."""

    def end(self, result: Row | None) -> None:
        """Last of all, with what result.json says; None if the run was stopped or failed."""


def check_callbacks(each: Sequence[object]) -> None:
    for one in each:
        if not isinstance(one, Callback):
            raise ValueError(f"a callback must be an instance of smallvit.Callback, not {one!r}: derive yours from it")


@dataclass(frozen=True)
class Callbacks:
    """Several, called one after another."""

    _each: list[Callback]

    def begin(self, run: Run) -> None:
        for each in self._each:
            each.begin(run)

    def step(self, step: int, loss: float) -> None:
        for each in self._each:
            each.step(step, loss)

    def evaluation(self, rows: Sequence[Row]) -> str:
        """The names of those that ask to stop."""
        return ", ".join([type(each).__name__ for each in self._each if each.evaluation(rows)])

    def end(self, result: Row | None) -> None:
        for each in reversed(self._each):
            each.end(result)


class Patience(Callback):
    """Ends a run after so many evaluations in a row without a gain beyond chance.

    A gain counts if it exceeds twice the standard error of the validation accuracy. It is found in the rows alone, so
    that a resumed run ends at the same step.
    """

    def __init__(self, evaluations: int, images: int) -> None:
        self.evaluations, self.images = evaluations, images  # images: in validation

    def evaluation(self, rows: Sequence[Row]) -> bool:
        return self.waited(rows) >= self.evaluations

    def waited(self, rows: Sequence[Row]) -> int:
        """Evaluations since the last gain."""
        best, waited = -math.inf, 0
        for row in rows:
            score = row.get("val_mean_recall", row["val_top1"])
            share = (score / 100 * self.images + 1) / (self.images + 2)  # never 0 or 1
            if score > best + 2 * 100 * math.sqrt(share * (1 - share) / self.images):
                best, waited = score, 0
            else:
                waited += 1
        return waited
