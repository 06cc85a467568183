"""The plan of a run: number of steps, schedule, evaluations. It is revised during a run with a time limit."""

import json
import math
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from smallvit.common.files import read_json, write_json
from smallvit.common.text import duration
from smallvit.runs.folder import PLAN
from smallvit.runs.source import data_digest
from smallvit.training.choice import epochs_of
from smallvit.training.cluster import broadcast_choice
from smallvit.training.config import DEFAULT_MINUTES, TrainConfig
from smallvit.training.recipe import Recipe
from smallvit.training.resizing import mean_cost, phases
from smallvit.training.step import STILL, Pace
from smallvit.training.trainer import Trainer

EVALUATIONS = 100.0  # at most, for any number of epochs
EVALUATING = 0.03  # maximum fraction of the time for evaluations
LEAST_EVALUATIONS = 6.0  # in a run of given epochs, if it has as many
MOMENTS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99)  # progress at which a run with a time limit is planned again
_TINY = 1e-9  # rounding errors of progress

ENDING = 12.0  # seconds for the pictures and the report


@dataclass(frozen=True)
class Plan:
    """All decisions on the course of a run. Stored, with every later decision, so that a resumed run follows it."""

    batch_size: int
    epoch: float  # steps per epoch
    evaluations: float  # in total
    seconds: float | None  # time limit; None if the epochs are given
    data: str  # digest of the images
    decisions: tuple[tuple[int, int], ...]  # (step, total number of steps from this step on)
    progressive: float = 0.0  # fraction of the run on smaller images
    evaluating: float = 0.0  # seconds of an evaluation, measured before the first step; 0 if the epochs are given

    @property
    def steps(self) -> int:
        return self.decisions[-1][1]

    @property
    def epochs(self) -> float:
        return self.steps / self.epoch

    def progress(self, step: int) -> float:
        """The completed fraction of the run, from 0 to 1; a decision changes the pace from its step on."""
        done, since, steps = 0.0, *self.decisions[0]
        for next_since, next_steps in self.decisions[1:]:
            if step <= next_since:
                break
            done += (1 - done) * (next_since - since) / (steps - since)
            since, steps = next_since, next_steps
        return done + (1 - done) * (step - since) / (steps - since)

    def evaluates(self, step: int) -> bool:
        return step == self.steps or self._crosses(step, self.evaluations)

    def evaluations_after(self, step: int) -> int:
        return math.ceil(self.evaluations - _TINY) - int(self.progress(step) * self.evaluations + _TINY)

    def decides(self, step: int) -> bool:
        """Whether the remaining steps are planned again after this step."""
        if self.seconds is None or step >= self.steps or step <= self.decisions[-1][0]:
            return False
        return any(self.progress(step - 1) < moment <= self.progress(step) for moment in MOMENTS)

    def side(self, step: int) -> float:
        """The side of the images of this step, relative to whole ones."""
        done = self.progress(step)
        return next(phase.side for phase in phases(self.progressive) if done < phase.until)

    def work(self, start: int, stop: int) -> float:
        """The cost of the steps from `start` to `stop`, in steps on whole images."""
        total = 0.0
        for phase in phases(self.progressive):
            end = min(max(bisect_left(range(self.steps), phase.until, key=self.progress), start), stop)
            start, total = end, total + (end - start) * phase.cost
        return total

    def steps_for(self, work: float, step: int) -> int:
        """The number of steps from `step` on that cost `work`, if the phases keep their shares of the steps."""
        return round(work * (self.steps - step) / self.work(step, self.steps))

    def decided(self, step: int, left: int) -> "Plan":
        return replace(self, decisions=(*self.decisions, (step, step + max(left, 1))))

    def pace(self, recipe: Recipe, step: int) -> Pace:
        """The schedule at a step, evaluated at its middle."""
        before, behind = self.progress(step), self.progress(step + 1)
        rate = rate_at(recipe, (before + behind) / 2)
        decay = recipe.weight_decay * recipe.learning_rate * rate
        ema = max(0.0, 1 - (behind - before) / recipe.ema) if recipe.ema else 0.0
        return Pace(np.float32(rate), np.float32(min(decay, 1.0)), np.float32(ema))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Plan":
        return cls(**{**stored, "decisions": tuple((since, steps) for since, steps in stored["decisions"])})

    def _crosses(self, step: int, parts: float) -> bool:
        """Whether this step completes another of `parts` equal parts of the run."""
        return int(self.progress(step) * parts + _TINY) > int(self.progress(step - 1) * parts + _TINY)


def rate_at(recipe: Recipe, progress: float) -> float:
    """The learning rate as a fraction of its peak: linear warm-up, then decay."""
    if recipe.schedule == "constant":
        return 1.0
    floor = recipe.floor / recipe.learning_rate
    if progress < recipe.warmup:
        return floor + (1 - floor) * progress / recipe.warmup
    left = (1 - progress) / (1 - recipe.warmup)
    return floor + (1 - floor) * (left if recipe.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))


def make_plan(config: TrainConfig, trainer: Trainer, started: float) -> Plan:
    """The initial plan: the given epochs, or what the time allows at the speed of a few measured steps."""
    data, recipe = trainer.data, trainer.recipe
    epoch = len(data.train) * recipe.passes * recipe.repeats / trainer.batch_size
    epochs = epochs_of(config)
    seconds, per_evaluation = None, 0.0
    if epochs is not None:
        # A training step takes as long as evaluating three times its images. Not measured, so that the same epochs
        # always lead to the same run.
        work = 3 * epochs * epoch * trainer.batch_size * mean_cost(recipe.progressive) / len(data.val)
        evaluations = max(EVALUATING * work, LEAST_EVALUATIONS)
    else:
        seconds = 60 * (config.minutes or DEFAULT_MINUTES)
        per_step, per_evaluation = _measure(trainer)
        left = seconds - (time.monotonic() - started) - ending(trainer, per_evaluation)
        if left < per_step:
            each = "" if config.folds is None else f" for each of the {config.folds} folds"
            needed = math.ceil((seconds - left) / 60 + 0.5)
            raise ValueError(
                f"{seconds / 60:g} minutes{each} leave no time to train: reading, compiling and the report take "
                f"{duration(seconds - left)} here, give at least {needed} minute{'s' * (needed > 1)}{each}"
            )
        evaluations = max(min(EVALUATIONS, EVALUATING * left / per_evaluation), 1.0)
        per_step *= mean_cost(recipe.progressive) / phases(recipe.progressive)[0].cost
        epochs = (left - min(evaluations * per_evaluation, EVALUATING * left)) / (per_step * epoch)
    steps = max(math.ceil(epochs * epoch), 1)
    plan = Plan(
        trainer.batch_size,
        epoch,
        max(min(epochs, evaluations, EVALUATIONS), 1.0),
        seconds,
        data_digest(data),
        ((0, steps),),
        recipe.progressive,
        per_evaluation,
    )
    return Plan.from_json(json.loads(broadcast_choice(lambda: json.dumps(plan.to_json()))))


def read_plan(folder: Path, trainer: Trainer) -> Plan | None:
    """Returns the plan of a resumed run; None if it was stopped before it had one."""
    stored = json.loads(
        broadcast_choice(lambda: json.dumps(read_json(folder / PLAN) if (folder / PLAN).exists() else None))
    )
    if stored is None:
        return None
    try:
        plan = Plan.from_json(stored)
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{folder / PLAN} is damaged: restore it, or start a new run") from None
    if plan.data != data_digest(trainer.data):
        raise ValueError(f"the data is not what {folder} was trained on: restore it, or start a new run")
    if plan.batch_size != trainer.batch_size:
        raise ValueError(f"{folder} has batches of {plan.batch_size}, but here they are {trainer.batch_size}")
    return plan


def store_plan(folder: Path, plan: Plan) -> None:
    if jax.process_index() == 0:
        write_json(folder / PLAN, plan.to_json())


def ending(trainer: Trainer, per_evaluation: float) -> float:
    """Seconds after the last step: evaluation of the test images, pictures, the report."""
    data, rows = trainer.data, trainer.eval_batch_size
    tests, validations = (math.ceil(len(split) / rows) for split in (data.test or data.val, data.val))
    return ENDING + per_evaluation * (1 + tests / validations)


def _measure(trainer: Trainer, seconds: float = 3.0) -> tuple[float, float]:
    """Seconds per step of the first phase and per evaluation, on a temporary state; excludes the slow first step."""
    side = phases(trainer.recipe.progressive)[0].side
    state, metrics = trainer.step(trainer.init(), 0, STILL, side)
    metrics.loss.block_until_ready()
    start, steps = time.monotonic(), 0
    while steps < 4 or time.monotonic() - start < seconds:
        state, metrics = trainer.step(state, steps, STILL, side)
        metrics.loss.block_until_ready()
        steps += 1
    per_step = (time.monotonic() - start) / steps
    trainer.evaluate(state, trainer.data.val)
    before = time.monotonic()
    trainer.evaluate(state, trainer.data.val)
    return per_step, time.monotonic() - before
