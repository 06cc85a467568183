"""AdamW, or Muon for the hidden matrices and AdamW for the rest; both at the rate 1, which every step multiplies."""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from smallvit.training.own import Optimiser
from smallvit.training.recipe import Recipe

HEADS = ("head", "distill_head")
_BLOCK = re.compile(r"(block|conv|pair|token|down)(_\d+)+$")  # how layers of some depth are named

_FEWEST = 16  # inputs and outputs of a matrix that Muon trains: a smaller one has no spectrum to speak of


def optimiser(recipe: Recipe, own: Optimiser | None = None) -> optax.GradientTransformation:
    """The update of each parameter at the peak of its learning rate; weight decay comes later, in the step.

    What is frozen has neither moments nor, since nobody asks for it, a gradient.
    """
    update = _optimiser(recipe) if own is None else own(recipe.learning_rate)
    update = optax.chain(optax.clip_by_global_norm(recipe.clip), update) if recipe.clip else update
    if recipe.freeze == "none":
        return update
    return optax.partition({"head": update, "frozen": optax.set_to_zero()}, _parts)


def _optimiser(recipe: Recipe) -> optax.GradientTransformation:
    adam = optax.chain(optax.scale_by_adam(), optax.scale(-recipe.learning_rate))
    if recipe.optimiser == "muon":
        muon = optax.chain(
            scale_by_muon(weight_dimension_numbers=_as_matrices), _by_shape(), optax.scale(-recipe.matrix_rate)
        )
        return optax.partition({"muon": muon, "adam": adam}, _who_trains)
    return adam


def kernels(params: PyTree) -> PyTree:
    """True for the weights of products, which decay; biases, norms, tokens, positions and temperatures do not."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def _parts(params: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, _: "head" if path[0].key in HEADS else "frozen", params)


def layer_rates(order: Sequence[str], decay: float) -> dict[str, float]:
    """What each parameter's learning rate is multiplied by: 1 behind the last block, `decay` less in each before.

    `order` has the paths as the model uses them. Blocks count from the image on; what stands between two belongs to
    the first of them, what stands before all of them has the lowest rate.
    """
    depths: dict[str, int] = {}
    blocks: list[str] = []
    for path in order:
        names = path.split("/")[:2]
        block = next(("/".join(names[: i + 1]) for i, name in enumerate(names) if _BLOCK.search(name)), None)
        if block is not None and block not in blocks:
            blocks.append(block)
        depths[path] = len(blocks)
    last = max((i for i, path in enumerate(order) if any(path.startswith(f"{each}/") for each in blocks)), default=-1)
    top = len(blocks) + 1
    return {path: decay ** (top - depths[path]) if i <= last else 1.0 for i, path in enumerate(order)}


def _who_trains(params: PyTree) -> PyTree:
    """Muon (https://kellerjordan.github.io/posts/muon) is for hidden matrices: not for the head, nor for few inputs."""

    def label(path: KeyPath, leaf: jax.Array) -> str:
        hidden = path[-1].key == "kernel" and path[0].key != "head" and leaf.ndim >= 2
        inputs = leaf.size // leaf.shape[-1] if hidden else 0
        return "muon" if min(inputs, leaf.shape[-1] if hidden else 0) >= _FEWEST else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def _as_matrices(params: PyTree) -> PyTree:
    """A kernel is a matrix from all its inputs to its outputs, that of a convolution too."""
    return jax.tree.map(lambda leaf: MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1), params)


def _by_shape() -> optax.GradientTransformation:
    """A matrix with more outputs than inputs moves further, so that what it puts out changes as much."""

    def scaled(update: jax.Array) -> jax.Array:
        outputs = update.shape[-1]
        return update * jnp.sqrt(max(1.0, outputs * outputs / update.size))

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, updates))
