"""The plan of a run: model and augmentation by the epochs that fit, how many steps, and planning anew on the way."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smallvit.ops import multiply
from smallvit.training.recipe import Recipe
from smallvit.training.step import Pace

EVALUATIONS = 100  # at most, however many epochs there are
EVALUATING = 0.03  # share of the time that evaluations may take
MOMENTS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97)  # of a run with a time limit: then the remaining steps are planned anew

# From small to large; each is chosen from so many epochs on (docs/results.md has what supports it).
MODELS = {"hybrid_vit_tiny": 0.0, "hybrid_vit_small": 8.0, "hybrid_vit_base": 60.0}
# What the augmentation gains from so many epochs on: the more often an image is seen, the more it has to change.
AUGMENTATION: dict[float, dict[str, Any]] = {
    0.0: {},
    15.0: dict(cutmix=0.3, mixup=0.2),
    60.0: dict(cutmix=0.4, mixup=0.3, policy="randaugment", erasing=0.1),
}


def choose_model(epochs: Mapping[str, float]) -> str:
    """The largest model that has enough epochs, given how many fit with each."""
    return [name for name, fewest in MODELS.items() if epochs[name] >= fewest or fewest == 0][-1]


def choose_augmentation(epochs: float) -> dict[str, Any]:
    return [added for fewest, added in AUGMENTATION.items() if epochs >= fewest][-1]


def products_per_second(seconds: float = 0.3) -> float:
    """How many multiply-adds this machine does in a second, in a matrix product of a usual size."""
    x = jnp.ones((2048, 256), jnp.float32)
    run = jax.jit(lambda x, y: multiply(x, y))
    y = jnp.ones((256, 256), jnp.float32)
    run(x, y).block_until_ready()
    best, end = math.inf, time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        run(x, y).block_until_ready()
        best = min(best, time.perf_counter() - begun)
    return x.size * y.shape[1] / best


@dataclass(frozen=True)
class Plan:
    """What decides how a run goes, wherever it goes on. It is stored, and every later decision with it."""

    batch_size: int
    epoch: float  # steps of one
    evaluations: float  # in all
    seconds: float | None  # that the run may take; None where the epochs are given
    data: str  # digest of the images
    decisions: tuple[tuple[int, int], ...]  # from this step on, so many steps are to be done in all

    @property
    def steps(self) -> int:
        return self.decisions[-1][1]

    @property
    def epochs(self) -> float:
        return self.steps / self.epoch

    def progress(self, step: int) -> float:
        """Which share of the run is done, from 0 to 1; a decision changes the pace from there on."""
        done, since, steps = 0.0, *self.decisions[0]
        for next_since, next_steps in self.decisions[1:]:
            if step <= next_since:
                break
            done += (1 - done) * (next_since - since) / (steps - since)
            since, steps = next_since, next_steps
        return done + (1 - done) * (step - since) / (steps - since)

    def evaluates(self, step: int) -> bool:
        return step == self.steps or self._crosses(step, self.evaluations)

    def decides(self, step: int) -> bool:
        """Whether the steps that are left are to be planned anew behind this one."""
        if self.seconds is None or step >= self.steps or step <= self.decisions[-1][0]:
            return False
        return any(self.progress(step - 1) < moment <= self.progress(step) for moment in MOMENTS)

    def decided(self, step: int, left: int) -> "Plan":
        return replace(self, decisions=(*self.decisions, (step, step + max(left, 1))))

    def pace(self, recipe: Recipe, step: int) -> Pace:
        """What the schedule says for a step, at its middle."""
        before, behind = self.progress(step), self.progress(step + 1)
        rate = rate_at(recipe, (before + behind) / 2)
        if recipe.decay == "run":
            # The shares of all steps add up to weight_decay: a schedule is half of its peak on average.
            decay = recipe.weight_decay * rate * (behind - before) / (1.0 if recipe.schedule == "constant" else 0.5)
        else:
            decay = recipe.weight_decay * recipe.learning_rate * rate
        ema = max(0.0, 1 - (behind - before) / recipe.ema) if recipe.ema else 0.0
        return Pace(np.float32(rate), np.float32(min(decay, 1.0)), np.float32(ema))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Plan":
        return cls(**{**stored, "decisions": tuple((since, steps) for since, steps in stored["decisions"])})

    def _crosses(self, step: int, parts: float) -> bool:
        """Whether this step completes another of so many equal parts of the run."""
        tiny = 1e-9
        return int(self.progress(step) * parts + tiny) > int(self.progress(step - 1) * parts + tiny)


def rate_at(recipe: Recipe, progress: float) -> float:
    """The learning rate as a share of its peak: it grows linearly in the warm-up, then falls."""
    if recipe.schedule == "constant":
        return 1.0
    floor = recipe.floor / recipe.learning_rate
    if progress < recipe.warmup:
        return floor + (1 - floor) * progress / recipe.warmup
    left = (1 - progress) / (1 - recipe.warmup)
    return floor + (1 - floor) * (left if recipe.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))
