"""A tiny model with its training step, its data and a plan."""

import jax
import numpy as np

from smallvit import create_model
from smallvit.data import Dataset, Preprocess, Split
from smallvit.training import Recipe
from smallvit.training.optimiser import optimiser
from smallvit.training.plan import Plan
from smallvit.training.step import Pace, make_init, make_step

FIELDS = dict(dim=16, depth=1, heads=2, mlp_dim=16)
PREPROCESS = Preprocess((8, 8), 3, "crop", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
PLAIN = Recipe(learning_rate=1e-2, weight_decay=0.0, batch_size=8)


def plan(steps: int, **fields: object) -> Plan:
    return Plan(
        **{**dict(batch_size=8, epoch=10.0, evaluations=5.0, seconds=None, data="", decisions=((0, steps),)), **fields}
    )


class Small:
    """A tiny model with its jitted step."""

    def __init__(
        self, recipe: Recipe, name: str = "vit_tiny_data", accumulate: int = 1, weights: object = None
    ) -> None:
        # Without max pooling, whose choices amplify rounding errors.
        fields = FIELDS if name == "vit_tiny_data" else dict(max_pool=False, last_width=None)
        self.model = create_model(name, num_classes=3, image_size=8, **fields)
        update = optimiser(recipe)
        self.state = jax.jit(make_init(self.model, recipe, update, (8, 8, 3)))(jax.random.key(0))
        self.step = jax.jit(make_step(self.model, recipe, update, PREPROCESS, weights, accumulate))
        draw = np.random.default_rng(0)
        self.labels = (np.arange(8) % 3).astype(np.int32)
        self.images = (draw.integers(0, 80, (8, 8, 8, 3)) + 80 * self.labels[:, None, None, None]).astype(np.uint8)

    def run(self, steps: int, rate: float = 1.0, decay: float = 0.0, ema: float = 0.9):
        state, losses, pace = self.state, [], Pace(np.float32(rate), np.float32(decay), np.float32(ema))
        batch = self.images, self.labels, jax.random.key(1), pace, PREPROCESS.normalisation
        for _ in range(steps):
            state, metrics = self.step(state, *batch)
            losses.append(float(metrics.loss))
        return state, losses, metrics


def labelled(labels: np.ndarray) -> Dataset:
    split = Split(np.zeros((len(labels), 8, 8, 3), np.uint8), labels.astype(np.int32), [""] * len(labels))
    return Dataset("made up", ("a", "b", "c"), split, split, None, PREPROCESS, ())
