"""Convolutions over a grid."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit.layers.basic import BatchNorm
from smallvit.ops import align, convolve
from smallvit.ops.size import Size, pair


class Conv(nn.Module):
    """A convolution with equal zero padding on all four sides; with `depthwise`, each channel has its own kernels.

    Padding is a number, never a name: "SAME" only pads the bottom and the right if the stride is 2.
    """

    features: int
    kernel_size: Size
    stride: Size = 1
    padding: Size = 0
    depthwise: bool = False
    use_bias: bool = True
    dtype: DTypeLike = jnp.float32
    kernel_init: jax.nn.initializers.Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], factor: Float[Array, "k"] | None = None) -> Float[Array, "b i j k"]:
        """Convolves x; `factor` multiplies the kernel, by output channel."""
        channels = x.shape[-1]
        if self.depthwise and self.features % channels:
            raise ValueError(f"{self.features} features of a depthwise Conv must be a multiple of {channels} channels")
        shape = (*pair(self.kernel_size), 1 if self.depthwise else channels, self.features)
        kernel = self.param("kernel", self.kernel_init, shape)
        kernel = kernel if factor is None else kernel * align(factor, kernel)
        padding = (self.padding, self.padding) if isinstance(self.padding, int) else self.padding
        bias = self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else None
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        y = convolve(x, kernel, pair(self.stride), padding, depthwise=self.depthwise)
        return y if bias is None else y + align(bias, y).astype(y.dtype)


class ConvNorm(nn.Module):
    """A convolution without bias, then BatchNorm; `more` is added to it; an optional ReLU and max pooling follow."""

    features: int
    kernel_size: Size
    stride: Size = 1
    padding: Size = 0
    depthwise: bool = False
    relu: bool = False
    pool: Size | None = None  # stride of the max pooling
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], more: Float[Array, "b i j k"] | None = None, *, train: bool = False
    ) -> Float[Array, "b i j k"]:
        conv = Conv(
            self.features,
            self.kernel_size,
            self.stride,
            self.padding,
            self.depthwise,
            use_bias=False,
            dtype=self.dtype,
            name="conv",
        )
        pool = None if self.pool is None else pair(self.pool)
        norm = BatchNorm(relu=self.relu, pool=pool, dtype=self.dtype, name="norm")
        if train:
            return norm(conv(x), more, train=True)
        factor, shift = norm.affine(self.features)  # the kernel takes the factor: one pass less, also in exports
        return norm.finish(conv(x, factor), shift, more)
