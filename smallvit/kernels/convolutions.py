"""Convolutions as matrix products, with windows gathered a few rows at a time; and depthwise convolutions."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smallvit.kernels.grid import Geometry, Pair, fold
from smallvit.kernels.library import call, has_bfloat16, like, some, usable
from smallvit.kernels.linear import turned_product


def convolves(x: Array, kernel: Array, stride: Pair, padding: Pair) -> bool:
    """Whether `conv` supports these. XLA is faster on CPUs with bfloat16 instructions."""
    return (
        usable()
        and x.ndim == kernel.ndim == 4
        and x.dtype == kernel.dtype
        and (x.dtype == jnp.float32 or (x.dtype == jnp.bfloat16 and not has_bfloat16()))
        and x.shape[3] == kernel.shape[2]
        and some(*x.shape, *kernel.shape)
        and some(*Geometry.of(x, kernel, stride, padding).windows())
    )


def conv(
    x: Float[Array, "b h w c"], kernel: Float[Array, "p q c k"], stride: Pair, padding: Pair
) -> Float[Array, "b i j k"]:
    """Convolution with zero padding, accumulated in float32; the result has the type of x."""
    return _conv(Geometry.of(x, kernel, stride, padding), x, kernel)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(geometry: Geometry, x: Array, kernel: Array) -> Array:
    result = jax.ShapeDtypeStruct((*geometry.windows()[:3], kernel.shape[3]), x.dtype)
    return call("conv", [result], x, kernel.reshape(-1, kernel.shape[3]), **geometry.attributes())[0]


def _conv_backward(geometry: Geometry, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    features = kernel.shape[-1]
    dkernel = jax.ShapeDtypeStruct(kernel.shape, jnp.float32)
    (dkernel,) = call("conv_gradient", [dkernel], x, dy, **geometry.attributes())
    if (back := geometry.back(dy.shape)) is not None:
        dx = jnp.asarray(_conv(back, dy, kernel[::-1, ::-1].swapaxes(2, 3)))
    else:
        windows = turned_product(dy.reshape(-1, features), kernel.reshape(-1, features))
        dx = fold(geometry, windows.reshape(geometry.windows()))
    return dx, dkernel.astype(kernel.dtype)


_conv.defvjp(lambda geometry, x, kernel: (_conv(geometry, x, kernel), (x, kernel)), _conv_backward)


def convolves_depthwise(x: Array, kernel: Array, stride: Pair, padding: Pair) -> bool:
    """Whether `depthwise` supports these: one kernel per channel and stride 1."""
    return (
        usable()
        and x.ndim == kernel.ndim == 4
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and kernel.shape[2:] == (1, x.shape[3])
        and prod(kernel.shape[:2]) <= 64
        and some(*x.shape, *kernel.shape)
        and some(*(windows := Geometry.of(x, kernel, stride, padding)).windows())
        and windows.back(windows.windows()) is not None
    )


def depthwise(
    x: Float[Array, "b h w c"], kernel: Float[Array, "p q 1 c"], stride: Pair, padding: Pair
) -> Float[Array, "b i j c"]:
    """Depthwise convolution with zero padding; the result has the type of x."""
    return _depthwise(Geometry.of(x, kernel, stride, padding), x, kernel[:, :, 0].astype(jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _depthwise(geometry: Geometry, x: Array, kernel: Array) -> Array:
    result = jax.ShapeDtypeStruct((*geometry.windows()[:3], x.shape[3]), x.dtype)
    return call("depthwise", [result], x, kernel, **geometry.attributes())[0]


def _depthwise_backward(geometry: Geometry, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    back = geometry.back(dy.shape)
    assert back is not None  # see convolves_depthwise
    (dkernel,) = call("depthwise_gradient", [like(kernel)], x, dy, **geometry.attributes())
    return _depthwise(back, dy, kernel[::-1, ::-1]), dkernel


_depthwise.defvjp(lambda geometry, x, kernel: (_depthwise(geometry, x, kernel), (x, kernel)), _depthwise_backward)
