"""Progress output: a bar in a terminal, plain lines elsewhere, and the same lines in the log."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from smallvit.common.text import duration, shown
from smallvit.training.plan import Plan


class Reporter:
    """Prints lines and writes them to the run's log; silent in all processes but the first."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(quiet=quiet) if sys.stdout.isatty() else Console(width=200, quiet=quiet)
        self.log: Path | None = None
        self._early: list[str] = []

    def open_log(self, path: Path) -> None:
        if not self.quiet:
            self.log = path
            for line in self._early:
                self._write(line)

    def __call__(self, line: str) -> None:
        line = shown(line)
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self.log is None:
            self._early.append(line)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        assert self.log is not None
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")


class Bar:
    """The progress of the run: a bar in a terminal, else a line every 30 seconds; and a line per evaluation."""

    EVERY = 30.0  # seconds between lines without a bar

    def __init__(self, log: Reporter, plan: Plan) -> None:
        self._log, self.plan = log, plan  # the plan may change during the run
        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:3.0f} %  {task.description}"),
            console=log.console,
            transient=True,
            disable=not log.console.is_terminal or log.quiet,
        )
        self._task = self._progress.add_task("", total=1.0)
        self._first: tuple[int, float] | None = None  # a step, and the time when it was done
        self._last_line = time.monotonic()

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, step: int, loss: float, batch_size: int) -> None:
        now = time.monotonic()
        self._first = self._first or (step, now)
        text = f"epoch {step / self.plan.epoch:.1f} of {self.plan.epochs:.1f}, loss {loss:.3f}"
        if step > self._first[0]:
            rate = (step - self._first[0]) / (now - self._first[1])
            left = self._left(step, now - self._first[1], self._first[0])
            text += f", {rate * batch_size:,.0f} images/s, {duration(left)} to go"
        self._progress.update(self._task, completed=self.plan.progress(step), description=text)
        if self._progress.disable and now - self._last_line > self.EVERY:
            self._last_line = now
            self._log(text)

    def line(self, row: Mapping[str, Any]) -> None:
        self._last_line = time.monotonic()
        # Without the evaluations, of which the first takes longest.
        seconds = row["step"] * self.plan.batch_size / max(row["images_per_second"], 0.1)
        left = self._left(row["step"], seconds)
        self._log(
            f"epoch {row['epoch']:.1f} of {self.plan.epochs:.1f}: loss {row['train_loss']:.3f}, "
            f"train {row['train_top1']:.1f} %, val {row['val_top1']:.2f} %, {row['images_per_second']:,.0f} images/s, "
            f"{duration(60 * row['minutes'])} so far, {duration(left)} to go"
        )

    def _left(self, step: int, seconds: float, since: int = 0) -> float:
        """Seconds to the end of the run, if the steps up to `step` took `seconds`."""
        return seconds * self.plan.work(step, self.plan.steps) / self.plan.work(since, step)
