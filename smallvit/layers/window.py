"""Attention inside windows of a grid (https://arxiv.org/abs/2103.14030), and its relative bias."""

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from smallvit.layers.basic import Factory
from smallvit.ops.size import Size, pair
from smallvit.ops.windows import window_allowed, window_merge, window_offsets, window_partition


class WindowAttention(nn.Module):
    """Applies `attention` within each window of a grid; with a shift, within the windows of the rolled grid."""

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
    """A learned bias of the logits per head and offset between two tokens of a window."""

    heads: int
    window: Size

    @nn.compact
    def __call__(self) -> Float[Array, "h n n"]:
        p, q = pair(self.window)
        init = nn.initializers.truncated_normal(0.02)
        table = self.param("grid", init, (2 * p - 1, 2 * q - 1, self.heads))
        rows, columns = window_offsets(self.window)
        return rearrange(table[rows + p - 1, columns + q - 1], "n m h -> h n m")
