"""Attention with heads mixed before and after the softmax; maps are not stored, the backward pass recomputes them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from smallvit.kernels.attention import attends, attends_packed, broadcast_mask, mask_argument
from smallvit.kernels.library import call, like, optional


def mixes(q: Array, k: Array | None, v: Array | None, heads: int, allowed: np.ndarray | None) -> bool:
    """Whether `attend_mixed` supports these."""
    if k is None or v is None:
        return attends_packed(q, heads, None, allowed)
    return attends(q, k, v, heads, None, allowed)


def attend_mixed(
    q: Float[Array, "*lead n a"],
    k: Float[Array, "*lead m a"] | None,
    v: Float[Array, "*lead m c"] | None,
    scale: Float[Array, " h"],
    pre: Float[Array, "h h"] | None,
    post: Float[Array, "h h"],
    post_bias: Float[Array, " h"],
    allowed: Bool[np.ndarray, "*some n m"] | None = None,
    norm: tuple[Float[Array, " h"], Float[Array, " h"], float] | None = None,
    *,
    mask_diagonal: bool = False,
) -> Float[Array, "*lead n e"]:
    """`attend` with heads mixed by weights from head to head: the logits by `pre`, the softmax by `post`.

    With a `norm` (scale, bias, epsilon), mixed maps are then normalised over the heads. Masks apply to the mixed
    logits. Without k and v, q holds all three, as in `attend_packed`.
    """
    lead, n = q.shape[:-2], q.shape[-2]
    none = jnp.zeros((0, 0, 0), q.dtype)
    flat = (none if x is None else x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    mask, diagonal = broadcast_mask(allowed, lead, n, n if k is None else k.shape[-2], mask_diagonal)
    norm_scale, norm_bias, epsilon = norm or (optional(None, 1), optional(None, 1), 0.0)
    mixing = tuple(x.astype(jnp.float32) for x in (optional(pre, 2), post, post_bias, norm_scale, norm_bias))
    out = _attend((diagonal, epsilon), *flat, scale.astype(jnp.float32), mixing, mask)
    return out.reshape(*lead, *out.shape[1:])


def _forward(
    constants: tuple[bool, float],
    q: Array,
    k: Array,
    v: Array,
    scale: Array,
    mixing: tuple,
    mask: Array | np.ndarray | None,
) -> tuple[Array, tuple]:
    width = v.shape[-1] if v.size else q.shape[-1] // 3
    results = [
        jax.ShapeDtypeStruct((*q.shape[:-1], width), q.dtype),
        jax.ShapeDtypeStruct((q.shape[0], *scale.shape, q.shape[1]), jnp.float32),
    ]
    args = (q, k, v, scale, mask_argument(mask), *mixing)
    out, lse = call("mixed_forward", results, *args, **_named(constants))
    return out, (q, k, v, scale, mixing, mask, lse)


def _backward(constants: tuple[bool, float], saved: tuple, dout: Array) -> tuple:
    q, k, v, scale, mixing, mask, lse = saved
    summed = [jax.ShapeDtypeStruct((q.shape[0], *x.shape), jnp.float32) for x in (scale, *mixing)]
    results = [like(q), like(k), like(v), *summed]
    args = (q, k, v, scale, mask_argument(mask), *mixing, lse, dout)
    dq, dk, dv, *parts = call("mixed_backward", results, *args, **_named(constants))
    dscale, *dmixing = (part.sum(0) for part in parts)
    return dq, dk, dv, dscale, tuple(dmixing), None


def _named(constants: tuple[bool, float]) -> dict[str, bool | np.float32]:
    diagonal, epsilon = constants
    return dict(mask_diagonal=diagonal, epsilon=np.float32(epsilon))


def _out(constants: tuple[bool, float], *args: Any) -> Array:
    return _forward(constants, *args)[0]


_attend = jax.custom_vjp(_out, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)
