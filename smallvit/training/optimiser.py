"""AdamW, or Muon for hidden matrices and AdamW for the rest; at the peak rate, which the schedule scales per step."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, PyTree
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from smallvit import kernels as native
from smallvit.training.mesh import shards_weights
from smallvit.training.own import Optimiser
from smallvit.training.recipe import Recipe

HEADS = ("head", "distill_head")
_BLOCK = re.compile(r"(block|conv|pair|token|down)(_\d+)+$")  # names of layers that have a depth

_ADAM_DECAYS, _MUON_DECAY, _EPSILON = (0.9, 0.999), 0.95, 1e-8
_STEPS, _COEFFICIENTS = 5, (3.4445, -4.775, 2.0315)  # of Newton-Schulz, as in the first version of Muon
_FEWEST = 16  # minimum inputs and outputs of a matrix for Muon: smaller ones have hardly a spectrum


def optimiser(recipe: Recipe, own: Optimiser | None = None) -> optax.GradientTransformation:
    """The update of each parameter at its peak learning rate; the step applies weight decay.

    Frozen parameters have neither optimiser moments nor gradients.
    """
    update = _optimiser(recipe) if own is None else own(recipe.learning_rate)
    if not isinstance(update, optax.GradientTransformation):
        raise ValueError(f"your optimiser returns {update!r:.60}: it must return an optax transformation")
    update = optax.chain(_clip(recipe.clip), update) if recipe.clip else update
    if recipe.freeze == "none":
        return update
    return optax.partition({"head": update, "frozen": optax.set_to_zero()}, _parts)


def _optimiser(recipe: Recipe) -> optax.GradientTransformation:
    adam = _adam(recipe.learning_rate)
    if recipe.optimiser == "muon":
        return optax.partition({"muon": _muon(recipe.matrix_rate), "adam": adam}, _who_trains)
    return adam


def updates_natively(*lists: Sequence[Array]) -> bool:
    """Whether native kernels update these arrays: not if devices divide them, since a call computes all of them."""
    return native.takes_arrays(*lists) and not shards_weights()


def _clip(most: float) -> optax.GradientTransformation:
    def update(grads: list[Array], state: Any) -> tuple[Sequence[Array], Any]:
        return native.clip(grads, most), state

    return _with_kernels(optax.clip_by_global_norm(most), update)


def _adam(rate: float) -> optax.GradientTransformation:
    decays = _ADAM_DECAYS
    pure = optax.chain(optax.scale_by_adam(*decays, eps=_EPSILON), optax.scale(-rate))

    def update(grads: list[Array], state: Any) -> tuple[Sequence[Array], Any]:
        adam, *others = state
        count = optax.safe_increment(adam.count)
        moments = [jax.tree.leaves(moment) for moment in (adam.mu, adam.nu)]
        corrections = jnp.asarray(1 - decays[0] ** count), jnp.asarray(1 - decays[1] ** count)
        updates, *found = native.adam(grads, moments[0], moments[1], corrections, decays, _EPSILON, rate)
        mu, nu = (jax.tree.unflatten(jax.tree.structure(adam.mu), moment) for moment in found)
        return updates, (optax.ScaleByAdamState(count, mu, nu), *others)

    return _with_kernels(pure, update)


def _muon(rate: float) -> optax.GradientTransformation:
    decay = _MUON_DECAY
    momentum = scale_by_muon(ns_steps=0, beta=decay, eps=_EPSILON, weight_dimension_numbers=_as_matrices)  # normalised
    pure = optax.chain(momentum, optax.stateless(_orthogonal), optax.scale(-rate))

    def update(grads: list[Array], state: Any) -> tuple[Sequence[Array], Any]:
        muon, *others = state
        count = optax.safe_increment(muon.count)
        following = optax.safe_increment(count)
        corrections = jnp.asarray(1 - decay**count), jnp.asarray(1 - decay**following)
        leaves, structure = jax.tree.flatten(muon.mu)
        updates, mu = native.muon(grads, leaves, corrections, decay, _EPSILON, rate, _STEPS, _COEFFICIENTS)
        return updates, (muon._replace(count=count, mu=jax.tree.unflatten(structure, mu)), *others)

    return _with_kernels(pure, update)


def _with_kernels(
    pure: optax.GradientTransformation, update: Callable[[list[Array], Any], tuple[Sequence[Array], Any]]
) -> optax.GradientTransformation:
    """The same transformation, with the same state, by one native kernel for all arrays if possible."""

    def choose(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(updates)
        if not updates_natively(leaves):
            return pure.update(updates, state, params)
        leaves, state = update(leaves, state)
        return jax.tree.unflatten(structure, leaves), state

    return optax.GradientTransformation(pure.init, choose)


def kernels(params: PyTree) -> PyTree:
    """True for the kernels, which decay; biases, norms, tokens, positions and temperatures do not."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def _parts(params: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, _: "head" if path[0].key in HEADS else "frozen", params)


def layer_rates(order: Sequence[str], decay: float) -> dict[str, float]:
    """The learning-rate factor of each parameter: 1 after the last block, times `decay` for each block before.

    `order` has the paths in the order of their use. Blocks count from the image on. Layers between two blocks belong to
    the first of them; layers before all blocks have the lowest rate.
    """
    depths: dict[str, int] = {}
    blocks: list[str] = []
    for path in order:
        names = path.split("/")[:2]
        block = next(("/".join(names[: i + 1]) for i, name in enumerate(names) if _BLOCK.search(name)), None)
        if block is not None and block not in blocks:
            blocks.append(block)
        depths[path] = len(blocks)
    last = max((i for i, path in enumerate(order) if any(path.startswith(f"{block}/") for block in blocks)), default=-1)
    top = len(blocks) + 1
    return {path: decay ** (top - depths[path]) if i <= last else 1.0 for i, path in enumerate(order)}


def _who_trains(params: PyTree) -> PyTree:
    """Muon (https://kellerjordan.github.io/posts/muon) for hidden matrices, but not for the head or for few inputs."""

    def label(path: KeyPath, leaf: jax.Array) -> str:
        hidden = path[-1].key == "kernel" and path[0].key != "head" and leaf.ndim >= 2
        inputs = leaf.size // leaf.shape[-1] if hidden else 0
        return "muon" if min(inputs, leaf.shape[-1] if hidden else 0) >= _FEWEST else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def _as_matrices(params: PyTree) -> PyTree:
    """Treats a kernel, also that of a convolution, as a matrix from all its inputs to its outputs."""
    return jax.tree.map(lambda leaf: MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1), params)


def _orthogonal(updates: PyTree, _: PyTree) -> PyTree:
    """Makes normalised matrices nearly orthogonal by Newton-Schulz steps, as in optax.

    A step multiplies x by a polynomial of x x'. These commute, so the steps only need x x', which is small, and x is
    multiplied by their product once: half of the work. Matrices with equally many rows are stacked, and the
    steps are a loop, which compiles faster. The update of a matrix with more outputs than inputs is scaled up, so that
    its output changes as much.
    """
    leaves, structure = jax.tree.flatten(updates)
    matrices = [leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves]
    wide = [matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T for matrix in matrices]
    groups: dict[int, list[int]] = {}
    for i, matrix in enumerate(wide):
        groups.setdefault(len(matrix), []).append(i)

    grams = [jnp.stack([wide[i] @ wide[i].T for i in group]) for group in groups.values()]
    products = list(map(_newton_schulz, grams))
    for group, factors in zip(groups.values(), products, strict=True):
        for i, factor in zip(group, factors, strict=True):
            inputs, outputs = matrices[i].shape
            result = factor @ wide[i]
            matrix = result if inputs <= outputs else result.T
            leaves[i] = matrix.reshape(leaves[i].shape) * max(1.0, outputs / inputs) ** 0.5
    return jax.tree.unflatten(structure, leaves)


def _newton_schulz(gram: Float[Array, "k n n"]) -> Float[Array, "k n n"]:
    """The product of the factors of all steps, from the Gram matrices x x' of the first x."""
    first, second, third = _COEFFICIENTS

    def factor(gram: Float[Array, "k n n"]) -> Float[Array, "k n n"]:
        return first * jnp.eye(gram.shape[-1]) + second * gram + third * gram @ gram

    def step(_: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        gram, last, product = state
        gram = last @ gram @ last
        last = factor(gram)
        return gram, last, last @ product

    last = factor(gram)
    return jax.lax.fori_loop(1, _STEPS, step, (gram, last, last))[-1]
