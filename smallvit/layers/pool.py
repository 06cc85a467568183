"""Pooling of tokens: to one vector for the head, or to a few merged tokens."""

from typing import Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smallvit.layers.basic import Factory, LayerNorm
from smallvit.ops import at_least_float32

Pool = Literal["cls", "mean"]


def check_pool(pool: Pool) -> None:
    if pool not in get_args(Pool):
        raise ValueError(f"unknown pool {pool!r}: choose 'cls' (a class token) or 'mean' (the average of all tokens)")


def pool_tokens(x: Float[Array, "b n d"], pool: Pool) -> Float[Array, "b d"]:
    return x[:, 0] if pool == "cls" else x.mean(axis=1)


class PatchMerger(nn.Module):
    """Learned queries that each attend to all tokens (https://arxiv.org/abs/2202.12015): n in, a fixed number out."""

    dim: int
    num_tokens_out: int
    norm: Factory = LayerNorm

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b m d"]:
        if x.shape[-1] != self.dim:
            raise ValueError(f"tokens have dimension {x.shape[-1]}, the merger dim={self.dim}: make them equal")
        queries = self.param("queries", nn.initializers.normal(1.0), (self.num_tokens_out, self.dim))
        x = self.norm(name="norm")(x)
        queries = (queries * self.dim**-0.5).astype(x.dtype)
        logits = jnp.einsum("md,bnd->bmn", queries, x, preferred_element_type=at_least_float32(x.dtype))
        return jnp.einsum("bmn,bnd->bmd", jax.nn.softmax(logits, axis=-1).astype(x.dtype), x)
