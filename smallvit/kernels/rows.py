"""What is done row by row: LayerNorm, bias and GELU, and a transpose that XLA does not fold away."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smallvit.kernels.library import call, like, some, usable


def takes_rows(x: Array) -> bool:
    """Whether `layer_norm`, `bias_gelu` and, for two axes, `transpose` take this array."""
    return usable() and x.ndim >= 1 and x.dtype in (jnp.float32, jnp.bfloat16) and some(*x.shape)


def layer_norm(
    x: Float[Array, "*lead d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float = 1e-5
) -> Float[Array, "*lead d"]:
    """Normalises the last axis in float32, in two passes; the result has the type of x."""
    flat = x.reshape(-1, x.shape[-1])
    return _layer_norm(epsilon, flat, scale.astype(jnp.float32), bias.astype(jnp.float32)).reshape(x.shape)


def bias_gelu(x: Float[Array, "*lead d"], bias: Float[Array, " d"]) -> Float[Array, "*lead d"]:
    """The exact GELU of x + bias, computed in float32; the result has the type of x."""
    return _bias_gelu(x.reshape(-1, x.shape[-1]), bias.astype(jnp.float32)).reshape(x.shape)


@jax.custom_vjp
def transpose(x: Float[Array, "n m"]) -> Float[Array, "m n"]:
    """x', in memory: XLA folds its own transpose into a matrix product, even where that makes the product slow."""
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


@jax.custom_vjp
def _bias_gelu(x: Array, bias: Array) -> Array:
    return call("gelu_forward", [like(x)], x, bias)[0]


def _gelu_backward(saved: tuple, dy: Array) -> tuple[Array, Array]:
    x, bias = saved
    dx, dbias = call("gelu_backward", [like(x), like(bias)], x, bias, dy)
    return dx, dbias


_bias_gelu.defvjp(lambda x, bias: (_bias_gelu(x, bias), (x, bias)), _gelu_backward)
