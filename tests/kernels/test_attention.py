"""Attention by the kernels against plain jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallvit import kernels
from smallvit.kernels import library
from smallvit.ops.attention import HeadNorm, Mix, attend_mixed, attend_pure, split_joined
from tests.kernels.checks import SETS, TOLERANCE, draw, equals, few, matches, needs_library, with_gradients

pytestmark = needs_library


def tokens(x: jax.Array) -> jax.Array:
    """Head after head in each token."""
    return jnp.moveaxis(x, -3, -2).reshape(*x.shape[:-3], x.shape[-2], -1)


def plain(q, k, v, scale, bias, allowed, mask_diagonal: bool) -> jax.Array:
    """Attention as one would first write it, (images, windows, heads, tokens, width)."""
    n, m = q.shape[-2], k.shape[-2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    logits = jnp.einsum("bwhnd,bwhmd->bwhnm", q, k) * scale[None, None, :, None, None]
    logits = logits if bias is None else logits + bias[None, None]
    keep = np.ones((1, 1, n, m), bool) if allowed is None else allowed
    keep = keep & ~np.eye(n, m, dtype=bool) if mask_diagonal else keep
    keep = keep | (np.eye(n, m, dtype=bool) & ~keep.any(-1, keepdims=True))
    logits = jnp.where(keep[None], logits, -jnp.inf)
    return jnp.einsum("bwhnm,bwhme->bwhne", jax.nn.softmax(logits, -1), v)


@few
@given(
    images=st.integers(1, 3),
    windows=st.integers(1, 3),
    heads=st.integers(1, 4),
    n=st.one_of(st.integers(1, 20), st.sampled_from([49, 65, 97])),
    m=st.one_of(st.integers(1, 40), st.sampled_from([65, 130])),
    d=st.one_of(st.integers(1, 40), st.sampled_from([64, 128])),
    e=st.one_of(st.integers(1, 40), st.sampled_from([64, 127])),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    bias=st.sampled_from([None, "shared", "heads"]),
    masked=st.booleans(),
    mask_diagonal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention(images, windows, heads, n, m, d, e, dtype, bias, masked, mask_diagonal, seed):
    m = max(n, m) if mask_diagonal else m
    lead = (images, windows, heads)
    q, k, v = draw(seed, (*lead, n, d), (*lead, m, d), (*lead, m, e), dtype=dtype)
    scale, table = draw(seed + 1, (heads,), (1 if bias == "shared" else heads, n, m))
    scale = jnp.asarray(np.asarray(scale) / d**0.5)
    allowed = np.random.default_rng(seed).random((windows, 1, n, m)) < 0.6 if masked else None
    if allowed is not None:
        allowed[..., 0] |= ~allowed.any(-1)
    floats = (q, k, v, scale) if bias is None else (q, k, v, scale, table)
    assert kernels.attends(*map(tokens, (q, k, v)), heads, None if bias is None else table, allowed)

    def ours(q, k, v, scale, table=None):
        return kernels.attend(*map(tokens, (q, k, v)), scale, table, allowed, mask_diagonal=mask_diagonal)

    def theirs(q, k, v, scale, table=None):
        return tokens(plain(q, k, v, scale, table, allowed, mask_diagonal).astype(dtype))

    matches(ours, theirs, floats, TOLERANCE[dtype])


@few
@given(
    batch=st.integers(1, 9),
    heads=st.integers(1, 5),
    n=st.integers(1, 70),
    d=st.integers(1, 33),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    biased=st.booleans(),
    mask_diagonal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packed_is_the_same_attention(batch, heads, n, d, dtype, biased, mask_diagonal, seed):
    (qkv,) = draw(seed, (batch, n, 3 * heads * d), dtype=dtype)
    scale, bias = draw(seed + 1, (heads,), (heads, n, n))
    floats = (qkv, scale, bias) if biased else (qkv, scale)
    assert kernels.attends_packed(qkv, heads, bias if biased else None, None)

    def packed(qkv, scale, bias=None):
        return kernels.attend_packed(qkv, scale, bias, mask_diagonal=mask_diagonal)

    def separate(qkv, scale, bias=None):
        return kernels.attend(*jnp.split(qkv, 3, axis=-1), scale, bias, mask_diagonal=mask_diagonal)

    equals(packed, separate, floats)


@few
@given(
    batch=st.integers(1, 9),
    heads=st.integers(1, 5),
    n=st.integers(1, 40),
    m=st.one_of(st.none(), st.integers(1, 70)),
    d=st.integers(1, 33),
    e=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_heads_side_by_side_are_the_same_attention(batch, heads, n, m, d, e, dtype, biased, seed):
    if m is None:
        given = draw(seed, (batch, n, heads * (2 * d + e)), dtype=dtype)
    else:
        given = draw(seed, (batch, n, heads * d), (batch, m, heads * (d + e)), dtype=dtype)
    scale, bias = draw(seed + 1, (heads,), (heads, n, m or n))
    rest = (scale, bias) if biased else (scale,)
    assert kernels.attends_joined(*given, *[None] * (m is None), heads, e, bias if biased else None, None)

    def joined(*args):
        q, k = args[0], None if m is None else args[1]
        return kernels.attend(q, k, None, *args[len(given) :], values=e)

    def separate(*args):
        q, k = args[0], None if m is None else args[1]
        return kernels.attend(*split_joined(q, k, heads, e), *args[len(given) :])

    equals(joined, separate, (*given, *rest))


@few
@given(
    images=st.integers(1, 3),
    windows=st.integers(1, 2),
    heads=st.one_of(st.integers(1, 6), st.just(12)),
    n=st.one_of(st.integers(1, 20), st.sampled_from([49, 97, 196])),
    m=st.one_of(st.integers(1, 40), st.sampled_from([65, 130])),
    d=st.one_of(st.integers(1, 40), st.sampled_from([64, 128])),
    e=st.one_of(st.integers(1, 40), st.sampled_from([64, 127])),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    masked=st.booleans(),
    mask_diagonal=st.booleans(),
    before=st.booleans(),
    normed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_mixed_attention(images, windows, heads, n, m, d, e, dtype, masked, mask_diagonal, before, normed, seed):
    m = max(n, m) if mask_diagonal else m
    lead = (images, windows, heads)
    q, k, v = draw(seed, (*lead, n, d), (*lead, m, d), (*lead, m, e), dtype=dtype)
    scale, *mixes = draw(seed + 1, *[(heads,)] * 4, *[(heads, heads)] * 2)
    scale, mixes = scale / d**0.5, [x / heads**0.5 for x in mixes]
    epsilon = 0.01  # with a small one, rounding errors count where heads are nearly alike
    allowed = np.random.default_rng(seed).random((windows, 1, n, m)) < 0.6 if masked else None
    if allowed is not None:
        allowed[..., 0] |= ~allowed.any(-1)
    assert kernels.mixes(*map(tokens, (q, k, v)), heads, allowed)

    def ours(q, k, v, scale, bias, norm_scale, norm_bias, pre, post):
        norm = (norm_scale, norm_bias, epsilon) if normed else None
        mixes = (pre if before else None, post, bias)
        qkv = map(tokens, (q, k, v))
        return kernels.attend_mixed(*qkv, scale, *mixes, allowed, norm, mask_diagonal=mask_diagonal)

    def theirs(q, k, v, scale, bias, norm_scale, norm_bias, pre, post):
        with kernels.disabled():
            norm = HeadNorm(norm_scale, norm_bias, epsilon) if normed else None
            first = Mix(pre, jnp.arange(heads)) if before else None  # its bias changes nothing
            mixes = first, Mix(post, bias, norm)
            q, k, v = (tokens(x).astype(jnp.float32) for x in (q, k, v))
            out = attend_mixed(q, k, v, scale, *mixes, allowed, heads=heads, mask_diagonal=mask_diagonal)
            return out.astype(dtype)

    floats = (q, k, v, scale, *mixes)
    matches(ours, theirs, floats, TOLERANCE[dtype])


@few
@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 5),
    n=st.integers(1, 70),
    d=st.integers(1, 33),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    mask_diagonal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packed_is_the_same_mixed_attention(batch, heads, n, d, dtype, mask_diagonal, seed):
    (qkv,) = draw(seed, (batch, n, 3 * heads * d), dtype=dtype)
    scale, *mixes = draw(seed + 1, (heads,), (heads, heads), (heads, heads), (heads,))
    assert kernels.mixes(qkv, None, None, heads, None)

    def mixed(q, k, v, scale, *mixes):
        return kernels.attend_mixed(q, k, v, scale, *mixes, mask_diagonal=mask_diagonal)

    equals(
        lambda qkv, *rest: mixed(qkv, None, None, *rest),
        lambda qkv, *rest: mixed(*jnp.split(qkv, 3, axis=-1), *rest),
        (qkv, scale, *mixes),
    )


@pytest.mark.parametrize("name", SETS)
def test_heads_that_mix_with_themselves_alone_do_not_talk(name):
    library.choose(name)
    (qkv,), (scale,) = draw(0, (2, 19, 3 * 3 * 8)), draw(1, (3,))
    alone = (jnp.eye(3), jnp.eye(3), jnp.zeros(3))
    mixed = kernels.attend_mixed(qkv, None, None, scale, *alone, mask_diagonal=True)
    np.testing.assert_allclose(mixed, kernels.attend_packed(qkv, scale, mask_diagonal=True), atol=1e-6)


@pytest.mark.parametrize("name", SETS)
def test_a_lone_token_reads_itself(name):
    library.choose(name)
    q, k, v = draw(0, (2, 1, 15), (2, 1, 15), (2, 1, 12))
    out = kernels.attend(q, k, v, jnp.ones(3), mask_diagonal=True)
    np.testing.assert_allclose(out, v, rtol=1e-6)
    unreadable = kernels.attend(q, k, v, jnp.ones(3), allowed=np.zeros((1, 1), bool))
    np.testing.assert_allclose(unreadable, v, rtol=1e-6)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_go_where_they_go_without_us(name, where, value):
    library.choose(name)
    args = draw(0, (1, 2, 2, 9, 5), (1, 2, 2, 9, 5), (1, 2, 2, 9, 5))
    args[where] = args[where].at[0, 1, 1, 3, 2].set(value)
    args += [jnp.full(2, 0.4)]
    allowed = np.ones((2, 1, 9, 9), bool)
    allowed[..., 5] = False

    def ours(*args):
        return kernels.attend(*map(tokens, args[:3]), args[3], allowed=allowed)

    def theirs(q, k, v, scale):
        return tokens(attend_pure(q * scale[None, None, :, None, None], k, v, None, allowed[None]))

    for mine, their in zip(with_gradients(ours)(*args), with_gradients(theirs)(*args), strict=True):
        np.testing.assert_allclose(mine, their, rtol=1e-4, atol=1e-5)
