"""softmax(scale q k' + bias, where allowed) v, without storing the map: the backward pass recomputes it in tiles."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from smallvit.kernels.library import call, like, optional, some, usable

WIDEST = 128  # dimension of one head


def attends(q: Array, k: Array, v: Array, heads: int, bias: Array | None, allowed: np.ndarray | None) -> bool:
    """Whether `attend` supports these."""
    if not usable() or q.ndim < 2 or q.shape[-1] % heads or v.shape[-1] % heads:
        return False
    n, m = q.shape[-2], k.shape[-2]
    return (
        q.dtype == k.dtype == v.dtype
        and _fits(q.dtype, n, m, q.shape[-1] // heads, v.shape[-1] // heads)
        and some(*q.shape[:-2])
        and _bias_fits(bias, heads, n, m)
        and (allowed is None or _groups(allowed, q.shape[:-2], n, m) is not None)
    )


def attends_packed(qkv: Array, heads: int, bias: Array | None, allowed: np.ndarray | None) -> bool:
    """Whether `attend_packed` supports these."""
    if not usable() or qkv.ndim < 2 or qkv.shape[-1] % (3 * heads):
        return False
    n, d = qkv.shape[-2], qkv.shape[-1] // (3 * heads)
    return (
        _fits(qkv.dtype, n, n, d, d)
        and some(*qkv.shape[:-2])
        and _bias_fits(bias, heads, n, n)
        and (allowed is None or _groups(allowed, qkv.shape[:-2], n, n) is not None)
    )


def attends_joined(
    q: Array, kv: Array | None, heads: int, values: int, bias: Array | None, allowed: np.ndarray | None
) -> bool:
    """Whether `attend` supports these with `values`."""
    read = q if kv is None else kv
    parts, keys = 2 if kv is None else 1, read.shape[-1] // heads - values
    if not usable() or q.ndim < 2 or read.shape[-1] % heads or keys < 1 or keys % parts:
        return False
    n, m, d = q.shape[-2], read.shape[-2], keys // parts
    return (
        q.dtype == read.dtype
        and (kv is None or q.shape[-1] == heads * d)
        and _fits(q.dtype, n, m, d, values)
        and some(*q.shape[:-2])
        and _bias_fits(bias, heads, n, m)
        and (allowed is None or _groups(allowed, q.shape[:-2], n, m) is not None)
    )


def attend(
    q: Float[Array, "*lead n a"],
    k: Float[Array, "*lead m b"] | None,
    v: Float[Array, "*lead m c"] | None,
    scale: Float[Array, " h"],
    bias: Float[Array, "#h n m"] | None = None,
    allowed: Bool[np.ndarray, "*some n m"] | None = None,
    *,
    values: int | None = None,
    mask_diagonal: bool = False,
) -> Float[Array, "*lead n e"]:
    """Multi-head attention, with the heads concatenated in each token; logits and sums are float32.

    With `values`, the width of v in one head, k holds keys and values (v is None), or q holds all three (k and v are
    None), concatenated within each head.

    `allowed` broadcasts against (*lead, h, n, m), and is the same for all heads. With `mask_diagonal`, query i does not
    attend to key i. A query without any allowed key attends to itself.
    """
    lead = q.shape[:-2]
    none = jnp.zeros((0, 0, 0), q.dtype)
    flat = (none if x is None else x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    mask, diagonal = broadcast_mask(allowed, lead, q.shape[-2], (q if k is None else k).shape[-2], mask_diagonal)
    out = _attend((diagonal, values), *flat, scale.astype(jnp.float32), _as_float32(bias), mask)
    return out.reshape(*lead, *out.shape[1:])


def attend_packed(
    qkv: Float[Array, "*lead n k"],
    scale: Float[Array, " h"],
    bias: Float[Array, "#h n n"] | None = None,
    allowed: Bool[np.ndarray, "*some n n"] | None = None,
    *,
    mask_diagonal: bool = False,
) -> Float[Array, "*lead n c"]:
    """`attend` on a joint projection: q, k and v concatenated, each with its heads concatenated."""
    lead = qkv.shape[:-2]
    mask, diagonal = broadcast_mask(allowed, lead, qkv.shape[-2], qkv.shape[-2], mask_diagonal)
    flat = qkv.reshape(-1, *qkv.shape[-2:])
    out = _attend_packed(diagonal, flat, scale.astype(jnp.float32), _as_float32(bias), mask)
    return out.reshape(*lead, *out.shape[1:])


def _fits(dtype: jnp.dtype, n: int, m: int, d: int, e: int) -> bool:
    return dtype in (jnp.float32, jnp.bfloat16) and some(n, m, d, e) and max(d, e) <= WIDEST


def _bias_fits(bias: Array | None, heads: int, n: int, m: int) -> bool:
    return bias is None or (bias.shape in ((1, n, m), (heads, n, m)) and jnp.issubdtype(bias.dtype, jnp.floating))


def _as_float32(bias: Array | None) -> Array | None:
    return None if bias is None else bias.astype(jnp.float32)


def _groups(allowed: np.ndarray, lead: tuple[int, ...], n: int, m: int) -> np.ndarray | None:
    """Returns `allowed` as (g, n, m), where the flat batch index modulo g selects the mask; None if impossible."""
    axes = len(lead) + 3
    if not 2 <= allowed.ndim <= axes or allowed.shape[-2:] != (n, m):
        return None
    allowed = allowed.reshape((1,) * (axes - allowed.ndim) + allowed.shape)
    if allowed.shape[-3] != 1 or any(size not in (1, of) for size, of in zip(allowed.shape, lead, strict=False)):
        return None
    outer = next((i for i, size in enumerate(allowed.shape[:-3]) if size != 1), len(lead))
    allowed = np.broadcast_to(allowed, (*allowed.shape[:outer], *lead[outer:], 1, n, m))
    return allowed.reshape(-1, n, m)


def broadcast_mask(
    allowed: np.ndarray | None, lead: tuple[int, ...], n: int, m: int, mask_diagonal: bool
) -> tuple[np.ndarray | None, bool]:
    """Returns the mask for the kernel, and whether the kernel has to mask the diagonal itself."""
    if allowed is None:
        return None, mask_diagonal
    groups = _groups(allowed, lead, n, m)
    if groups is None:
        raise ValueError(
            f"allowed {allowed.shape} does not fit {(*lead, 1, n, m)}: check attends() or attends_packed() first"
        )
    itself = np.eye(n, m, dtype=bool)
    groups = groups & ~itself if mask_diagonal else groups
    return groups | (itself & ~groups.any(-1, keepdims=True)), False


def mask_argument(mask: Array | np.ndarray | None) -> Array | np.ndarray:
    """Replaces None by an empty array."""
    return np.zeros((0, 0, 0), bool) if mask is None else mask


def _extra(bias: Array | None, mask: Array | np.ndarray | None) -> tuple[Array, Array | np.ndarray]:
    return optional(bias, 3), mask_argument(mask)


def _attend_forward(
    options: tuple[bool, int | None],
    q: Array,
    k: Array,
    v: Array,
    scale: Array,
    bias: Array | None,
    mask: Array | np.ndarray | None,
) -> tuple[Array, tuple]:
    diagonal, values = options
    width = v.shape[-1] if values is None else len(scale) * values
    results = [
        jax.ShapeDtypeStruct((*q.shape[:-1], width), q.dtype),
        jax.ShapeDtypeStruct((q.shape[0], *scale.shape, q.shape[1]), jnp.float32),
    ]
    extra = _extra(bias, mask)
    out, lse = call("attention_forward", results, q, k, v, scale, *extra, mask_diagonal=diagonal)
    return out, (q, k, v, scale, bias, mask, lse)


def _attend_backward(options: tuple[bool, int | None], saved: tuple, dout: Array) -> tuple:
    q, k, v, scale, bias, mask, lse = saved
    extra = _extra(bias, mask)
    results = [like(q), like(k), like(v), jax.ShapeDtypeStruct(lse.shape[:2], jnp.float32), like(extra[0])]
    dq, dk, dv, dscale, dbias = call(
        "attention_backward", results, q, k, v, scale, *extra, lse, dout, mask_diagonal=options[0]
    )
    return dq, dk, dv, dscale.sum(0), None if bias is None else dbias, None


def _attend_out(options: tuple[bool, int | None], *args: Array | np.ndarray | None) -> Array:
    return _attend_forward(options, *args)[0]  # pyright: ignore[reportArgumentType]


_attend = jax.custom_vjp(_attend_out, nondiff_argnums=(0,))
_attend.defvjp(_attend_forward, _attend_backward)


def _packed_forward(
    diagonal: bool, qkv: Array, scale: Array, bias: Array | None, mask: Array | np.ndarray | None
) -> tuple[Array, tuple]:
    b, n, width = qkv.shape
    results = [
        jax.ShapeDtypeStruct((b, n, width // 3), qkv.dtype),
        jax.ShapeDtypeStruct((b, *scale.shape, n), jnp.float32),
    ]
    extra = _extra(bias, mask)
    out, lse = call("packed_forward", results, qkv, scale, *extra, mask_diagonal=diagonal)
    return out, (qkv, scale, bias, mask, lse)


def _packed_backward(diagonal: bool, saved: tuple, dout: Array) -> tuple:
    qkv, scale, bias, mask, lse = saved
    extra = _extra(bias, mask)
    results = [like(qkv), jax.ShapeDtypeStruct(lse.shape[:2], jnp.float32), like(extra[0])]
    dqkv, dscale, dbias = call("packed_backward", results, qkv, scale, *extra, lse, dout, mask_diagonal=diagonal)
    return dqkv, dscale.sum(0), None if bias is None else dbias, None


def _packed_out(diagonal: bool, qkv: Array, scale: Array, bias: Array | None, mask: Array | np.ndarray | None) -> Array:
    return _packed_forward(diagonal, qkv, scale, bias, mask)[0]


_attend_packed = jax.custom_vjp(_packed_out, nondiff_argnums=(0,))
_attend_packed.defvjp(_packed_forward, _packed_backward)
