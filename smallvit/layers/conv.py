"""Convolutions over a grid, and batch normalisation, which goes with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from math import prod

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit import kernels
from smallvit.layers.dense import align, at_least_float32, multiply
from smallvit.layers.size import Size, pair

# jax traces anew when it changes.
_plain = jax.make_user_context(False)


@contextmanager
def plain_convolutions() -> Iterator[None]:
    """Convolutions within are one operation each, which every compiler knows, as in a program for other machines.

    Otherwise a CPU has them as the sums and products that it computes faster, above all their gradients.
    """
    with _plain(True):
        yield


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
    kernel_init: jax.nn.initializers.Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b i j k"]:
        channels = x.shape[-1]
        if self.depthwise and self.features % channels:
            raise ValueError(f"{self.features} features of a depthwise Conv must be a multiple of {channels} channels")
        shape = (*pair(self.kernel_size), 1 if self.depthwise else channels, self.features)
        kernel = self.param("kernel", self.kernel_init, shape)
        padding = (self.padding, self.padding) if isinstance(self.padding, int) else self.padding
        bias = self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else None
        convolve = _plainly if _plain.value else depthwise_conv if self.depthwise else _convolve
        y = convolve(x.astype(self.dtype), kernel.astype(self.dtype), pair(self.stride), padding)
        return y if bias is None else y + align(bias, y).astype(y.dtype)


def _convolve(x: Array, kernel: Array, stride: tuple[int, int], padding: tuple[int, int]) -> Array:
    if kernels.convolves(x, kernel, stride, padding):
        return kernels.conv(x, kernel, stride, padding)
    # On a CPU the gradients take half the time as matrix products, for which x is copied. Not where that grows much.
    if jax.default_backend() == "cpu" and prod(kernel.shape[:2]) <= 4 * prod(stride):
        p, q, _, features = kernel.shape
        patches = unfold(x, (p, q), stride, padding)
        y = multiply(patches.reshape(-1, patches.shape[-1]), kernel.reshape(-1, features))
        return y.reshape(*patches.shape[:3], features)
    return _plainly(x, kernel, stride, padding)


def _plainly(x: Array, kernel: Array, stride: tuple[int, int], padding: tuple[int, int]) -> Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        stride,
        [(side, side) for side in padding],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1] // kernel.shape[2],
    )


def unfold(
    x: Float[Array, "b h w c"], size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> Float[Array, "b i j d"]:
    """Windows of a grid at every stride, flattened row by row, the channels fastest; zeros stand around the grid."""
    if kernels.unfolds(x, size, stride, padding):
        return kernels.unfold(x, size, stride, padding)
    x = jnp.pad(x, [(0, 0), *((side, side) for side in padding), (0, 0)])
    # Strided slices, for a gather's derivative is far slower: of columns, then of rows.
    for axis in (2, 1):
        length, step = size[axis - 1], stride[axis - 1]
        reach = (x.shape[axis] - length) // step * step + 1
        places = (jax.lax.slice_in_dim(x, first, first + reach, step, axis) for first in range(length))
        x = jnp.concatenate(list(places), axis=-1)
    return x


def depthwise_conv(
    x: Float[Array, "b h w c"], kernel: Float[Array, "p q 1 k"], stride: tuple[int, int], padding: tuple[int, int]
) -> Float[Array, "b i j k"]:
    """Each channel with kernels of its own, as a sum over the places in the kernel.

    XLA's own takes twenty times as long on a CPU, and its derivative is slower still: that is written out, too.
    """
    if kernels.convolves_depthwise(x, kernel, stride, padding):
        return kernels.depthwise(x, kernel, stride, padding)
    return _depthwise(stride, padding, x, kernel)


def _reads(
    stride: tuple[int, int], padding: tuple[int, int], x: Array, kernel: Array
) -> tuple[Array, list[tuple[int, int, slice, slice]]]:
    """The padded x, and for each place in the kernel the rows and columns of it that are read there."""
    padded = jnp.pad(x, [(0, 0), *((side, side) for side in padding), (0, 0)])

    def places(axis: int) -> list[slice]:
        size, step = kernel.shape[axis], stride[axis]
        reach = (padded.shape[1 + axis] - size) // step * step + 1
        return [slice(first, first + reach, step) for first in range(size)]

    return padded, [(i, j, rows, columns) for i, rows in enumerate(places(0)) for j, columns in enumerate(places(1))]


# jitted for its name alone, by which multiplications are counted
@partial(jax.jit, static_argnums=(0, 1))
def depthwise_sum(stride: tuple[int, int], padding: tuple[int, int], x: Array, kernel: Array) -> Array:
    padded, places = _reads(stride, padding, x, kernel)
    wide = at_least_float32(x.dtype)
    weights = kernel.astype(wide).reshape(*kernel.shape[:2], 1, 1, 1, x.shape[-1], -1)
    padded = padded[..., None].astype(wide)
    y = reduce(jnp.add, (padded[:, rows, columns] * weights[i, j] for i, j, rows, columns in places))
    return y.reshape(*y.shape[:3], -1).astype(x.dtype)


def _depthwise_backward(
    stride: tuple[int, int], padding: tuple[int, int], saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    """What a place in the kernel has read is a slice of x, and what it adds to dx is the same slice."""
    x, kernel = saved
    padded, places = _reads(stride, padding, x, kernel)
    channels, wide = x.shape[-1], at_least_float32(x.dtype)
    weights = kernel.reshape(*kernel.shape[:2], 1, 1, 1, channels, -1)
    dys = [dy[..., copy :: weights.shape[-1]] for copy in range(weights.shape[-1])]
    dkernel, dpadded = [], jnp.zeros(padded.shape, wide)
    for i, j, rows, columns in places:
        # Sums over the rows of a matrix: over three axes at once they take six times as long.
        read = padded[:, rows, columns].reshape(-1, channels)
        dkernel.append(jnp.stack([(read * dy.reshape(read.shape)).astype(wide).sum(0) for dy in dys], axis=-1))
        back = reduce(jnp.add, ((dy * weights[i, j, ..., copy]).astype(wide) for copy, dy in enumerate(dys)))
        ends = zip((rows, columns), padded.shape[1:3], strict=True)
        around = [(part.start, size - part.stop, part.step - 1) for part, size in ends]
        dpadded = dpadded + jax.lax.pad(back, jnp.zeros((), wide), [(0, 0, 0), *around, (0, 0, 0)])
    (down, across), (h, w) = padding, x.shape[1:3]
    dx = dpadded[:, down : down + h, across : across + w]
    return dx.astype(x.dtype), jnp.stack(dkernel).reshape(kernel.shape).astype(kernel.dtype)


_depthwise = jax.custom_vjp(depthwise_sum, nondiff_argnums=(0, 1))
_depthwise.defvjp(
    lambda stride, padding, x, kernel: (depthwise_sum(stride, padding, x, kernel), (x, kernel)), _depthwise_backward
)


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
        y = x.astype(at_least_float32(x.dtype)).reshape(-1, x.shape[-1])
        if train:
            y, mean, var = normalise_columns(y, scale, bias, self.epsilon)
            if not self.is_initializing():
                kept, unbiased = self.momentum, var * (len(y) / max(len(y) - 1, 1))
                running_mean.value = kept * running_mean.value + (1 - kept) * mean.astype(jnp.float32)
                running_var.value = kept * running_var.value + (1 - kept) * unbiased.astype(jnp.float32)
        else:
            factor = scale * jax.lax.rsqrt(running_var.value + self.epsilon)
            y = (y - running_mean.value[None].astype(y.dtype)) * factor[None].astype(y.dtype)
            y = y + bias[None].astype(y.dtype)
        return y.reshape(x.shape).astype(self.dtype)


@jax.custom_vjp
def normalise_columns(
    x: Float[Array, "n d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float | Array
) -> tuple[Float[Array, "n d"], Float[Array, " d"], Float[Array, " d"]]:
    """The normalised columns, their means and their variances; through these two nothing is differentiated."""
    return _columns_forward(x, scale, bias, epsilon)[0]


def _columns_forward(x: Array, scale: Array, bias: Array, epsilon: float | Array) -> tuple[tuple, tuple]:
    mean = x.mean(0)
    var = jnp.square(x - mean[None]).mean(0)
    rate = jax.lax.rsqrt(var + epsilon)
    y = (x - mean[None]) * (rate * scale.astype(x.dtype))[None] + bias[None].astype(x.dtype)
    return (y, mean, var), (x, scale, bias, mean, rate)


def _columns_backward(saved: tuple, cotangents: tuple) -> tuple[Array, Array, Array, None]:
    x, scale, bias, mean, rate = saved
    dy, n = cotangents[0], len(x)
    z = (x - mean[None]) * rate[None]
    dscale, dbias = (dy * z).sum(0), dy.sum(0)
    dx = (dy - (dbias / n)[None] - z * (dscale / n)[None]) * (rate * scale.astype(x.dtype))[None]
    return dx, dscale.astype(scale.dtype), dbias.astype(bias.dtype), None


normalise_columns.defvjp(_columns_forward, _columns_backward)


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
