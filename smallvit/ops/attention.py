"""Attention on arrays: by a native kernel where available, else in JAX with a custom derivative."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float

from smallvit import kernels
from smallvit.ops.dense import align, at_least_float32


def readable(
    n: int, m: int, allowed: Bool[np.ndarray, "*lead n m"] | None, *, mask_diagonal: bool
) -> Bool[np.ndarray, "*lead n m"] | None:
    """Returns which query may attend to which key, None for all; in numpy, since ONNX has no runnable `eye`."""
    if allowed is None and not mask_diagonal:
        return None
    itself = np.eye(n, m, dtype=bool)
    allowed = np.ones((n, m), bool) if allowed is None else allowed
    if mask_diagonal:
        allowed = allowed & ~itself
    # A query without any allowed key, such as a single token, attends to itself: a softmax of only -inf is NaN.
    return allowed | (itself & ~allowed.any(-1, keepdims=True))


def attend(
    q: Float[Array, "*lead n a"],
    k: Float[Array, "*lead m b"] | None,
    v: Float[Array, "*lead m c"] | None,
    scale: Float[Array, " #h"],
    bias: Float[Array, "#h n m"] | None = None,
    allowed: Bool[np.ndarray, "*some n m"] | None = None,
    *,
    heads: int,
    values: int | None = None,
    mask_diagonal: bool = False,
) -> Float[Array, "*lead n e"]:
    """Computes attention without returning the map; the arguments are those of `Attend`."""
    scales = jnp.broadcast_to(scale, (heads,))
    if values is not None:
        if kernels.attends_joined(q, k, heads, values, bias, allowed):
            return kernels.attend(q, k, None, scales, bias, allowed, values=values, mask_diagonal=mask_diagonal)
        q, k, v = split_joined(q, k, heads, values)
    if k is None or v is None:
        if kernels.attends_packed(q, heads, bias, allowed):
            return kernels.attend_packed(q, scales, bias, allowed, mask_diagonal=mask_diagonal)
    elif kernels.attends(q, k, v, heads, bias, allowed):
        return kernels.attend(q, k, v, scales, bias, allowed, mask_diagonal=mask_diagonal)
    q, k, v = split_heads(q, k, v, heads)
    bias = None if bias is None else align(bias, q)
    return merge_heads(
        attend_pure(scale_queries(q, scale), k, v, bias, keep_mask(q, k, allowed, mask_diagonal=mask_diagonal))
    )


class HeadNorm(NamedTuple):
    """Parameters of a LayerNorm over the heads, at each position of their maps."""

    scale: Float[Array, " h"]
    bias: Float[Array, " h"]
    epsilon: float


class Mix(NamedTuple):
    """Parameters that mix the maps of all heads: weights from head to head, a bias, and a norm after them."""

    kernel: Float[Array, "h h"]
    bias: Float[Array, " h"] | None = None
    norm: HeadNorm | None = None


def mix_heads(maps: Float[Array, "*lead h n m"], mix: Mix) -> Float[Array, "*lead h n m"]:
    heads, kernel = maps.shape[-3], mix.kernel.astype(maps.dtype)
    # One product per image: a single product, whose gradient also sums over images, would transpose the maps.
    flat = maps.reshape(-1, heads, maps.shape[-2] * maps.shape[-1])
    each = jnp.broadcast_to(kernel[None], (flat.shape[0], heads, heads))
    maps = jnp.einsum("bhg,bhx->bgx", each, flat).reshape(maps.shape)
    maps = maps if mix.bias is None else maps + align(mix.bias[:, None, None], maps).astype(maps.dtype)
    return maps if mix.norm is None else norm_heads(maps, mix.norm)


def norm_heads(maps: Float[Array, "*lead h n m"], norm: HeadNorm) -> Float[Array, "*lead h n m"]:
    x = maps.astype(at_least_float32(maps.dtype))
    scale, bias = (align(each[:, None, None], x).astype(x.dtype) for each in norm[:2])
    centred = x - x.mean(-3, keepdims=True)
    deviation = jnp.sqrt(jnp.square(centred).mean(-3, keepdims=True) + norm.epsilon)
    return (centred / deviation * scale + bias).astype(maps.dtype)


def attend_mixed(
    q: Float[Array, "*lead n a"],
    k: Float[Array, "*lead m a"] | None,
    v: Float[Array, "*lead m c"] | None,
    scale: Float[Array, " #h"],
    pre: Mix | None,
    post: Mix | None,
    allowed: Bool[np.ndarray, "*some n m"] | None = None,
    *,
    heads: int,
    mask_diagonal: bool = False,
) -> Float[Array, "*lead n e"]:
    """`attend` with the heads' logits mixed by `pre` and their softmax by `post`; masks apply to the mixed logits."""
    if kernels.mixes(q, k, v, heads, allowed) and (pre is None or pre.norm is None):
        # A constant does not change a softmax: the bias of `pre` has no effect, and only rounding errors as gradient.
        mixes = (None if pre is None else pre.kernel, *_whole(post, heads))
        scales, norm = jnp.broadcast_to(scale, (heads,)), None if post is None else post.norm
        return kernels.attend_mixed(q, k, v, scales, *mixes, allowed, norm, mask_diagonal=mask_diagonal)
    q, k, v = split_heads(q, k, v, heads)
    keep = keep_mask(q, k, allowed, mask_diagonal=mask_diagonal)
    logits = attention_logits(scale_queries(q, scale), k, None, None)
    logits = logits if pre is None else mix_heads(logits, pre)
    weights = jax.nn.softmax(logits if keep is None else jnp.where(keep, logits, -jnp.inf), axis=-1)
    weights = weights if post is None else mix_heads(weights, post)
    return merge_heads(jnp.einsum("...nm,...me->...ne", weights.astype(v.dtype), v))


def _whole(mix: Mix | None, heads: int) -> tuple[Array, Array]:
    """Returns weights and bias, with defaults for missing ones."""
    kernel = jnp.eye(heads) if mix is None else mix.kernel
    return kernel, jnp.zeros(heads) if mix is None or mix.bias is None else mix.bias


def split_joined(q: Array, k: Array | None, heads: int, values: int) -> tuple[Array, Array, Array]:
    """Splits q, or k, in which queries, keys and values are concatenated within each head, into (q, k, v)."""
    read = rearrange(q if k is None else k, "... m (h e) -> ... m h e", h=heads)
    keys, v = jnp.split(read, [read.shape[-1] - values], axis=-1)
    parts = [*(jnp.split(keys, 2, axis=-1) if k is None else (keys,)), v]
    parts = [rearrange(part, "... m h e -> ... m (h e)") for part in parts]
    return (parts[0], parts[1], parts[2]) if k is None else (q, parts[0], parts[1])


def split_heads(q: Array, k: Array | None, v: Array | None, heads: int) -> tuple[Array, Array, Array]:
    """Returns each as (..., h, n, d): head-major products are three times as fast on a CPU."""
    if k is None or v is None:
        q, k, v = jnp.split(q, 3, axis=-1)
    q, k, v = (rearrange(x, "... n (h d) -> ... h n d", h=heads) for x in (q, k, v))
    return q, k, v


def merge_heads(x: Array) -> Array:
    return rearrange(x, "... h n d -> ... n (h d)")


def scale_queries(q: Array, scale: Array) -> Array:
    return q * align(scale[:, None, None], q).astype(q.dtype)


def keep_mask(q: Array, k: Array, allowed: np.ndarray | None, *, mask_diagonal: bool) -> np.ndarray | None:
    keep = readable(q.shape[-2], k.shape[-2], allowed, mask_diagonal=mask_diagonal)
    return None if keep is None else keep.reshape((1,) * (q.ndim - keep.ndim) + keep.shape)


def attention_logits(q: Array, k: Array, bias: Array | None, keep: Array | np.ndarray | None) -> Array:
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
    """softmax(q k' + bias, where keep) v, without returning the map.

    The custom derivative recomputes the map instead of storing it, and divides the small product by the sums instead of
    the large map. A training step on a CPU takes a fifth less time than with autodiff.
    """
    return _attend_forward(q, k, v, bias, keep)[0]


def _attend_forward(
    q: Array, k: Array, v: Array, bias: Array | None, keep: Array | np.ndarray | None
) -> tuple[Array, tuple]:
    logits = attention_logits(q, k, bias, keep)
    top = logits.max(-1, keepdims=True)
    e = jnp.exp(logits - top)
    total = e.sum(-1, keepdims=True)
    out = jnp.einsum("...nm,...me->...ne", e.astype(v.dtype), v, preferred_element_type=total.dtype) / total
    return out.astype(v.dtype), (q, k, v, bias, keep, top + jnp.log(total), out)


def _attend_backward(saved: tuple, dout: Array) -> tuple[Array, Array, Array, Array | None, None]:
    # dv = p' dout, dlogits = p * (dout v' - sum(dout * out)), dq = dlogits k, dk = dlogits' q.
    q, k, v, bias, keep, log_total, out = saved
    product = partial(jnp.einsum, preferred_element_type=log_total.dtype)
    p = jnp.exp(attention_logits(q, k, bias, keep) - log_total)
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
