"""The receptive field of a token before the first block."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smallvit.explanation.trace import Variables, token_grid, watch
from smallvit.layers import Classifier
from smallvit.ops import Images


@dataclass(frozen=True)
class ReceptiveField:
    """The part of the image that one token sees before the first block."""

    token: tuple[int, int]  # row and column in the grid
    grid: tuple[int, int]
    heat: Float[np.ndarray, "H W"]  # how much the token depends on each pixel, from 0 to 1
    measured: tuple[int, int]  # height and width of the area where the heat is not 0
    theory: tuple[int, int] | None  # the patch, plus the shifts of SPT; None for models without patches


def receptive_field(
    model: Classifier, variables: Variables, images: Images, token: tuple[int, int] | None = None
) -> ReceptiveField:
    """The receptive field of the central token, or of one at (row, column), averaged over the images.

    The heat is the absolute gradient of the embedded token with respect to the image, summed over channels and
    features.
    """
    seen = watch(model, variables, images)
    path = seen.embedding or next(iter(seen.parts), None)
    if path is None:
        raise ValueError(f"{type(model).__name__} has no layer that makes tokens")
    tokens = int(np.prod(seen.parts[path])) if path in seen.parts else int(np.prod(seen.grid or ()))
    prefix, grid = token_grid(tokens, seen.grid or (images.shape[1], images.shape[2]))
    row, column = token or (grid[0] // 2, grid[1] // 2)
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(f"token {row}, {column} is not in the grid of {grid[0]} x {grid[1]}, which starts at 0, 0")
    heat = np.asarray(_reach(model, path, prefix + row * grid[1] + column, variables, images))
    rows, columns = np.flatnonzero(heat.any(axis=1)), np.flatnonzero(heat.any(axis=0))
    measured = (int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1) if rows.size else (0, 0)
    return ReceptiveField((row, column), grid, heat / max(heat.max(), 1e-30), measured, seen.sees)


@partial(jax.jit, static_argnames=("model", "path", "index"))
def _reach(model: Classifier, path: str, index: int, variables: Variables, images: Images) -> Float[Array, "H W"]:
    def token(images: Array) -> Float[Array, "b d"]:
        kept: dict[str, Array] = {}

        def keep(call: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            out = call(*args, **kwargs)
            if context.method_name == "__call__" and "/".join(context.module.path) == path:
                kept.setdefault(path, out)
            return out

        with nn.intercept_methods(keep):
            model.apply(variables, images)  # later layers are removed as dead code
        return kept[path].reshape(images.shape[0], -1, kept[path].shape[-1])[:, index]

    out, pull = jax.vjp(token, jnp.asarray(images))

    def add(heat: Array, feature: Array) -> tuple[Array, None]:
        (gradient,) = pull(jnp.broadcast_to(feature[None], out.shape))
        return heat + jnp.abs(gradient.astype(jnp.float32)).sum(axis=(0, 3)), None

    return jax.lax.scan(add, jnp.zeros(images.shape[1:3]), jnp.eye(out.shape[-1], dtype=out.dtype))[0]
