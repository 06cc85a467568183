"""AdamW, and the learning rate: a warm-up and a cosine."""

import jax
import numpy as np
import optax
from jaxtyping import Float, PyTree

from smallvit.training.recipe import Recipe


def learning_rates(recipe: Recipe, steps: int) -> Float[np.ndarray, "steps"]:
    """The rate of every step. It is handed to the step: the compiled program does not depend on how long a run is."""
    if not recipe.schedule:
        return np.full(steps, recipe.learning_rate, np.float32)
    warmup = round(recipe.warmup * steps)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=recipe.floor,
        peak_value=recipe.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=recipe.floor,
    )
    return np.asarray(jax.jit(schedule)(np.arange(steps)), np.float32)


def optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW at the rate 1: its updates are multiplied by the rate of the step."""
    adamw = optax.adamw(1.0, weight_decay=recipe.weight_decay, mask=None if recipe.decay_all else kernels)
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw) if recipe.clip else adamw


def kernels(params: PyTree) -> PyTree:
    """True for the weights of products, which decay; biases, norms, tokens, positions and temperatures do not."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
