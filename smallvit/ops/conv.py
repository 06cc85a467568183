"""Convolutions and max pooling over a grid: the choice of implementation, and custom derivatives."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from math import prod

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from smallvit import kernels
from smallvit.ops.dense import at_least_float32, multiply

# jax retraces when it changes.
_plain = jax.make_user_context(False)


@contextmanager
def plain_convolutions() -> Iterator[None]:
    """Within this context, a convolution is one standard operation, as in exported programs.

    Otherwise, a CPU uses sums and products, which are faster, above all in the gradients.
    """
    with _plain(True):
        yield


def convolve(
    x: Float[Array, "b h w c"],
    kernel: Float[Array, "p q _ k"],
    stride: tuple[int, int],
    padding: tuple[int, int],
    *,
    depthwise: bool = False,
) -> Float[Array, "b i j k"]:
    """Convolves a zero-padded grid; with `depthwise`, each channel has its own kernels."""
    way = _plainly if _plain.value else depthwise_conv if depthwise else _convolve
    return way(x, kernel, stride, padding)


def _convolve(x: Array, kernel: Array, stride: tuple[int, int], padding: tuple[int, int]) -> Array:
    if kernels.convolves(x, kernel, stride, padding):
        return kernels.conv(x, kernel, stride, padding)
    # On a CPU, gradients take half the time as matrix products, for which x is unfolded, unless that is much larger.
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
    """Returns the windows of a zero-padded grid at every stride, each flattened row by row, channels fastest."""
    if kernels.unfolds(x, size, stride, padding):
        return kernels.unfold(x, size, stride, padding)
    x = jnp.pad(x, [(0, 0), *((side, side) for side in padding), (0, 0)])
    # Strided slices of columns, then of rows: the derivative of a gather is far slower.
    for axis in (2, 1):
        length, step = size[axis - 1], stride[axis - 1]
        reach = (x.shape[axis] - length) // step * step + 1
        places = (jax.lax.slice_in_dim(x, first, first + reach, step, axis) for first in range(length))
        x = jnp.concatenate(list(places), axis=-1)
    return x


def max_pool(x: Float[Array, "b h w c"], stride: tuple[int, int]) -> Float[Array, "b i j c"]:
    """The maximum over each rectangle, of which the last ones may be smaller; equal numbers share the gradient.

    The values of flax's `max_pool`, whose gradient makes a training step of HybridViT a quarter slower on a CPU.
    """
    if kernels.pools(x, stride):
        return kernels.max_pool(x, stride)
    down, across = stride
    around = [(0, 0), (0, -x.shape[1] % down), (0, -x.shape[2] % across), (0, 0)]
    x = jnp.pad(x, around, constant_values=-jnp.inf)
    return rearrange(x, "b (h i) (w j) c -> b h i w j c", i=down, j=across).max((2, 4))


def depthwise_conv(
    x: Float[Array, "b h w c"], kernel: Float[Array, "p q 1 k"], stride: tuple[int, int], padding: tuple[int, int]
) -> Float[Array, "b i j k"]:
    """Convolves each channel with its own kernels, as a sum over the kernel positions.

    XLA's convolution takes twenty times as long on a CPU, and its derivative is even slower, hence a custom one.
    """
    if kernels.convolves_depthwise(x, kernel, stride, padding):
        return kernels.depthwise(x, kernel, stride, padding)
    return _depthwise(stride, padding, x, kernel)


def _reads(
    stride: tuple[int, int], padding: tuple[int, int], x: Array, kernel: Array
) -> tuple[Array, list[tuple[int, int, slice, slice]]]:
    """Returns the padded x, and for each kernel position the rows and columns that it reads."""
    padded = jnp.pad(x, [(0, 0), *((side, side) for side in padding), (0, 0)])

    def places(axis: int) -> list[slice]:
        size, step = kernel.shape[axis], stride[axis]
        reach = (padded.shape[1 + axis] - size) // step * step + 1
        return [slice(first, first + reach, step) for first in range(size)]

    return padded, [(i, j, rows, columns) for i, rows in enumerate(places(0)) for j, columns in enumerate(places(1))]


# jitted only for its name, which is used to count multiplications
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
    """Each kernel position reads one slice of x, and adds to the same slice of dx."""
    x, kernel = saved
    padded, places = _reads(stride, padding, x, kernel)
    channels, wide = x.shape[-1], at_least_float32(x.dtype)
    weights = kernel.reshape(*kernel.shape[:2], 1, 1, 1, channels, -1)
    dys = [dy[..., copy :: weights.shape[-1]] for copy in range(weights.shape[-1])]
    dkernel, dpadded = [], jnp.zeros(padded.shape, wide)
    for i, j, rows, columns in places:
        # As a sum over the rows of a matrix: a sum over three axes takes six times as long.
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
