"""Learned positions, and their resampling to another image size."""

from functools import lru_cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smallvit.common.paths import by_path, nested


class PositionEmbed(nn.Module):
    """Adds a learned vector to each token: one per place of the grid, one per token before the grid.

    The parameters keep the two axes of the grid, so that they can be resampled to another image size.
    """

    grid: tuple[int, int]
    std: float = 0.02

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        init, dim = nn.initializers.normal(self.std), x.shape[-1]
        table = self.param("grid", init, (*self.grid, dim)).reshape(-1, dim)
        prefix = x.shape[1] - table.shape[0]
        if prefix:
            table = jnp.concatenate([self.param("prefix", init, (prefix, dim)), table])
        return x + table[None].astype(x.dtype)


class ClassToken(nn.Module):
    """Prepends a learned token."""

    std: float = 0.02

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n+1 d"]:
        token = self.param("token", nn.initializers.normal(self.std), (1, x.shape[-1]))
        token = jnp.broadcast_to(token[None].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        return jnp.concatenate([token, x], axis=1)


def resample_positions(variables: dict, model: nn.Module, image: Array | jax.ShapeDtypeStruct) -> dict:
    """Fits variables to `model` on images like `image`, by interpolation of the position tables.

    model = ViT(image_size=64, ...); variables = resample_positions(variables_at_32, model, images_at_64)
    """
    wanted = abstract_variables(model, jax.ShapeDtypeStruct((1, *image.shape[1:]), image.dtype))
    shapes = {path: leaf.shape for path, leaf in by_path(wanted).items()}
    given = by_path(variables)
    if odd := sorted(shapes.keys() ^ given.keys()):
        names = ", ".join(odd[:5])
        raise ValueError(
            f"the variables are from another model, {names} exist in only one: use the same class and fields"
        )

    def fit(path: str, table: Array) -> Array:
        if table.shape == shapes[path]:
            return table
        if not is_table(path):
            raise ValueError(f"{path} is {table.shape}, the model needs {shapes[path]}: only positions are resampled")
        return resample_table(path, table, shapes[path])

    return nested({path: fit(path, table) for path, table in given.items()})


@lru_cache(maxsize=8)
def abstract_variables(model: nn.Module, image: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """The shapes of a model's variables; cached, since tracing a model takes a tenth of a second."""
    return jax.eval_shape(model.init, jax.random.key(0), image)


def is_table(path: str) -> bool:
    """Whether the shape of a parameter depends on the grid: positions, or biases of offsets or distances."""
    return path.endswith(("/grid", "/distances"))


def resample_table(path: str, table: Array | np.ndarray, shape: tuple[int, ...]) -> Array:
    """Interpolates a table to another grid; its centre stays the centre, and distance 0 stays first."""
    table = jnp.asarray(table)
    if not path.endswith("/distances"):
        return jax.image.resize(table, shape, "bicubic")
    # Mirrored, the distances become a table of offsets with distance 0 at its centre.
    for axis in (0, 1):
        table = jnp.concatenate([jnp.flip(jax.lax.slice_in_dim(table, 1, None, axis=axis), axis), table], axis=axis)
    h, w, heads = shape
    return jax.image.resize(table, (2 * h - 1, 2 * w - 1, heads), "bicubic")[h - 1 :, w - 1 :]
