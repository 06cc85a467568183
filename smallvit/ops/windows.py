"""Partition of a grid into windows, its inverse, and attention masks of windows."""

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float

from smallvit.ops.size import Size, pair


def window_partition(x: Float[Array, "b h w d"], window: Size) -> Float[Array, "b g n d"]:
    """Cuts the grid into windows, row by row, with zero padding at the bottom and on the right."""
    p, q = pair(window)
    h, w = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (0, -h % p), (0, -w % q), (0, 0)))
    return rearrange(x, "b (h p) (w q) d -> b (h w) (p q) d", p=p, q=q)


def window_merge(x: Float[Array, "b g n d"], grid: tuple[int, int], window: Size) -> Float[Array, "b h w d"]:
    """Inverse of `window_partition`: joins windows into a grid, without the padding."""
    p, q = pair(window)
    x = rearrange(x, "b (h w) (p q) d -> b (h p) (w q) d", h=-(-grid[0] // p), p=p, q=q)
    return x[:, : grid[0], : grid[1]]


def window_allowed(grid: tuple[int, int], window: Size, shift: Size = 0) -> Bool[np.ndarray, "g 1 n n"] | None:
    """Attention mask within windows, for logits (b, g, h, n, m); None if everything is allowed.

    Padding is masked. Rolling a grid by `-shift` puts its first rows and columns next to its last ones: these do not
    attend to each other.
    """
    (h, w), (p, q) = grid, pair(window)
    down, across = (shift, shift) if isinstance(shift, int) else shift
    rows, columns = np.mgrid[: h + -h % p, : w + -w % q]
    part = 2 * (np.minimum(rows, h - 1) + down >= h) + (np.minimum(columns, w - 1) + across >= w)
    real = (rows < h) & (columns < w)
    part, real = (rearrange(x, "(h p) (w q) -> (h w) (p q)", p=p, q=q) for x in (part, real))
    allowed = (part[:, None, :, None] == part[:, None, None, :]) & real[:, None, None, :]
    return None if allowed.all() else allowed


def window_offsets(window: Size) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and column offsets of each token (first axis) from each other token (second axis)."""
    rows, columns = np.mgrid[: pair(window)[0], : pair(window)[1]].reshape(2, -1)
    return rows[:, None] - rows[None], columns[:, None] - columns[None]
