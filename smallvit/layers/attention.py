"""One attention for all architectures; Locality Self-Attention (https://arxiv.org/abs/2112.13492) is a seam of it."""

from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float

from smallvit import kernels
from smallvit.layers.dense import Dense, Factory, align, at_least_float32

LSAOption = bool | Literal["mask", "temperature"]  # True is both halves


def lsa_parts(lsa: LSAOption) -> tuple[bool, bool]:
    """(learned temperature, diagonal mask) of an `lsa` option."""
    if lsa not in (True, False, "mask", "temperature"):
        raise ValueError(f"unknown lsa {lsa!r}: choose True (both halves), 'mask', 'temperature' or False")
    return lsa in (True, "temperature"), lsa in (True, "mask")


def readable(
    n: int, m: int, allowed: Bool[np.ndarray, "*lead n m"] | None, *, mask_diagonal: bool
) -> Bool[np.ndarray, "*lead n m"] | None:
    """Which query reads which key; a numpy constant, since ONNX has no runnable `eye`. None: all read all."""
    if allowed is None and not mask_diagonal:
        return None
    itself = np.eye(n, m, dtype=bool)
    allowed = np.ones((n, m), bool) if allowed is None else allowed
    if mask_diagonal:
        allowed = allowed & ~itself
    # A query with nothing left to read, such as one lone token, reads itself: a softmax of only -inf is NaN.
    return allowed | (itself & ~allowed.any(-1, keepdims=True))


class Attend(nn.Module):
    """softmax(q k' scale + bias) v, per head, and the seams where architectures differ.

    Tokens come and go as projections make and read them, head after head; q alone is all three, side by side.
    `bias` makes a module that returns (h, n, m), added to the logits; `pre` and `post` make modules that mix the
    heads before and after the softmax. With LSA the scale is learned, one a head, and where queries and keys are
    the same tokens (`same_tokens`; the queries may be the first few of the keys) no token reads itself: the
    diagonal is -inf after bias and mix. Attention to other tokens, class tokens' and reduced keys get the scale only.

    Ask for the map with `mutable="intermediates"`; it is sown as it leaves the softmax.
    """

    dropout: float = 0.0
    lsa: LSAOption = False
    shared_temperature: bool = False  # one for all heads, as Keras' example has it
    scale: float | None = None  # None is d ** -0.5
    bias: Factory | None = None
    pre: Factory | None = None
    post: Factory | None = None

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "*lead n a"],
        k: Float[Array, "*lead m a"] | None = None,
        v: Float[Array, "*lead m c"] | None = None,
        *,
        heads: int,
        same_tokens: bool,
        allowed: Bool[np.ndarray, "*some n m"] | None = None,
        train: bool = False,
    ) -> Float[Array, "*lead n e"]:
        learned, masked = lsa_parts(self.lsa)
        scale = self.first_scale(heads, q, k)
        if learned:
            shape = (1,) if self.shared_temperature else (heads,)
            temperature = self.param("temperature", nn.initializers.constant(scale), shape)
        else:
            temperature = jnp.full((1,), scale, jnp.float32)
        bias = None if self.bias is None else self.bias(name="bias")()
        plain = self.pre is None and self.post is None and not (train and self.dropout)
        if plain and not self.is_mutable_collection("intermediates"):
            return attend(q, k, v, temperature, bias, allowed, heads=heads, mask_diagonal=masked and same_tokens)

        q, k, v = _head_major(q, k, v, heads)
        keep = _keep(q, k, allowed, mask_diagonal=masked and same_tokens)
        bias = None if bias is None else align(bias, q)
        logits = _logits(_scaled(q, temperature), k, bias, None if self.pre else keep)
        if self.pre is not None:
            logits = self.pre(name="pre")(logits)
            logits = logits if keep is None else jnp.where(keep, logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        self.sow("intermediates", "attention", weights)
        if self.post is not None:
            weights = self.post(name="post")(weights)
        weights = nn.Dropout(self.dropout, deterministic=not train, name="dropout")(weights)
        return _token_major(jnp.einsum("...nm,...me->...ne", weights.astype(v.dtype), v))

    def first_scale(self, heads: int, q: Array, k: Array | None = None, *_: Array) -> float:
        """What the logits are multiplied by, before any learning."""
        dims = q.shape[-1] // (3 if k is None else 1)
        return (dims // heads) ** -0.5 if self.scale is None else self.scale


def attend(
    q: Float[Array, "*lead n a"],
    k: Float[Array, "*lead m a"] | None,
    v: Float[Array, "*lead m c"] | None,
    scale: Float[Array, " #h"],
    bias: Float[Array, "#h n m"] | None = None,
    allowed: Bool[np.ndarray, "*some n m"] | None = None,
    *,
    heads: int,
    mask_diagonal: bool = False,
) -> Float[Array, "*lead n e"]:
    """Attention without a map to look at; its arguments are those of `Attend`."""
    scales = jnp.broadcast_to(scale, (heads,))
    if k is None or v is None:
        if kernels.attends_packed(q, heads, bias, allowed):
            return kernels.attend_packed(q, scales, bias, allowed, mask_diagonal=mask_diagonal)
    elif kernels.attends(q, k, v, heads, bias, allowed):
        return kernels.attend(q, k, v, scales, bias, allowed, mask_diagonal=mask_diagonal)
    q, k, v = _head_major(q, k, v, heads)
    bias = None if bias is None else align(bias, q)
    return _token_major(attend_pure(_scaled(q, scale), k, v, bias, _keep(q, k, allowed, mask_diagonal=mask_diagonal)))


def _head_major(q: Array, k: Array | None, v: Array | None, heads: int) -> tuple[Array, Array, Array]:
    """(..., h, n, d) of each: head-major products are three times as fast on a CPU."""
    if k is None or v is None:
        q, k, v = jnp.split(q, 3, axis=-1)
    q, k, v = (rearrange(x, "... n (h d) -> ... h n d", h=heads) for x in (q, k, v))
    return q, k, v


def _token_major(x: Array) -> Array:
    return rearrange(x, "... h n d -> ... n (h d)")


def _scaled(q: Array, scale: Array) -> Array:
    return q * align(scale[:, None, None], q).astype(q.dtype)


def _keep(q: Array, k: Array, allowed: np.ndarray | None, *, mask_diagonal: bool) -> np.ndarray | None:
    keep = readable(q.shape[-2], k.shape[-2], allowed, mask_diagonal=mask_diagonal)
    return None if keep is None else keep.reshape((1,) * (q.ndim - keep.ndim) + keep.shape)


def _logits(q: Array, k: Array, bias: Array | None, keep: Array | np.ndarray | None) -> Array:
    logits = jnp.einsum("...nd,...md->...nm", q, k, preferred_element_type=at_least_float32(q.dtype))
    logits = logits if bias is None else logits + bias.astype(logits.dtype)
    return logits if keep is None else jnp.where(keep, logits, -jnp.inf)


@jax.custom_vjp
def attend_pure(
    q: Float[Array, "*lead n d"],
    k: Float[Array, "*lead m d"],
    v: Float[Array, "*lead m e"],
    bias: Float[Array, "*some n m"] | None,
    keep: Bool[Array, "*other n m"] | Bool[np.ndarray, "*other n m"] | None,
) -> Float[Array, "*lead n e"]:
    """softmax(q k' + bias, where keep) v, for when nobody looks at the map.

    Its derivative is written out: the map is computed again rather than kept, and the sums are divided out of the
    small product instead of the large map. That is a fifth less time for a training step on a CPU than autodiff's.
    """
    return _attend_forward(q, k, v, bias, keep)[0]


def _attend_forward(
    q: Array, k: Array, v: Array, bias: Array | None, keep: Array | np.ndarray | None
) -> tuple[Array, tuple]:
    logits = _logits(q, k, bias, keep)
    top = logits.max(-1, keepdims=True)
    e = jnp.exp(logits - top)
    total = e.sum(-1, keepdims=True)
    out = jnp.einsum("...nm,...me->...ne", e.astype(v.dtype), v, preferred_element_type=total.dtype) / total
    return out.astype(v.dtype), (q, k, v, bias, keep, top + jnp.log(total), out)


def _attend_backward(saved: tuple, dout: Array) -> tuple[Array, Array, Array, Array | None, None]:
    # dv = p' dout, dlogits = p * (dout v' - sum(dout * out)), dq = dlogits k, dk = dlogits' q.
    q, k, v, bias, keep, log_total, out = saved
    product = partial(jnp.einsum, preferred_element_type=log_total.dtype)
    p = jnp.exp(_logits(q, k, bias, keep) - log_total)
    dlogits = p * (product("...ne,...me->...nm", dout, v) - (dout.astype(out.dtype) * out).sum(-1, keepdims=True))
    dbias = None
    if bias is not None:
        shared = tuple(axis for axis, length in enumerate(bias.shape) if length != dlogits.shape[axis])
        dbias = dlogits.sum(shared, keepdims=True).astype(bias.dtype)
    ds, p = dlogits.astype(q.dtype), p.astype(v.dtype)
    dq, dk = product("...nm,...md->...nd", ds, k), product("...nm,...nd->...md", ds, q)
    dv = product("...nm,...ne->...me", p, dout)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dbias, None


attend_pure.defvjp(_attend_forward, _attend_backward)


class Attention(nn.Module):
    """Multi-head attention of tokens to themselves, or to the tokens of `context`; `first`: only so many ask."""

    heads: int
    dim_head: int | None = None  # None shares the token's dimension out among the heads
    qkv_bias: bool = False
    dropout: float = 0.0  # on the map
    out_dropout: float | None = None  # on the output; None is as on the map
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
    """Each head's map becomes a learned mix of all heads' ("talking heads", https://arxiv.org/abs/2003.02436)."""

    use_bias: bool = True

    @nn.compact
    def __call__(self, maps: Float[Array, "*lead h n m"]) -> Float[Array, "*lead h n m"]:
        heads = maps.shape[-3]
        kernel = self.param("kernel", nn.initializers.xavier_normal(), (heads, heads)).astype(maps.dtype)
        # A product for each image: in one for all, whose gradient adds up over images too, maps would be transposed.
        flat = maps.reshape(-1, heads, maps.shape[-2] * maps.shape[-1])
        each = jnp.broadcast_to(kernel[None], (flat.shape[0], heads, heads))
        maps = jnp.einsum("bhg,bhx->bgx", each, flat).reshape(maps.shape)
        if not self.use_bias:
            return maps
        bias = self.param("bias", nn.initializers.zeros, (heads,)).astype(maps.dtype)
        return maps + align(bias[:, None, None], maps)


def head_dim(dim: int, heads: int, dim_head: int | None) -> int:
    """The dimension of one head, given or shared out, or a ValueError when the heads do not fit."""
    if heads < 1 or (dim_head is not None and dim_head < 1):
        raise ValueError(f"heads={heads} of dim_head={dim_head}: both must be at least 1")
    if dim_head is None and dim % heads:
        raise ValueError(f"dim={dim} is not divisible by heads={heads}: choose heads that divide it, or give dim_head")
    return dim // heads if dim_head is None else dim_head
