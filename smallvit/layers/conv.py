"""Convolutions over a grid, and batch normalisation, which goes with them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit.layers.dense import align, at_least_float32
from smallvit.layers.size import Size, pair


class Conv(nn.Module):
    """A convolution that pads with zeros, as many on all four sides; `depthwise`, each channel has kernels of its own.

    Padding is a number, never a name: "SAME" pads the bottom and the right alone where the stride is 2.
    """

    features: int
    kernel_size: Size
    stride: Size = 1
    padding: Size = 0
    depthwise: bool = False
    use_bias: bool = True
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b i j k"]:
        channels = x.shape[-1]
        if self.depthwise and self.features % channels:
            raise ValueError(f"{self.features} features of a depthwise Conv must be a multiple of {channels} channels")
        shape = (*pair(self.kernel_size), 1 if self.depthwise else channels, self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        down, across = (self.padding, self.padding) if isinstance(self.padding, int) else self.padding
        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            pair(self.stride),
            ((down, down), (across, across)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=channels if self.depthwise else 1,
        )
        if self.use_bias:
            y = y + align(self.param("bias", nn.initializers.zeros, (self.features,)), y).astype(y.dtype)
        return y


class BatchNorm(nn.Module):
    """Normalises each channel over the batch, in float32; evaluation has the running moments of `batch_stats`.

    Training needs `mutable=["batch_stats"]`. As in torch, the running variance is the unbiased one.
    """

    scale_init: float = 1.0
    epsilon: float = 1e-5
    momentum: float = 0.9
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b *rest d"], *, train: bool = False) -> Float[Array, "b *rest d"]:
        channels = x.shape[-1:]
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels)
        scale = self.param("scale", nn.initializers.constant(self.scale_init), channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        y = x.astype(at_least_float32(x.dtype))
        mean, var = running_mean.value, running_var.value
        if train:
            over = tuple(range(x.ndim - 1))
            count = x.size // x.shape[-1]
            mean = y.mean(over)
            var = jnp.square(y - align(mean, y)).mean(over)
            if not self.is_initializing():
                kept, unbiased = self.momentum, var * (count / max(count - 1, 1))
                running_mean.value = kept * running_mean.value + (1 - kept) * mean.astype(jnp.float32)
                running_var.value = kept * running_var.value + (1 - kept) * unbiased.astype(jnp.float32)
        y = (y - align(mean, y).astype(y.dtype)) * align(scale * jax.lax.rsqrt(var + self.epsilon), y).astype(y.dtype)
        return (y + align(bias, y).astype(y.dtype)).astype(self.dtype)


class ConvNorm(nn.Module):
    """A convolution without bias, then a BatchNorm."""

    features: int
    kernel_size: Size
    stride: Size = 1
    padding: Size = 0
    depthwise: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], *, train: bool = False) -> Float[Array, "b i j k"]:
        x = Conv(
            self.features,
            self.kernel_size,
            self.stride,
            self.padding,
            self.depthwise,
            use_bias=False,
            dtype=self.dtype,
            name="conv",
        )(x)
        return BatchNorm(dtype=self.dtype, name="norm")(x, train=train)
