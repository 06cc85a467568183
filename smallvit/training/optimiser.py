"""AdamW, or Muon for the hidden matrices and AdamW for the rest; both at the rate 1, which every step multiplies."""

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from smallvit.training.recipe import Recipe

_FEWEST = 16  # inputs and outputs of a matrix that Muon trains: a smaller one has no spectrum to speak of


def optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """The update of each parameter at the peak of its learning rate; weight decay comes later, in the step."""
    adam = optax.chain(optax.scale_by_adam(), optax.scale(-recipe.learning_rate))
    if recipe.optimiser == "muon":
        muon = optax.chain(
            scale_by_muon(weight_dimension_numbers=_as_matrices), _by_shape(), optax.scale(-recipe.matrix_rate)
        )
        update = optax.partition({"muon": muon, "adam": adam}, _who_trains)
    else:
        update = adam
    return optax.chain(optax.clip_by_global_norm(recipe.clip), update) if recipe.clip else update


def kernels(params: PyTree) -> PyTree:
    """True for the weights of products, which decay; biases, norms, tokens, positions and temperatures do not."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


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
