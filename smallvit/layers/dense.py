"""Dense and LayerNorm: the two layers that every other one is made of."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# A factory makes a module once it is given a name, and whatever its caller adds: partial(Dense, ...).
Factory = Callable[..., nn.Module]


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


class Dense(nn.Module):
    """x @ kernel + bias over the last axis, whatever stands in front of it."""

    features: int
    use_bias: bool = True
    dtype: DTypeLike = jnp.float32
    kernel_init: jax.nn.initializers.Initializer = nn.initializers.xavier_normal()

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead features"]:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        # One 2-D product: the gradients of the 3-D one take nearly twice as long on a CPU.
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        y = jnp.dot(flat, kernel.astype(self.dtype), preferred_element_type=at_least_float32(self.dtype))
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,))[None].astype(y.dtype)
        return y.astype(self.dtype).reshape(*x.shape[:-1], self.features)


class LayerNorm(nn.Module):
    """Normalises the last axis in float32; two passes, since E[x^2] - E[x]^2 cancels on flat patches."""

    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        y = x.astype(at_least_float32(x.dtype))
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.epsilon)
        y = y * align(scale, y).astype(y.dtype) + align(bias, y).astype(y.dtype)
        return y.astype(self.dtype)


def align(x: Array, like: Array) -> Array:
    """`x` with leading axes of length 1 up to the rank of `like`: broadcasting, said aloud."""
    return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)
