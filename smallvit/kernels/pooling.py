"""Max pooling, alone and after BatchNorm."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smallvit.kernels.grid import Pair
from smallvit.kernels.library import call, like, some, usable
from smallvit.kernels.rows import moments

MOST = 64  # pixels of a rectangle


def pools(x: Array, stride: Pair) -> bool:
    """Whether `max_pool` and `batch_norm_pool` support these."""
    fits = x.dtype in (jnp.float32, jnp.bfloat16) and x.ndim == 4 and stride[0] * stride[1] <= MOST
    return usable() and fits and some(*x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def max_pool(x: Float[Array, "b h w c"], stride: Pair) -> Float[Array, "b i j c"]:
    """The maximum of each rectangle, the last of which may be smaller."""
    return call("max_pool", [_pooled(x, stride)], x, stride=np.asarray(stride, np.int64))[0]


def _max_pool_backward(stride: Pair, x: Array, dy: Array) -> tuple[Array]:
    return (call("max_pool_gradient", [like(x)], x, dy, stride=np.asarray(stride, np.int64))[0],)


max_pool.defvjp(lambda x, stride: (max_pool(x, stride), x), _max_pool_backward)


def batch_norm_pool(
    x: Float[Array, "b h w c"],
    scale: Float[Array, " c"],
    bias: Float[Array, " c"],
    epsilon: float,
    relu: bool,
    stride: Pair,
) -> tuple[Float[Array, "b i j c"], Float[Array, " c"], Float[Array, " c"]]:
    """`max_pool` of `batch_norm`; also returns the channels' means and variances, which have no gradient.

    The result of BatchNorm is not stored: the backward pass computes it again.
    """
    return _batch_norm_pool(epsilon, relu, stride, x, scale.astype(jnp.float32), bias.astype(jnp.float32))


def _pooled(x: Array, stride: Pair) -> jax.ShapeDtypeStruct:
    b, h, w, c = x.shape
    return jax.ShapeDtypeStruct((b, -(-h // stride[0]), -(-w // stride[1]), c), x.dtype)


def _constants(epsilon: float, relu: bool, stride: Pair) -> dict:
    return dict(epsilon=np.float32(epsilon), relu=relu, stride=np.asarray(stride, np.int64))


def _forward(
    epsilon: float, relu: bool, stride: Pair, x: Array, scale: Array, bias: Array
) -> tuple[tuple[Array, Array, Array], tuple]:
    mean, var = moments(x.reshape(-1, x.shape[-1]))
    saved = x, scale, bias, mean, var
    (y,) = call("batch_pool_forward", [_pooled(x, stride)], *saved, **_constants(epsilon, relu, stride))
    return (y, mean, var), saved


def _backward(epsilon: float, relu: bool, stride: Pair, saved: tuple, cotangents: tuple) -> tuple[Array, Array, Array]:
    (x, scale, *_), dy, constants = saved, cotangents[0], _constants(epsilon, relu, stride)
    dscale, dbias = call("batch_pool_sums", [like(scale), like(scale)], *saved, dy, **constants)
    rows = np.int64(x.size // x.shape[-1])
    (dx,) = call("batch_pool_backward", [like(x)], *saved, dy, dscale, dbias, **constants, rows=rows)
    return dx, dscale, dbias


def _out(epsilon: float, relu: bool, stride: Pair, x: Array, scale: Array, bias: Array) -> tuple[Array, Array, Array]:
    return _forward(epsilon, relu, stride, x, scale, bias)[0]


_batch_norm_pool = jax.custom_vjp(_out, nondiff_argnums=(0, 1, 2))
_batch_norm_pool.defvjp(_forward, _backward)
