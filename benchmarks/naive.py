"""The paper's SL-ViT as one would first write it in Flax: the "before" of benchmarks/peers.py.

Tokens stay 3-D, heads stay behind tokens, every derivative is left to autodiff.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array


class NaiveSLViT(nn.Module):
    num_classes: int
    patch_size: int
    dim: int
    depth: int
    heads: int
    dim_head: int
    mlp_dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, image: Array, *, train: bool = False) -> Array:
        b, height, width, _ = image.shape
        p, d = self.patch_size, self.patch_size // 2
        padded = jnp.pad(image, ((0, 0), (d, d), (d, d), (0, 0)))
        corners = [padded[:, i : i + height, j : j + width] for i in (0, 2 * d) for j in (0, 2 * d)]
        x = jnp.concatenate([image, *corners], axis=-1)
        x = x.reshape(b, height // p, p, width // p, p, -1).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(b, (height // p) * (width // p), -1)
        x = nn.Dense(self.dim, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        cls = self.param("cls", nn.initializers.normal(), (1, 1, self.dim)).astype(self.dtype)
        x = jnp.concatenate([jnp.tile(cls, (b, 1, 1)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(), (1, *x.shape[1:])).astype(self.dtype)
        for i in range(self.depth):
            x = x + self._attention(nn.LayerNorm(dtype=self.dtype)(x), f"temperature_{i}")
            y = nn.Dense(self.mlp_dim, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(self.dim, dtype=self.dtype)(jax.nn.gelu(y, approximate=False))
        return nn.Dense(self.num_classes, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)[:, 0])

    def _attention(self, x: Array, name: str) -> Array:
        b, n, _ = x.shape
        inner = self.heads * self.dim_head
        qkv = nn.Dense(3 * inner, use_bias=False, dtype=self.dtype)(x)
        q, k, v = (y.reshape(b, n, self.heads, self.dim_head) for y in jnp.split(qkv, 3, axis=-1))
        temperature = self.param(name, nn.initializers.constant(0.25), ())
        logits = jnp.einsum("bihd,bjhd->bhij", q, k) * temperature.astype(self.dtype)
        logits = jnp.where(jnp.eye(n, dtype=bool), -jnp.inf, logits)
        out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(logits, axis=-1), v)
        return nn.Dense(self.dim, dtype=self.dtype)(out.reshape(b, n, inner))
