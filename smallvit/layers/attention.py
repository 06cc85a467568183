"""Attention for all architectures, with Locality Self-Attention (https://arxiv.org/abs/2112.13492) as an option."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from smallvit.layers.basic import Dense, Factory, normal_or_xavier
from smallvit.ops import align, attend
from smallvit.ops.attention import (
    Mix,
    attend_mixed,
    attention_logits,
    keep_mask,
    merge_heads,
    mix_heads,
    scale_queries,
    split_heads,
    split_joined,
)

LSAOption = bool | Literal["mask", "temperature"]  # True is both


def lsa_parts(lsa: LSAOption) -> tuple[bool, bool]:
    """(learned temperature, diagonal mask) of an `lsa` option."""
    if lsa not in (True, False, "mask", "temperature"):
        raise ValueError(f"unknown lsa {lsa!r}: choose True (both), 'mask', 'temperature' or False")
    return lsa in (True, "temperature"), lsa in (True, "mask")


class Attend(nn.Module):
    """Computes softmax(q k' scale + bias) v per head, with options where architectures differ.

    Inputs and outputs are projections with the heads joined. q alone holds queries, keys and values, concatenated. With
    `values`, the width of v in one head, they are concatenated within each head, as are keys and values in k alone.

    `bias` makes a module that returns (h, n, m), which is added to the logits. `pre` and `post` make modules that mix
    the heads before and after the softmax.

    With LSA the scale is learned, one per head. If queries and keys are the same tokens (`same_tokens`; the queries may
    be the first few of the keys), the diagonal is also set to -inf, after bias and mix: no token attends to itself.
    Attention to other tokens, such as that of class tokens or to reduced keys, only gets the learned scale.

    The map is the output of the softmax; get it with `mutable="intermediates"`.
    """

    dropout: float = 0.0
    lsa: LSAOption = False
    shared_temperature: bool = False  # one for all heads, as in the Keras example
    scale: float | None = None  # None is d ** -0.5
    bias: Factory | None = None
    pre: Factory | None = None
    post: Factory | None = None

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "*lead n a"],
        k: Float[Array, "*lead m b"] | None = None,
        v: Float[Array, "*lead m c"] | None = None,
        *,
        heads: int,
        same_tokens: bool,
        values: int | None = None,
        allowed: Bool[np.ndarray, "*some n m"] | None = None,
        train: bool = False,
    ) -> Float[Array, "*lead n e"]:
        learned, masked = lsa_parts(self.lsa)
        scale = self.first_scale(heads, q, k, values=values)
        if learned:
            shape = (1,) if self.shared_temperature else (heads,)
            temperature = self.param("temperature", nn.initializers.constant(scale), shape)
        else:
            temperature = jnp.full((1,), scale, jnp.float32)
        bias = None if self.bias is None else self.bias(name="bias")()
        pre = None if self.pre is None else self.pre(name="pre")
        post = None if self.post is None else self.post(name="post")
        hidden = masked and same_tokens
        if not (train and self.dropout) and not self.is_mutable_collection("intermediates"):  # the map is not needed
            if pre is None and post is None:
                return attend(q, k, v, temperature, bias, allowed, heads=heads, values=values, mask_diagonal=hidden)
            if bias is None and values is None and isinstance(pre, HeadMix | None) and isinstance(post, HeadMix | None):
                before = None if pre is None else pre.weights(heads)
                after = None if post is None else post.weights(heads)
                return attend_mixed(q, k, v, temperature, before, after, allowed, heads=heads, mask_diagonal=hidden)

        q, k, v = (q, k, v) if values is None else split_joined(q, k, heads, values)
        q, k, v = split_heads(q, k, v, heads)
        keep = keep_mask(q, k, allowed, mask_diagonal=hidden)
        bias = None if bias is None else align(bias, q)
        logits = attention_logits(scale_queries(q, temperature), k, bias, keep if pre is None else None)
        if pre is not None:
            logits = pre(logits)
            logits = logits if keep is None else jnp.where(keep, logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        self.sow("intermediates", "attention", weights)
        if post is not None:
            weights = post(weights)
        weights = nn.Dropout(self.dropout, deterministic=not train, name="dropout")(weights)
        return merge_heads(jnp.einsum("...nm,...me->...ne", weights.astype(v.dtype), v))

    def first_scale(self, heads: int, q: Array, k: Array | None = None, *_: Array, values: int | None = None) -> float:
        """The initial factor of the logits."""
        dim = q.shape[-1] // heads
        if k is None:
            dim = dim // 3 if values is None else (dim - values) // 2
        return dim**-0.5 if self.scale is None else self.scale


class Attention(nn.Module):
    """Multi-head self-attention, or attention to the tokens of `context`; with `first`, only of the first tokens."""

    heads: int
    dim_head: int | None = None  # None is dim / heads
    qkv_bias: bool = False
    dropout: float = 0.0  # on the map
    out_dropout: float | None = None  # on the output; None is the same as on the map
    dense: Factory = Dense
    attend: Factory = Attend

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*lead n d"],
        context: Float[Array, "*lead m c"] | None = None,
        *,
        first: int | None = None,
        allowed: Bool[np.ndarray, "*some n m"] | None = None,
        train: bool = False,
    ) -> Float[Array, "*lead q d"]:
        dim = x.shape[-1]
        inner = self.heads * head_dim(dim, self.heads, self.dim_head)
        if context is None:
            parts = [self.dense(3 * inner, use_bias=self.qkv_bias, name="qkv")(x)]
            if first is not None:
                q, k, v = jnp.split(parts[0], 3, axis=-1)
                parts = [q[..., :first, :], k, v]
        else:
            q = self.dense(inner, use_bias=self.qkv_bias, name="q")(x)
            kv = self.dense(2 * inner, use_bias=self.qkv_bias, name="kv")(context)
            parts = [q, *jnp.split(kv, 2, axis=-1)]
        attend = self.attend(dropout=self.dropout, name="attend")
        x = attend(*parts, heads=self.heads, same_tokens=context is None, allowed=allowed, train=train)
        x = self.dense(dim, name="out")(x)
        rate = self.dropout if self.out_dropout is None else self.out_dropout
        return nn.Dropout(rate, deterministic=not train, name="dropout")(x)


class HeadMix(nn.Module):
    """Replaces each head's map by a learned mix of all heads ("talking heads", https://arxiv.org/abs/2003.02436)."""

    use_bias: bool = True
    std: float | None = None  # initial standard deviation of the mix; None is Xavier

    def __call__(self, maps: Float[Array, "*lead h n m"]) -> Float[Array, "*lead h n m"]:
        return mix_heads(maps, self.weights(maps.shape[-3]))

    @nn.compact
    def weights(self, heads: int) -> Mix:
        kernel = self.param("kernel", normal_or_xavier(self.std), (heads, heads))
        return Mix(kernel, self.param("bias", nn.initializers.zeros, (heads,)) if self.use_bias else None)


def head_dim(dim: int, heads: int, dim_head: int | None) -> int:
    """The dimension of one head, by default dim / heads; a ValueError if the heads do not fit."""
    if heads < 1 or (dim_head is not None and dim_head < 1):
        raise ValueError(f"heads={heads} of dim_head={dim_head}: both must be at least 1")
    if dim_head is None and dim % heads:
        raise ValueError(f"dim={dim} is not divisible by heads={heads}: choose heads that divide it, or give dim_head")
    return dim // heads if dim_head is None else dim_head
