"""Dense and the two norms, the basic layers of all others."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit.ops import align, at_least_float32, batch_norm, layer_norm, max_pool, multiply

# A factory makes a module, given a name and whatever its caller adds: partial(Dense, ...).
Factory = Callable[..., nn.Module]


def normal_or_xavier(std: float | None) -> jax.nn.initializers.Initializer:
    return nn.initializers.xavier_normal() if std is None else nn.initializers.normal(std)


class Dense(nn.Module):
    """x @ kernel + bias over the last axis, with any leading axes; with `gelu`, followed by exact GELU."""

    features: int
    use_bias: bool = True
    gelu: bool = False
    dtype: DTypeLike = jnp.float32
    kernel_init: jax.nn.initializers.Initializer = nn.initializers.xavier_normal()
    uniform: bool = False  # initialise kernel and bias uniformly within 1 / sqrt(inputs), torch's default

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead features"]:
        kernel_init, bias_init = self.kernel_init, nn.initializers.zeros
        if self.uniform:
            kernel_init = bias_init = _uniform_within(x.shape[-1] ** -0.5)
        kernel = self.param("kernel", kernel_init, (x.shape[-1], self.features))
        bias = self.param("bias", bias_init, (self.features,)) if self.use_bias else None
        # One 2-D product: the gradients of the 3-D one take nearly twice as long on a CPU.
        flat, kernel = x.reshape(-1, x.shape[-1]).astype(self.dtype), kernel.astype(self.dtype)
        return multiply(flat, kernel, bias, gelu=self.gelu).reshape(*x.shape[:-1], self.features)


def _uniform_within(bound: float) -> jax.nn.initializers.Initializer:
    draw = jax.nn.initializers.uniform(2 * bound)  # starts at 0
    return lambda *args, **kwargs: draw(*args, **kwargs) - bound


class LayerNorm(nn.Module):
    """Normalises the last axis in float32; in two passes, since E[x^2] - E[x]^2 cancels on flat patches."""

    epsilon: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        rows = x.reshape(-1, x.shape[-1])
        return layer_norm(rows, scale, bias, self.epsilon, self.dtype).reshape(x.shape)


MOMENTUM = 0.9  # fraction of BatchNorm's running statistics that is kept at each step


class BatchNorm(nn.Module):
    """Normalises each channel over the batch, in float32; evaluation uses the running moments of `batch_stats`.

    `more` is added to the output, as the shortcut of a residual pair; with `relu`, a ReLU follows, and with `pool`, max
    pooling with this stride. Training needs `mutable=["batch_stats"]`. As in torch, the running variance is the
    unbiased one.
    """

    scale_init: float = 1.0
    epsilon: float = 1e-5
    relu: bool = False
    pool: tuple[int, int] | None = None
    dtype: DTypeLike = jnp.float32

    def __call__(
        self, x: Float[Array, "b *rest d"], more: Float[Array, "b *rest d"] | None = None, *, train: bool = False
    ) -> Float[Array, "b *pooled d"]:
        if not train:
            factor, shift = self.affine(x.shape[-1])
            return self.finish(x.astype(at_least_float32(x.dtype)) * align(factor, x), shift, more)
        running_mean, running_var, scale, bias = self._variables(x.shape[-1])
        y, mean, var = batch_norm(x, scale, bias, more, self.epsilon, self.dtype, relu=self.relu, pool=self.pool)
        if not self.is_initializing():
            number = x.size // x.shape[-1]
            kept, unbiased = MOMENTUM, var * (number / max(number - 1, 1))
            running_mean.value = kept * running_mean.value + (1 - kept) * mean.astype(jnp.float32)
            running_var.value = kept * running_var.value + (1 - kept) * unbiased.astype(jnp.float32)
        return y.astype(self.dtype)

    def affine(self, channels: int) -> tuple[Float[Array, "d"], Float[Array, "d"]]:
        """In evaluation, BatchNorm is a factor and a term per channel."""
        mean, var, scale, bias = self._variables(channels)
        factor = scale * jax.lax.rsqrt(var.value + self.epsilon)
        return factor, bias - mean.value * factor

    def finish(
        self, y: Float[Array, "b *rest d"], shift: Float[Array, "d"], more: Float[Array, "b *rest d"] | None
    ) -> Float[Array, "b *pooled d"]:
        """The rest of the evaluation, after the factor: the term, `more`, ReLU and max pooling."""
        wide = at_least_float32(y.dtype)
        y = y.astype(wide) + align(shift, y).astype(wide)
        y = y if more is None else y + more.astype(wide)
        y = (jax.nn.relu(y) if self.relu else y).astype(self.dtype)
        return y if self.pool is None else max_pool(y, self.pool)

    @nn.compact
    def _variables(self, channels: int) -> tuple[nn.Variable, nn.Variable, Float[Array, "d"], Float[Array, "d"]]:
        """Running mean and variance, scale and bias."""
        return (
            self.variable("batch_stats", "mean", jnp.zeros, (channels,)),
            self.variable("batch_stats", "var", jnp.ones, (channels,)),
            self.param("scale", nn.initializers.constant(self.scale_init), (channels,)),
            self.param("bias", nn.initializers.zeros, (channels,)),
        )
