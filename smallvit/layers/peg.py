"""Conditional positions (https://arxiv.org/abs/2102.10882): a depthwise convolution detects the border."""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit.layers.convolution import Conv


class PEG(nn.Module):
    """Positional encoding generator: adds to each token a learned sum over its neighbours, per channel."""

    kernel_size: int = 3
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        if self.kernel_size % 2 == 0:
            raise ValueError(f"PEG kernel size {self.kernel_size} must be odd: the token is at its centre")
        around = self.kernel_size // 2
        conv = Conv(x.shape[-1], self.kernel_size, padding=around, depthwise=True, dtype=self.dtype, name="conv")
        return x + conv(x)
