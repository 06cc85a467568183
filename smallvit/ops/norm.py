"""Normalisation of rows and of columns, with custom derivatives."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit import kernels
from smallvit.ops.conv import max_pool
from smallvit.ops.dense import at_least_float32


def layer_norm(
    x: Float[Array, "n d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float, dtype: DTypeLike
) -> Float[Array, "n d"]:
    """LayerNorm of rows, computed in at least float32; the result has type `dtype`."""
    if x.dtype == dtype and kernels.takes_rows(x):
        return kernels.layer_norm(x, scale, bias, epsilon)
    return normalise(x, scale, bias, epsilon).astype(dtype)


@jax.custom_vjp
def normalise(
    x: Float[Array, "n d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float | Array
) -> Float[Array, "n d"]:
    """LayerNorm of rows, in at least float32. The custom derivative takes one pass over the rows instead of four."""
    return _normalise_forward(x, scale, bias, epsilon)[0]


def _normalise_forward(x: Array, scale: Array, bias: Array, epsilon: float | Array) -> tuple[Array, tuple]:
    y = x.astype(at_least_float32(x.dtype))
    mean = y.mean(-1, keepdims=True)
    y = y - mean
    rate = jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + epsilon)
    y = y * rate * scale[None].astype(y.dtype) + bias[None].astype(y.dtype)
    return y, (x, scale, bias, mean, rate)


def _normalise_backward(saved: tuple, dy: Array) -> tuple[Array, Array, Array, None]:
    x, scale, bias, mean, rate = saved
    z = (x.astype(mean.dtype) - mean) * rate
    dz = dy * scale[None].astype(dy.dtype)
    dx = rate * (dz - dz.mean(-1, keepdims=True) - z * (dz * z).mean(-1, keepdims=True))
    return dx.astype(x.dtype), (dy * z).sum(0).astype(scale.dtype), dy.sum(0).astype(bias.dtype), None


normalise.defvjp(_normalise_forward, _normalise_backward)


def batch_norm(
    x: Float[Array, "*lead d"],
    scale: Float[Array, " d"],
    bias: Float[Array, " d"],
    more: Float[Array, "*lead d"] | None,
    epsilon: float,
    dtype: DTypeLike,
    *,
    relu: bool,
    pool: tuple[int, int] | None = None,
) -> tuple[Float[Array, "*pooled d"], Float[Array, " d"], Float[Array, " d"]]:
    """Normalises channels in at least float32, adds `more`, then an optional ReLU and max pooling with a stride.

    Also returns mean and variance.
    """
    if pool is not None and more is None and x.dtype == dtype and kernels.pools(x, pool):
        return kernels.batch_norm_pool(x, scale, bias, epsilon, relu, pool)
    rows = x.reshape(-1, x.shape[-1])
    added = None if more is None else more.reshape(rows.shape)
    y, mean, var = _batch_norm(rows, scale, bias, added, epsilon, dtype, relu=relu)
    y = y.reshape(x.shape)
    return y if pool is None else max_pool(y, pool), mean, var


def _batch_norm(
    x: Array, scale: Array, bias: Array, more: Array | None, epsilon: float, dtype: DTypeLike, *, relu: bool
) -> tuple[Array, Array, Array]:
    if x.dtype == dtype and kernels.takes_rows(x):
        return kernels.batch_norm(x, scale, bias, more, epsilon, relu)
    y, mean, var = normalise_columns(x.astype(at_least_float32(x.dtype)), scale, bias, epsilon)
    y = y if more is None else y + more.astype(y.dtype)
    return (jax.nn.relu(y) if relu else y).astype(dtype), mean, var


@jax.custom_vjp
def normalise_columns(
    x: Float[Array, "n d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float | Array
) -> tuple[Float[Array, "n d"], Float[Array, " d"], Float[Array, " d"]]:
    """Returns the normalised columns, their means and variances; the latter two have no gradient."""
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
