"""Dense and LayerNorm: the two layers that every other one is made of."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit import kernels

# A factory makes a module once it is given a name, and whatever its caller adds: partial(Dense, ...).
Factory = Callable[..., nn.Module]


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


class Dense(nn.Module):
    """x @ kernel + bias over the last axis, whatever stands in front of it; with `gelu`, the exact GELU of that."""

    features: int
    use_bias: bool = True
    gelu: bool = False
    dtype: DTypeLike = jnp.float32
    kernel_init: jax.nn.initializers.Initializer = nn.initializers.xavier_normal()

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead features"]:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else None
        # One 2-D product: the gradients of the 3-D one take nearly twice as long on a CPU.
        flat, kernel = x.reshape(-1, x.shape[-1]).astype(self.dtype), kernel.astype(self.dtype)
        return multiply(flat, kernel, bias, gelu=self.gelu).reshape(*x.shape[:-1], self.features)


def multiply(
    x: Float[Array, "n d"], kernel: Float[Array, "d k"], bias: Float[Array, " k"] | None = None, *, gelu: bool = False
) -> Float[Array, "n k"]:
    """The product x @ kernel + bias or, with `gelu`, the exact GELU of that, in the type of x."""
    if kernels.multiplies(x, kernel):
        return kernels.dense(x, kernel, bias, gelu=gelu)
    y = product(x, kernel)
    if gelu and bias is not None and kernels.takes_rows(y):
        return kernels.bias_gelu(y, bias).astype(x.dtype)
    y = y if bias is None else y + bias[None].astype(y.dtype)
    return (exact_gelu(y) if gelu else y).astype(x.dtype)


def exact_gelu(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """GELU with erf, absolute error 1e-6; jax's own, with erfc, takes twice as long on a CPU."""
    y = x.astype(at_least_float32(x.dtype))
    return (y * (0.5 + 0.5 * jax.lax.erf(y * 0.5**0.5))).astype(x.dtype)


def product(x: Float[Array, "n d"], kernel: Float[Array, "d k"]) -> Float[Array, "n k"]:
    """The matrix product, added up in float32 at least; the kernels' way rounds the sum to bfloat16 at once."""
    if x.dtype == jnp.bfloat16 and kernels.takes_rows(x):
        return _bfloat16_product(x, kernel)
    return jnp.dot(x, kernel, preferred_element_type=at_least_float32(x.dtype))


@jax.custom_vjp
def _bfloat16_product(x: Array, kernel: Array) -> Array:
    return jnp.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)


def _bfloat16_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    # The kernel's gradient adds up over rows, which a CPU does three times as fast when they lie side by side.
    x, kernel = saved
    dx = jnp.dot(dy, kernel.T, preferred_element_type=jnp.float32)
    dkernel = jnp.dot(kernels.transpose(x), dy, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype)


_bfloat16_product.defvjp(lambda x, kernel: (_bfloat16_product(x, kernel), (x, kernel)), _bfloat16_backward)


class LayerNorm(nn.Module):
    """Normalises the last axis in float32; two passes, since E[x^2] - E[x]^2 cancels on flat patches."""

    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        rows = x.reshape(-1, x.shape[-1])
        if rows.dtype == self.dtype and kernels.takes_rows(rows):
            return kernels.layer_norm(rows, scale, bias, self.epsilon).reshape(x.shape)
        return normalise(rows, scale, bias, self.epsilon).astype(self.dtype).reshape(x.shape)


@jax.custom_vjp
def normalise(
    x: Float[Array, "n d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float | Array
) -> Float[Array, "n d"]:
    """LayerNorm of rows, in float32 at least. The derivative is written out: one pass over the rows, not four."""
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


def align(x: Array, like: Array) -> Array:
    """`x` with leading axes of length 1 up to the rank of `like`: broadcasting, said aloud."""
    return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)
