"""The training step: pure functions, jitted once."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt

from smallvit import kernels as native
from smallvit.augment import augment_batch
from smallvit.common.paths import by_path, nested
from smallvit.data import Normalisation, Preprocess
from smallvit.layers import Classifier, resample_positions
from smallvit.layers.basic import MOMENTUM
from smallvit.ops import recompute
from smallvit.training.optimiser import HEADS, kernels, layer_rates, updates_natively
from smallvit.training.own import Own
from smallvit.training.recipe import Recipe
from smallvit.training.resizing import shrink

Scalar = np.float32 | Float[Array, ""]


class State(struct.PyTreeNode):
    step: Int[Array, ""]
    params: PyTree
    others: dict[str, Any]  # variables without gradients, such as the statistics of BatchNorm
    moments: PyTree  # of the optimiser
    average: dict[str, Any]  # of all variables, so that statistics match the weights; empty without `ema`

    @property
    def variables(self) -> dict[str, Any]:
        """The variables to evaluate and save."""
        return self.average or {"params": self.params, **self.others}


class Pace(NamedTuple):
    """The schedule's inputs to a step, so that the compiled program does not depend on the length of the run."""

    rate: Scalar  # fraction of the peak learning rate
    decay: Scalar  # fraction of the weights to subtract
    ema: Scalar  # fraction of the average to keep


STILL = Pace(np.float32(0), np.float32(0), np.float32(0))  # no update


class Metrics(struct.PyTreeNode):
    loss: Float[Array, ""]
    correct: Int[Array, ""]


def make_init(
    model: Classifier, recipe: Recipe, optimiser: optax.GradientTransformation, shape: tuple[int, int, int]
) -> Callable[[PRNGKeyArray], State]:
    def init(key: PRNGKeyArray) -> State:
        return first_state(recipe, optimiser, dict(model.init(key, jnp.zeros((1, *shape), jnp.float32))))

    return init


def first_state(recipe: Recipe, optimiser: optax.GradientTransformation, variables: dict[str, Any]) -> State:
    average = jax.tree.map(jnp.copy, variables) if recipe.ema else {}
    params, others = variables["params"], {name: each for name, each in variables.items() if name != "params"}
    return State(jnp.zeros((), jnp.int32), params, others, optimiser.init(params), average)


def layer_scales(model: Classifier, recipe: Recipe, shape: tuple[int, int, int]) -> PyTree:
    """Returns the factor of each parameter's learning rate; 0 for frozen ones."""
    order: list[str] = []

    def init(key: PRNGKeyArray) -> None:
        # During tracing, parameters are in the order of their use.
        order.extend(by_path(model.init(key, jnp.zeros((1, *shape), jnp.float32))["params"]))

    jax.eval_shape(init, jax.random.key(0))
    rates = layer_rates(order, recipe.layer_decay)
    if recipe.freeze == "backbone":
        rates = {path: rate if path.split("/")[0] in HEADS else 0.0 for path, rate in rates.items()}
    return nested(rates)


def make_step(
    model: Classifier,
    recipe: Recipe,
    optimiser: optax.GradientTransformation,
    preprocess: Preprocess,
    class_weights: Float[Array, "k"] | None = None,
    accumulate: int = 1,
    remat: bool = False,
    own: Own = Own(),  # noqa: B008, it is frozen
    small: Classifier | None = None,
) -> Callable[
    [State, UInt[Array, "b H W c"], Int[Array, "b"], PRNGKeyArray, Pace, Normalisation], tuple[State, Metrics]
]:
    """The step on whole images, or on smaller ones with the model for them, `small`; the state is the same for both."""
    scales = None
    if recipe.layer_decay != 1 or recipe.freeze != "none":
        scales = layer_scales(model, recipe, (*preprocess.size, preprocess.channels))

    def loss(params: PyTree, others: PyTree, images: Array, targets: Array, key: PRNGKeyArray) -> tuple[Array, Any]:
        variables = {"params": params, **others}
        if small is not None:
            variables = resample_positions(variables, small, images)
        with recompute(remat):
            logits, others = (small or model).apply(
                variables, images, train=trains, rngs={"dropout": key}, mutable=list(others)
            )
        logits = logits.astype(jnp.float32)
        losses = (own.loss or optax.softmax_cross_entropy)(logits, targets)
        if losses.shape != targets.shape[:1]:
            raise ValueError(
                f"your loss has shape {losses.shape}: it must return one number per image, {targets.shape[:1]}"
            )
        if class_weights is not None:
            # Weights by the targets without label smoothing, which gives every class a share of every target.
            smoothing = recipe.augment.label_smoothing
            losses *= (targets @ class_weights - smoothing * class_weights.mean()) / (1 - smoothing)
        return losses.mean(), (logits, others)

    trains = recipe.freeze == "none"  # a frozen backbone runs in evaluation mode, and keeps its statistics

    def gradient(state: State, images: Array, targets: Array, key: PRNGKeyArray) -> tuple[Array, Array, PyTree, PyTree]:
        """Returns loss, logits, new statistics and gradient, in one pass or accumulated over `accumulate` parts."""
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        if accumulate == 1:
            (value, (logits, others)), grads = value_and_grad(state.params, state.others, images, targets, key)
            return value, logits, others, grads

        def part(carry: tuple[PyTree, PyTree], inputs: tuple[Array, Array, PRNGKeyArray]) -> Any:
            others, total = carry
            (value, (logits, others)), grads = value_and_grad(state.params, others, *inputs)
            return (others, jax.tree.map(jnp.add, total, grads)), (value, logits)

        # Each part takes one of `accumulate` neighbouring images, so that images stay on their device.
        def parts(x: Array) -> Array:
            return x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1)

        start = (state.others, jax.tree.map(jnp.zeros_like, state.params))
        (others, total), (values, logits) = jax.lax.scan(
            part, start, (parts(images), parts(targets), jax.random.split(key, accumulate))
        )
        grads = jax.tree.map(lambda x: x / accumulate, total)
        return values.mean(), logits.swapaxes(0, 1).reshape(targets.shape), others, grads

    def step(
        state: State, images: Array, labels: Array, key: PRNGKeyArray, pace: Pace, normalisation: Normalisation
    ) -> tuple[State, Metrics]:
        augment_key, dropout_key = jax.random.split(jax.random.fold_in(key, state.step))
        images, targets = augment_batch(
            augment_key,
            images,
            labels,
            model.num_classes,
            recipe.augment,
            lambda images: preprocess.normalise(images, normalisation),
            own.augment,
            preprocess.size,
        )
        if small is not None:
            images = shrink(images, small)
        value, logits, others, grads = gradient(state, images.astype(model.dtype), targets, dropout_key)
        others = jax.tree.map(partial(_grown, state.step, accumulate), state.others, others)
        updates, moments = optimiser.update(grads, state.moments, state.params)
        decays = jax.tree.map(lambda _: True, state.params) if recipe.decay_all else kernels(state.params)
        factors = scales or jax.tree.map(lambda _: 1.0, state.params)
        params = _moved(pace, state.params, updates, decays, factors)
        average = state.average
        if average:
            # Shorter at first, so that the average forgets the initial weights.
            ema = jnp.minimum(pace.ema, (1.0 + state.step) / (10.0 + state.step))
            average = _weighted_sum(ema, average, 1 - ema, {"params": params, **others})
            if recipe.freeze != "none":  # bit-exact: an average of equal numbers is rounded
                head = jax.tree.map(lambda p, new, scale: new if scale else p, params, average["params"], factors)
                average = {"params": head, **others}
        correct = (logits.argmax(-1) == targets.argmax(-1)).sum()
        return State(state.step + 1, params, others, moments, average), Metrics(value, correct)

    return step


def _grown(step: Int[Array, ""], updates: int, old: Array, new: Array) -> Array:
    """BatchNorm's running statistics after a step: at first the mean over all steps, since they start at 0 and 1.

    Otherwise they would be far off in a run of few steps.
    """
    share = 1 - MOMENTUM**updates  # fraction of the new statistics in `new`
    return old + jnp.maximum(1.0, 1 / (share * (1.0 + step))) * (new - old)


def _moved(pace: Pace, params: PyTree, updates: PyTree, decays: PyTree, scales: PyTree) -> PyTree:
    """Returns the parameters after a step; `scales` multiply their learning rate and weight decay."""
    leaves, structure = jax.tree.flatten(params)
    ways = list(zip(jax.tree.leaves(decays), jax.tree.leaves(scales), strict=True))
    changes = jax.tree.leaves(updates)
    for decay, scale in {way: None for way in ways if way[1] != 0}:
        chosen = [i for i, way in enumerate(ways) if way == (decay, scale)]
        kept = 1 - pace.decay * scale if decay else 1.0
        moved = _weighted_sum(kept, [leaves[i] for i in chosen], pace.rate * scale, [changes[i] for i in chosen])
        for i, leaf in zip(chosen, moved, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _weighted_sum(a: Scalar | float, x: PyTree, b: Scalar | float, y: PyTree) -> PyTree:
    """Returns a x + b y, by one native kernel for all arrays if possible."""
    (xs, structure), ys = jax.tree.flatten(x), jax.tree.leaves(y)
    if not updates_natively(xs, ys):
        return jax.tree.map(lambda x, y: a * x + b * y, x, y)
    return jax.tree.unflatten(structure, native.weighted_sums(a, xs, b, ys))
