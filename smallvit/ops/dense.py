"""Matrix products with bias and GELU, and their helpers."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit import kernels


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def multiply(
    x: Float[Array, "n d"], kernel: Float[Array, "d k"], bias: Float[Array, " k"] | None = None, *, gelu: bool = False
) -> Float[Array, "n k"]:
    """Computes x @ kernel + bias, followed by exact GELU with `gelu`; the result has the type of x."""
    if kernels.multiplies(x, kernel):
        return kernels.dense(x, kernel, bias, gelu=gelu)
    y = product(x, kernel)
    if gelu and bias is not None and kernels.takes_rows(y):
        return kernels.bias_gelu(y, bias).astype(x.dtype)
    y = y if bias is None else y + bias[None].astype(y.dtype)
    return (exact_gelu(y) if gelu else y).astype(x.dtype)


def exact_gelu(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """GELU with erf, absolute error 1e-6; that of jax, with erfc, takes twice as long on a CPU."""
    y = x.astype(at_least_float32(x.dtype))
    return (y * (0.5 + 0.5 * jax.lax.erf(y * 0.5**0.5))).astype(x.dtype)


def product(x: Float[Array, "n d"], kernel: Float[Array, "d k"]) -> Float[Array, "n k"]:
    """Matrix product, accumulated in at least float32; with the kernels, a bfloat16 result is rounded at once."""
    if x.dtype == jnp.bfloat16 and kernels.takes_rows(x):
        return _bfloat16_product(x, kernel)
    return jnp.dot(x, kernel, preferred_element_type=at_least_float32(x.dtype))


@jax.custom_vjp
def _bfloat16_product(x: Array, kernel: Array) -> Array:
    return jnp.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)


def _bfloat16_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    # The kernel's gradient sums over rows, which is three times as fast on a CPU if they are contiguous.
    x, kernel = saved
    dx = jnp.dot(dy, kernel.T, preferred_element_type=jnp.float32)
    dkernel = jnp.dot(kernels.transpose(x), dy, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype)


_bfloat16_product.defvjp(lambda x, kernel: (_bfloat16_product(x, kernel), (x, kernel)), _bfloat16_backward)


def align(x: Array, like: Array) -> Array:
    """Adds leading axes of length 1 to `x`, up to the rank of `like`: explicit broadcasting."""
    return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)
