"""x @ kernel + bias with an optional GELU, in one pass; and the gradients."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smallvit.kernels.library import call, has_bfloat16, like, optional, some, usable

FEWEST = 16  # rows: with fewer, packing the weights does not pay off


def multiplies(x: Array, kernel: Array) -> bool:
    """Whether `dense` supports these. XLA is faster on CPUs with bfloat16 instructions."""
    return (
        usable()
        and x.dtype == kernel.dtype
        and (x.dtype == jnp.float32 or (x.dtype == jnp.bfloat16 and not has_bfloat16()))
        and x.ndim == kernel.ndim == 2
        and some(*x.shape, *kernel.shape)
        and x.shape[0] >= FEWEST
    )


def dense(
    x: Float[Array, "n d"], kernel: Float[Array, "d k"], bias: Float[Array, " k"] | None = None, *, gelu: bool = False
) -> Float[Array, "n k"]:
    """Computes x @ kernel + bias, optionally with exact GELU, in float32; the result has the type of x."""
    bias = None if bias is None else bias.astype(jnp.float32)
    return _dense_gelu(x, kernel, bias) if gelu else _dense(x, kernel, bias)


def _product(x: Array, kernel: Array, bias: Array | None, *, turned: bool = False, gelu: bool = False) -> Array:
    result = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[0 if turned else 1]), x.dtype)
    return call("dense", [result], x, kernel, optional(bias, 1), turned=turned, gelu=gelu)[0]


def turned_product(x: Float[Array, "n k"], kernel: Float[Array, "d k"]) -> Float[Array, "n d"]:
    """Returns x @ kernel.T, without a gradient."""
    return _product(x, kernel, None, turned=True)


def _gradients(x: Array, kernel: Array, dy: Array) -> tuple[Array, Array, Array]:
    """Returns the gradients of x, kernel and bias."""
    dkernel = jax.ShapeDtypeStruct(kernel.shape, jnp.float32)
    dkernel, dbias = call("dense_gradient", [dkernel, jax.ShapeDtypeStruct(dy.shape[1:], jnp.float32)], x, dy)
    return turned_product(dy, kernel), dkernel.astype(kernel.dtype), dbias


@jax.custom_vjp
def _dense(x: Array, kernel: Array, bias: Array | None) -> Array:
    return _product(x, kernel, bias)


def _dense_backward(saved: tuple, dy: Array) -> tuple[Array, Array, Array | None]:
    x, kernel, bias = saved
    dx, dkernel, dbias = _gradients(x, kernel, dy)
    return dx, dkernel, None if bias is None else dbias


_dense.defvjp(lambda x, kernel, bias: (_dense(x, kernel, bias), (x, kernel, bias)), _dense_backward)


@jax.custom_vjp
def _dense_gelu(x: Array, kernel: Array, bias: Array | None) -> Array:
    return _product(x, kernel, bias, gelu=True)


def _gelu_forward(x: Array, kernel: Array, bias: Array | None) -> tuple[Array, tuple]:
    result = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[1]), x.dtype)
    y, plain = call("dense_gelu", [result, result], x, kernel, optional(bias, 1))
    return y, (x, kernel, bias, plain)


def _gelu_backward(saved: tuple, dy: Array) -> tuple[Array, Array, Array | None]:
    x, kernel, bias, plain = saved
    nothing = jnp.zeros(plain.shape[1:], jnp.float32)  # plain includes the bias
    dplain, dbias = call("gelu_backward", [like(plain), like(nothing)], plain, nothing, dy)
    dx, dkernel, _ = _gradients(x, kernel, dplain)
    return dx, dkernel, None if bias is None else dbias


_dense_gelu.defvjp(_gelu_forward, _gelu_backward)
