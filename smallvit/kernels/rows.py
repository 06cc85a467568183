"""Row-wise operations: LayerNorm, BatchNorm, bias with GELU, and a transpose that XLA does not fold away."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smallvit.kernels.library import call, like, some, usable


def takes_rows(x: Array) -> bool:
    """Whether `layer_norm`, `bias_gelu` and, for two axes, `batch_norm` and `transpose` support this array."""
    return usable() and x.ndim >= 1 and x.dtype in (jnp.float32, jnp.bfloat16) and some(*x.shape)


def layer_norm(
    x: Float[Array, "*lead d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float = 1e-5
) -> Float[Array, "*lead d"]:
    """Normalises the last axis in float32, in two passes; the result has the type of x."""
    flat = x.reshape(-1, x.shape[-1])
    return _layer_norm(epsilon, flat, scale.astype(jnp.float32), bias.astype(jnp.float32)).reshape(x.shape)


def batch_norm(
    x: Float[Array, "n d"],
    scale: Float[Array, " d"],
    bias: Float[Array, " d"],
    more: Float[Array, "n d"] | None,
    epsilon: float,
    relu: bool,
) -> tuple[Float[Array, "n d"], Float[Array, " d"], Float[Array, " d"]]:
    """Normalises columns, adds `more`, applies an optional ReLU; also returns the columns' means and variances.

    The means and variances have no gradient.
    """
    return _batch_norm(epsilon, relu, x, scale.astype(jnp.float32), bias.astype(jnp.float32), more)


def bias_gelu(x: Float[Array, "*lead d"], bias: Float[Array, " d"]) -> Float[Array, "*lead d"]:
    """Exact GELU of x + bias, computed in float32; the result has the type of x."""
    return _bias_gelu(x.reshape(-1, x.shape[-1]), bias.astype(jnp.float32)).reshape(x.shape)


@jax.custom_vjp
def transpose(x: Float[Array, "n m"]) -> Float[Array, "m n"]:
    """Transposes x in memory: XLA folds its own transpose into a matrix product, even if that makes it slow."""
    return call("transpose", [jax.ShapeDtypeStruct(x.shape[::-1], x.dtype)], x)[0]


transpose.defvjp(lambda x: (transpose(x), None), lambda _, dy: (transpose(dy),))


def _norm_forward(epsilon: float, x: Array, scale: Array, bias: Array) -> tuple[Array, tuple]:
    (y,) = call("norm_forward", [like(x)], x, scale, bias, epsilon=np.float32(epsilon))
    return y, (x, scale)


def _norm_backward(epsilon: float, saved: tuple, dy: Array) -> tuple[Array, Array, Array]:
    x, scale = saved
    dx, dscale, dbias = call(
        "norm_backward", [like(x), like(scale), like(scale)], x, scale, dy, epsilon=np.float32(epsilon)
    )
    return dx, dscale, dbias


def _norm_out(epsilon: float, x: Array, scale: Array, bias: Array) -> Array:
    return _norm_forward(epsilon, x, scale, bias)[0]


_layer_norm = jax.custom_vjp(_norm_out, nondiff_argnums=(0,))
_layer_norm.defvjp(_norm_forward, _norm_backward)


def _batch_forward(
    epsilon: float, relu: bool, x: Array, scale: Array, bias: Array, more: Array | None
) -> tuple[tuple[Array, Array, Array], tuple]:
    added = jnp.zeros((0, 0), x.dtype) if more is None else more
    mean, var = moments(x)
    constants = dict(epsilon=np.float32(epsilon), relu=relu)
    (y,) = call("batch_forward", [like(x)], x, scale, bias, mean, var, added, **constants)
    return (y, mean, var), (x, scale, mean, var, y if relu else None, None if more is None else scale)


def moments(x: Float[Array, "n d"]) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """The mean and the variance of each column: of all rows, from those of each device."""
    (parts,) = call("column_moments", [jax.ShapeDtypeStruct((2, x.shape[1]), jnp.float32)], x)
    means, variances = parts[:, 0], parts[:, 1]
    if len(parts) == 1:
        return means[0], variances[0]
    mean = means.mean(axis=0)
    return mean, (variances + (means - mean) ** 2).mean(axis=0)


def _batch_backward(
    epsilon: float, relu: bool, saved: tuple, cotangents: tuple
) -> tuple[Array, Array, Array, Array | None]:
    x, scale, mean, var, y, adds = saved  # adds is None if nothing was added
    none, dy = jnp.zeros((0, 0), x.dtype), cotangents[0]
    rows, constants = np.int64(len(x)), dict(epsilon=np.float32(epsilon), relu=relu)
    out = none if y is None else y
    dscale, dbias = call("batch_sums", [like(scale), like(scale)], x, mean, var, out, dy, **constants)
    results = [like(x), like(none if adds is None or not relu else x)]
    dx, dmore = call("batch_backward", results, x, scale, mean, var, out, dy, dscale, dbias, **constants, rows=rows)
    return dx, dscale, dbias, None if adds is None else dmore if relu else dy


def _batch_out(
    epsilon: float, relu: bool, x: Array, scale: Array, bias: Array, more: Array | None
) -> tuple[Array, Array, Array]:
    return _batch_forward(epsilon, relu, x, scale, bias, more)[0]


_batch_norm = jax.custom_vjp(_batch_out, nondiff_argnums=(0, 1))
_batch_norm.defvjp(_batch_forward, _batch_backward)


@jax.custom_vjp
def _bias_gelu(x: Array, bias: Array) -> Array:
    return call("gelu_forward", [like(x)], x, bias)[0]


def _gelu_backward(saved: tuple, dy: Array) -> tuple[Array, Array]:
    x, bias = saved
    dx, dbias = call("gelu_backward", [like(x), like(bias)], x, bias, dy)
    return dx, dbias


_bias_gelu.defvjp(lambda x, bias: (_bias_gelu(x, bias), (x, bias)), _gelu_backward)
