"""Attention inside windows of a grid (https://arxiv.org/abs/2103.14030): cut, put back, biased."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float

from smallvit.layers.dense import Factory
from smallvit.layers.size import Size, pair


def window_partition(x: Float[Array, "b h w d"], window: Size) -> Float[Array, "b g n d"]:
    """The grid cut into windows, row by row; zeros fill the last ones at the bottom and on the right."""
    p, q = pair(window)
    h, w = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (0, -h % p), (0, -w % q), (0, 0)))
    return rearrange(x, "b (h p) (w q) d -> b (h w) (p q) d", p=p, q=q)


def window_merge(x: Float[Array, "b g n d"], grid: tuple[int, int], window: Size) -> Float[Array, "b h w d"]:
    """The way back: the grid of these windows, without what filled them up."""
    p, q = pair(window)
    x = rearrange(x, "b (h w) (p q) d -> b (h p) (w q) d", h=-(-grid[0] // p), p=p, q=q)
    return x[:, : grid[0], : grid[1]]


def window_allowed(grid: tuple[int, int], window: Size, shift: Size = 0) -> Bool[np.ndarray, "g 1 n n"] | None:
    """Which token of a window reads which, for logits (b, g, h, n, m); None where all read all.

    Nobody reads what fills a window up. A grid rolled by `-shift` has brought its first rows and columns next to its
    last ones: these do not read each other.
    """
    (h, w), (p, q) = grid, pair(window)
    down, across = (shift, shift) if isinstance(shift, int) else shift
    rows, columns = np.mgrid[: h + -h % p, : w + -w % q]
    part = 2 * (np.minimum(rows, h - 1) + down >= h) + (np.minimum(columns, w - 1) + across >= w)
    real = (rows < h) & (columns < w)
    part, real = (rearrange(x, "(h p) (w q) -> (h w) (p q)", p=p, q=q) for x in (part, real))
    allowed = (part[:, None, :, None] == part[:, None, None, :]) & real[:, None, None, :]
    return None if allowed.all() else allowed


class WindowAttention(nn.Module):
    """`attention` within each window of a grid; with a shift, within the windows of the grid rolled by it."""

    attention: Factory
    window: Size
    shift: Size = 0

    @nn.compact
    def __call__(self, x: Float[Array, "b h w d"], *, train: bool = False) -> Float[Array, "b h w d"]:
        grid = x.shape[1], x.shape[2]
        down, across = (self.shift, self.shift) if isinstance(self.shift, int) else self.shift
        allowed = window_allowed(grid, self.window, (down, across))
        if down or across:
            x = jnp.roll(x, (-down, -across), (1, 2))
        x = self.attention(name="window")(window_partition(x, self.window), allowed=allowed, train=train)
        x = window_merge(x, grid, self.window)
        return jnp.roll(x, (down, across), (1, 2)) if down or across else x


class RelativeBias(nn.Module):
    """A learned number for each head and each offset between two tokens of a window, to be added to the logits."""

    heads: int
    window: Size

    @nn.compact
    def __call__(self) -> Float[Array, "h n n"]:
        p, q = pair(self.window)
        init = nn.initializers.truncated_normal(0.02)
        table = self.param("grid", init, (2 * p - 1, 2 * q - 1, self.heads))
        rows, columns = window_offsets(self.window)
        return rearrange(table[rows + p - 1, columns + q - 1], "n m h -> h n m")


def window_offsets(window: Size) -> tuple[np.ndarray, np.ndarray]:
    """How far down and across each token, the first axis, stands from each other one, the second."""
    rows, columns = np.mgrid[: pair(window)[0], : pair(window)[1]].reshape(2, -1)
    return rows[:, None] - rows[None], columns[:, None] - columns[None]
