"""One step of training and one of evaluation: pure functions, jitted once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt8

from smallvit.augment import augment_batch
from smallvit.data import Preprocess
from smallvit.layers import Classifier
from smallvit.ops import recompute
from smallvit.training.recipe import Recipe


class State(struct.PyTreeNode):
    step: Int[Array, ""]
    params: PyTree
    others: dict[str, Any]  # what is not trained by gradients, such as the statistics of BatchNorm
    moments: PyTree  # of the optimiser
    average: PyTree  # of the weights; empty if the recipe has none

    @property
    def variables(self) -> dict[str, Any]:
        """What is evaluated and kept."""
        return {"params": self.average or self.params, **self.others}


class Metrics(struct.PyTreeNode):
    loss: Float[Array, ""]
    correct: Int[Array, ""]


def make_init(
    model: Classifier, recipe: Recipe, optimiser: optax.GradientTransformation, shape: tuple[int, int, int]
) -> Callable[[PRNGKeyArray], State]:
    def init(key: PRNGKeyArray) -> State:
        others = dict(model.init(key, jnp.zeros((1, *shape), jnp.float32)))
        params = others.pop("params")
        average = jax.tree.map(jnp.copy, params) if recipe.ema else {}
        return State(jnp.zeros((), jnp.int32), params, others, optimiser.init(params), average)

    return init


def make_step(
    model: Classifier,
    recipe: Recipe,
    optimiser: optax.GradientTransformation,
    preprocess: Preprocess,
    class_weights: Float[Array, "k"] | None = None,
    accumulate: int = 1,
    remat: bool = False,
) -> Callable[[State, UInt8[Array, "b H W c"], Int[Array, "b"], PRNGKeyArray, Float[Array, ""]], tuple[State, Metrics]]:
    def loss(params: PyTree, others: PyTree, images: Array, targets: Array, key: PRNGKeyArray) -> tuple[Array, Any]:
        with recompute(remat):
            logits, others = model.apply(
                {"params": params, **others}, images, train=True, rngs={"dropout": key}, mutable=list(others)
            )
        logits = logits.astype(jnp.float32)
        if class_weights is not None:
            targets = targets * class_weights[None]
        return optax.softmax_cross_entropy(logits, targets).mean(), (logits, others)

    def gradient(state: State, images: Array, targets: Array, key: PRNGKeyArray) -> tuple[Array, Array, PyTree, PyTree]:
        """Loss, logits, the new statistics and the gradient, in one go or in `accumulate` parts one after another."""
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        if accumulate == 1:
            (value, (logits, others)), grads = value_and_grad(state.params, state.others, images, targets, key)
            return value, logits, others, grads

        def part(carry: tuple[PyTree, PyTree], inputs: tuple[Array, Array, PRNGKeyArray]) -> Any:
            others, total = carry
            (value, (logits, others)), grads = value_and_grad(state.params, others, *inputs)
            return (others, jax.tree.map(jnp.add, total, grads)), (value, logits)

        # Every device keeps its own images: the parts take one each of `accumulate` neighbours.
        def parts(x: Array) -> Array:
            return x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1)

        start = (state.others, jax.tree.map(jnp.zeros_like, state.params))
        (others, total), (values, logits) = jax.lax.scan(
            part, start, (parts(images), parts(targets), jax.random.split(key, accumulate))
        )
        grads = jax.tree.map(lambda x: x / accumulate, total)
        return values.mean(), logits.swapaxes(0, 1).reshape(targets.shape), others, grads

    def step(
        state: State, images: Array, labels: Array, key: PRNGKeyArray, rate: Float[Array, ""]
    ) -> tuple[State, Metrics]:
        augment_key, dropout_key = jax.random.split(jax.random.fold_in(key, state.step))
        images, targets = augment_batch(
            augment_key,
            images,
            labels,
            model.num_classes,
            recipe.augment,
            lambda images: jnp.asarray(preprocess.normalise(images)),
        )
        value, logits, others, grads = gradient(state, images.astype(model.dtype), targets, dropout_key)
        updates, moments = optimiser.update(grads, state.moments, state.params)
        params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
        if state.average:
            # A young average would else remember the first weights for long.
            decay = jnp.minimum(recipe.ema, (1.0 + state.step) / (10.0 + state.step))
            average = optax.incremental_update(params, state.average, 1 - decay)
        else:
            average = state.average
        correct = (logits.argmax(-1) == targets.argmax(-1)).sum()
        return State(state.step + 1, params, others, moments, average), Metrics(value, correct)

    return step
