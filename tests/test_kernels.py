"""The native kernels against plain jnp, with every instruction set of this machine."""

import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smallvit import kernels
from smallvit.kernels import library, linear
from smallvit.ops import multiply
from smallvit.ops.attention import HeadNorm, Mix, attend_mixed, attend_pure, split_joined
from smallvit.training import optimiser

needs_library = pytest.mark.skipif(kernels.status().instruction_set is None, reason=str(kernels.status()))
SETS = [name for name in ("avx512", "avx2", "portable") if library.PATH.exists() and library.choose(name)]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
few = settings(max_examples=14, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def best_set() -> Iterator[None]:
    yield
    if SETS:
        library.choose(SETS[0])


def draw(seed: int, *shapes: tuple[int, ...], dtype: str = "float32") -> list[jax.Array]:
    normal = np.random.default_rng(seed).normal
    return [jnp.asarray(normal(size=shape), dtype) for shape in shapes]


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


def same(ours: tuple, theirs: tuple, tolerance: float) -> None:
    for mine, their in zip(ours, theirs, strict=True):
        assert mine.shape == their.shape
        mine, their = np.asarray(mine, np.float64), np.asarray(their, np.float64)
        np.testing.assert_allclose(mine, their, rtol=0, atol=tolerance * (1 + np.abs(their).max()))


def with_gradients(f: Callable) -> Callable[..., tuple]:
    """f, jitted: its value and, for some cotangent, its gradients."""

    def run(*args):
        out, back = jax.vjp(f, *args)
        (dout,) = draw(9, out.shape, dtype="bfloat16")
        return (out, *back(dout.astype(out.dtype)))

    return jax.jit(run)


def matches(ours: Callable, theirs: Callable, args: Sequence, tolerance: float) -> None:
    """Values and gradients of both, with every instruction set."""
    run, expected = with_gradients(ours), with_gradients(theirs)(*args)
    for name in SETS:
        library.choose(name)
        same(run(*args), expected, tolerance)


def equals(one: Callable, other: Callable, args: Sequence) -> None:
    """The same to the bit, by two kernels."""
    run, again = with_gradients(one), with_gradients(other)
    for name in SETS:
        library.choose(name)
        for mine, their in zip(run(*args), again(*args), strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(their))


@needs_library
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


@needs_library
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


@needs_library
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


@needs_library
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


@needs_library
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


@needs_library
@pytest.mark.parametrize("name", SETS)
def test_heads_that_mix_with_themselves_alone_do_not_talk(name):
    library.choose(name)
    (qkv,), (scale,) = draw(0, (2, 19, 3 * 3 * 8)), draw(1, (3,))
    alone = (jnp.eye(3), jnp.eye(3), jnp.zeros(3))
    mixed = kernels.attend_mixed(qkv, None, None, scale, *alone, mask_diagonal=True)
    np.testing.assert_allclose(mixed, kernels.attend_packed(qkv, scale, mask_diagonal=True), atol=1e-6)


@needs_library
@pytest.mark.parametrize("name", SETS)
def test_a_lone_token_reads_itself(name):
    library.choose(name)
    q, k, v = draw(0, (2, 1, 15), (2, 1, 15), (2, 1, 12))
    out = kernels.attend(q, k, v, jnp.ones(3), mask_diagonal=True)
    np.testing.assert_allclose(out, v, rtol=1e-6)
    unreadable = kernels.attend(q, k, v, jnp.ones(3), allowed=np.zeros((1, 1), bool))
    np.testing.assert_allclose(unreadable, v, rtol=1e-6)


@needs_library
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


@needs_library
@few
@given(
    rows=st.one_of(st.integers(1, 9), st.just(450)),
    d=st.one_of(st.integers(1, 70), st.sampled_from([192, 384])),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    offset=st.sampled_from([0.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_rows(rows, d, dtype, offset, seed):
    (x,), (scale, bias) = draw(seed, (rows, d), dtype=dtype), draw(seed + 1, (d,), (d,))
    shifted = jnp.asarray(np.asarray(x, np.float32) + offset, dtype)

    def norm(x, scale, bias):
        y = x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
        return (y * scale[None] + bias[None]).astype(dtype)

    def gelu(x, bias):
        return jax.nn.gelu(x.astype(jnp.float32) + bias[None], approximate=False).astype(dtype)

    assert kernels.takes_rows(x)
    normed, active = with_gradients(norm)(shifted, scale, bias), with_gradients(gelu)(x, bias)
    our_norm, our_gelu = with_gradients(kernels.layer_norm), with_gradients(kernels.bias_gelu)
    # A row of one or two numbers is nothing but its rounding errors, divided by next to nothing.
    loose = 100 * TOLERANCE[dtype] if offset else TOLERANCE[dtype]
    for name in SETS:
        library.choose(name)
        same(our_norm(shifted, scale, bias), normed, loose)
        same(our_gelu(x, bias), active, TOLERANCE[dtype])
        np.testing.assert_array_equal(np.asarray(kernels.transpose(x)), np.asarray(x).T)


@needs_library
@few
@given(
    rows=st.one_of(st.integers(kernels.FEWEST, 60), st.just(450)),
    d=st.one_of(st.integers(1, 40), st.sampled_from([130, 257, 800, 1024, 1601])),
    width=st.one_of(st.integers(1, 70), st.just(300)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    biased=st.booleans(),
    gelu=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dense(rows, d, width, dtype, biased, gelu, seed):
    (x, weights), (bias,) = draw(seed, (rows, d), (d, width), dtype=dtype), draw(seed + 1, (width,))
    weights = jnp.asarray(np.asarray(weights, np.float32) / d**0.5, dtype)
    floats = (x, weights, bias) if biased else (x, weights)

    def theirs(x, weights, bias=None):
        y = jnp.dot(x, weights, precision="highest", preferred_element_type=jnp.float32)
        y = y if bias is None else y + bias[None]
        return (jax.nn.gelu(y, approximate=False) if gelu else y).astype(dtype)

    def ours(x, weights, bias=None):
        return kernels.dense(x, weights, bias, gelu=gelu)

    run, expected = with_gradients(ours), with_gradients(theirs)(*floats)
    for name in SETS:
        library.choose(name)
        same(run(*floats), expected, TOLERANCE[dtype])
        same((ours(*floats),), expected[:1], TOLERANCE[dtype])  # without gradients it does not keep what they need


@needs_library
@few
@given(
    images=st.integers(1, 3),
    sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    channels=st.integers(1, 12),
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_unfold(images, sides, channels, size, stride, padding, dtype, seed):
    padding = tuple(max(p, -(-(k - n) // 2)) for p, k, n in zip(padding, size, sides, strict=True))  # one window fits
    (x,) = draw(seed, (images, *sides, channels), dtype=dtype)
    assert kernels.unfolds(x, size, stride, padding)

    def theirs(x):
        around = [(side, side) for side in padding]
        y = jax.lax.conv_general_dilated_patches(x, size, stride, around, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = y.reshape(*y.shape[:3], channels, math.prod(size))
        return jnp.moveaxis(y, 3, 4).reshape(*y.shape[:3], -1)

    run = with_gradients(partial(kernels.unfold, size=size, stride=stride, padding=padding))
    value, gradient = with_gradients(theirs)(x)
    for name in SETS:
        library.choose(name)
        ours = run(x)
        np.testing.assert_array_equal(np.asarray(ours[0]), np.asarray(value))
        same(ours[1:], (gradient,), TOLERANCE[dtype])


_sides = st.tuples(st.integers(1, 9), st.integers(1, 9))
_sizes = st.tuples(st.integers(1, 4), st.integers(1, 4))
_paddings = st.tuples(st.integers(0, 2), st.integers(0, 2))


def convolved(x, kernel, stride, padding):
    """In float32, place after place of the kernel."""
    x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    x = jnp.pad(x, [(0, 0), *((side, side) for side in padding), (0, 0)])
    (down, across), (tall, wide) = stride, kernel.shape[:2]
    rows, columns = x.shape[1] - tall + 1, x.shape[2] - wide + 1
    read = {(i, j): x[:, i : i + rows : down, j : j + columns : across] for i in range(tall) for j in range(wide)}
    if kernel.shape[2] == x.shape[3]:
        return sum(jnp.einsum("bhwc,ck->bhwk", read[i, j], kernel[i, j]) for i, j in read)
    return sum(read[i, j] * kernel[i, j][None, None] for i, j in read)


@needs_library
@few
@given(
    st.integers(1, 3),
    _sides,
    st.integers(1, 40),
    st.integers(1, 40),
    _sizes,
    st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 3)]),
    _paddings,
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 99),
)
def test_conv(images, sides, channels, features, size, stride, padding, dtype, seed):
    padding = tuple(max(p, -(-(k - n) // 2)) for p, k, n in zip(padding, size, sides, strict=True))  # one window fits
    x, kernel = draw(seed, (images, *sides, channels), (*size, channels, features), dtype=dtype)
    assert kernels.convolves(x, kernel, stride, padding) == (dtype == "float32" or not library.has_bfloat16())
    ours, theirs = (partial(each, stride=stride, padding=padding) for each in (kernels.conv, convolved))
    matches(ours, theirs, (x, kernel), TOLERANCE[dtype])


@needs_library
@few
@given(
    st.integers(1, 3),
    st.tuples(st.integers(2, 11), st.integers(2, 11)),
    st.sampled_from([16, 32, 48]),
    st.sampled_from([16, 32, 64, 80]),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.integers(0, 99),
)
@example(3, (17, 15), 16, 32, (1, 1), 0)  # more tiles than are worked on at a time
def test_conv_by_tiles(images, sides, channels, features, padding, seed):
    """3 x 3 windows, and channels and features in whole vectors: by Winograd's algorithm."""
    padding = tuple(max(p, n == 2) for p, n in zip(padding, sides, strict=True))  # one window fits
    x, kernel = draw(seed, (images, *sides, channels), (3, 3, channels, features))
    ours, theirs = (partial(each, stride=(1, 1), padding=padding) for each in (kernels.conv, convolved))
    matches(ours, theirs, (x, kernel), TOLERANCE["float32"])


@needs_library
@few
@given(
    st.integers(1, 3), _sides, st.integers(1, 40), _sizes, st.sampled_from(["float32", "bfloat16"]), st.integers(0, 99)
)
def test_depthwise(images, sides, channels, size, dtype, seed):
    padding = tuple((k - 1) - (k - 1) // 2 for k in size)
    (x,), (kernel,) = draw(seed, (images, *sides, channels), dtype=dtype), draw(seed + 1, (*size, 1, channels))
    assert kernels.convolves_depthwise(x, kernel, (1, 1), padding)
    ours, theirs = (partial(each, stride=(1, 1), padding=padding) for each in (kernels.depthwise, convolved))
    matches(ours, theirs, (x, kernel), TOLERANCE[dtype])


def normed(x, scale, bias, more, relu):
    """BatchNorm in float32, the shortcut and the ReLU behind it."""
    y = x.astype(jnp.float32)
    y = (y - y.mean(0)[None]) / jnp.sqrt(y.var(0) + 1e-5)[None] * scale[None] + bias[None]
    y = y if more is None else y + more.astype(jnp.float32)
    return (jnp.maximum(y, 0) if relu else y).astype(x.dtype)


@needs_library
@few
@given(
    st.integers(2, 200),
    st.integers(1, 70),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 99),
)
def test_batch_norm(rows, width, adds, relu, dtype, seed):
    x, more = draw(seed, (rows, width), (rows, width), dtype=dtype)
    scale, bias = draw(seed + 1, (width,), (width,))
    args = (3 * x + 2, scale, bias, *([more] if adds else []))
    matches(
        lambda *args: kernels.batch_norm(*args, *[None] * (not adds), 1e-5, relu)[0],
        lambda *args: normed(*args, *[None] * (not adds), relu),
        args,
        TOLERANCE[dtype],
    )


@needs_library
def test_batch_norm_gives_the_moments_and_nan_goes_through():
    (x,) = draw(0, (50, 3))
    y, mean, var = kernels.batch_norm(x, jnp.ones(3), jnp.zeros(3), None, 1e-5, True)
    np.testing.assert_allclose(mean, x.mean(0), atol=1e-6)
    np.testing.assert_allclose(var, x.var(0), rtol=1e-5)
    assert bool((y >= 0).all())
    y, _, _ = kernels.batch_norm(x.at[4, 1].set(jnp.nan), jnp.ones(3), jnp.zeros(3), None, 1e-5, True)
    assert np.isnan(y).any(axis=0).tolist() == [False, True, False]


@needs_library
def test_which_convolutions_the_kernels_take():
    x, kernel = jnp.zeros((1, 4, 4, 2)), jnp.zeros((3, 3, 2, 5))
    assert kernels.convolves(x, kernel, (1, 1), (0, 0))
    assert not kernels.convolves(x, jnp.zeros((3, 3, 1, 4)), (1, 1), (1, 1))  # two groups
    assert not kernels.convolves(x, jnp.zeros((5, 5, 2, 4)), (1, 1), (0, 0))  # larger than the grid
    assert not kernels.convolves_depthwise(x, jnp.zeros((3, 3, 1, 2)), (2, 2), (1, 1))  # its derivative is no other
    assert not kernels.convolves_depthwise(x, jnp.zeros((3, 3, 1, 4)), (1, 1), (1, 1))  # two kernels a channel
    with kernels.disabled():
        assert not kernels.convolves(x, kernel, (1, 1), (1, 1))


@needs_library
def test_a_cpu_that_multiplies_bfloat16_has_xlas_product(monkeypatch):
    monkeypatch.setattr(linear, "has_bfloat16", lambda: True)
    (x, weights), (bias,) = draw(0, (20, 9), (9, 5), dtype="bfloat16"), draw(1, (5,))
    assert not kernels.multiplies(x, weights)
    assert kernels.multiplies(x.astype(jnp.float32), weights.astype(jnp.float32))

    def plain(x, weights, bias):
        return jax.nn.gelu(jnp.dot(x.astype(jnp.float32), weights.astype(jnp.float32)) + bias[None], approximate=False)

    ours = with_gradients(partial(multiply, gelu=True))(x, weights, bias)
    same(ours, with_gradients(plain)(x, weights, bias), TOLERANCE["bfloat16"])


@needs_library
@pytest.mark.parametrize("name", SETS)
def test_a_row_that_is_not_finite_stays_by_itself(name):
    library.choose(name)
    x, weights = draw(0, (20, 9), (9, 5))
    x = x.at[3, 2].set(np.nan).at[7, 8].set(np.inf)
    clean = np.delete(np.arange(20), [3, 7])
    np.testing.assert_allclose(
        kernels.dense(x, weights)[clean], jnp.dot(x, weights, precision="highest")[clean], rtol=1e-5, atol=1e-5
    )
    assert np.isnan(kernels.dense(x, weights)[3]).all()
    assert np.isinf(kernels.dense(x, weights)[7]).all()


@needs_library
@pytest.mark.parametrize("name", SETS)
def test_gelu_is_exact(name):
    library.choose(name)
    x = jnp.linspace(-12, 12, 20001)
    out = kernels.bias_gelu(x, jnp.zeros(20001))
    exact = np.asarray(x, np.float64) * 0.5 * (1 + np.vectorize(math.erf)(np.asarray(x) / 2**0.5))
    assert np.abs(out - exact).max() < 1e-6  # half a step of float32 at 12
    assert np.abs(out - exact)[np.abs(x) < 1].max() < 2e-7
    edges = jnp.asarray([np.nan, np.inf, -np.inf, -1e30, 1e30, 0.0])
    without_us = jax.nn.gelu(edges, approximate=False)
    np.testing.assert_array_equal(kernels.bias_gelu(edges, jnp.zeros(6)), without_us)


_arrays = st.one_of(
    st.just(()), st.tuples(st.integers(1, 70)), st.tuples(st.integers(1, 9), st.integers(1, 40)), st.just((210, 211))
)
_matrices = st.one_of(
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.tuples(st.just(3), st.just(3), st.integers(1, 20), st.integers(1, 40)),
    st.sampled_from([(20, 900), (900, 20), (200, 250), (250, 200)]),
)


@contextmanager
def as_optax_needs() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@as_optax_needs()
def updates_match(update: optax.GradientTransformation, shapes: Sequence, seed: int, tolerance: float) -> None:
    """Two updates and the state after them, with and without kernels."""

    @jax.jit
    def run(grads):
        state = update.init(grads[0])
        first, state = update.update(grads[0], state)
        return first, *update.update(grads[1], state)

    grads = [dict(enumerate(draw(seed + step, *shapes))) for step in range(2)]
    with kernels.disabled():
        expected = run(grads)
    for name in SETS:
        library.choose(name)
        ours = run(grads)
        assert jax.tree.structure(ours) == jax.tree.structure(expected)
        same(jax.tree.leaves(ours), jax.tree.leaves(expected), tolerance)


@needs_library
@few
@given(st.lists(_arrays, max_size=5), st.sampled_from([0.5, 1e3]), st.integers(0, 99))
@example([(210, 211), (3,)], 1.0, 0)
def test_clip(shapes, most, seed):
    updates_match(optimiser._clip(most), shapes, seed, TOLERANCE["float32"])


@needs_library
@few
@given(st.lists(_arrays, max_size=5), st.sampled_from([1e-3, 1.0]), st.integers(0, 99))
@example([(210, 211), (3,)], 1.0, 0)
def test_adam(shapes, rate, seed):
    updates_match(optimiser._adam(rate), shapes, seed, TOLERANCE["float32"])


@needs_library
@few
@given(st.lists(_matrices, max_size=3), st.sampled_from([1e-3, 1.0]), st.integers(0, 99))
@example([(60, 900), (900, 60), (3, 3, 16, 200), (200, 200)], 1.0, 0)
def test_muon(shapes, rate, seed):
    # Singular values near 0 amplify rounding errors.
    updates_match(optimiser._muon(rate), shapes, seed, 10 * TOLERANCE["float32"])


@needs_library
@few
@given(st.lists(_arrays, max_size=5), st.integers(0, 99))
@example([(210, 211), (3,)], 0)
def test_weighted_sums(shapes, seed):
    xs, ys, (a, b) = draw(seed, *shapes), draw(seed + 1, *shapes), draw(seed + 2, (), ())
    for name in SETS:
        library.choose(name)
        ours = jax.jit(kernels.weighted_sums)(a, xs, b, ys)
        same(ours, [a * x + b * y for x, y in zip(xs, ys, strict=True)], TOLERANCE["float32"])


@needs_library
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", SETS)
@as_optax_needs()
def test_an_update_that_is_not_finite_is_seen(name, value):
    library.choose(name)
    grads = draw(0, (20, 30), (7, 5))
    grads[1] = grads[1].at[3, 2].set(value)
    for update in (optimiser._clip(1.0), optimiser._adam(1.0), optimiser._muon(1.0)):
        run = jax.jit(lambda grads, update=update: update.update(grads, update.init(grads)))
        with kernels.disabled():
            expected = run(grads)
        for mine, their in zip(jax.tree.leaves(run(grads)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.isnan(mine), np.isnan(their))
            np.testing.assert_array_equal(np.isinf(mine), np.isinf(their))
        assert not all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(expected))
    (moved,) = kernels.weighted_sums(0.0, [grads[1]], 1.0, [grads[1]])
    np.testing.assert_array_equal(np.isnan(moved), np.isnan(0 * grads[1]))


@needs_library
def test_an_update_leaves_arrays_that_are_needed_later():
    (x,) = draw(0, (50,))
    before = np.array(x)
    clipped, again = jax.jit(lambda x: (kernels.clip([x], 0.1)[0], x + 0))(x)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(again, before)
    assert np.linalg.norm(clipped) == pytest.approx(0.1)


@needs_library
def test_an_update_has_the_same_bits_for_any_number_of_threads():
    script = """
    import hashlib, jax, numpy as np
    from smallvit.training import optimiser
    draw = np.random.default_rng(0).normal
    grads = [np.asarray(draw(size=shape), np.float32) for shape in [(300, 301), (3, 3, 40, 50), (200, 100), (90, 17)]]
    for update in (optimiser._clip(1.0), optimiser._adam(1.0), optimiser._muon(1.0)):
        found = jax.jit(lambda grads: update.update(grads, update.init(grads)))(grads)
        print(hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found))).hexdigest())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    options = dict(cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
    one, many = (
        subprocess.run(command, env={**os.environ, "NPROC": threads}, **options).stdout for threads in ("1", "4")
    )
    assert len(one.split()) == 3
    assert one == many


@needs_library
def test_vmap_scan_and_grad():
    qkv, weight = draw(0, (3, 4, 6, 3 * 2 * 5), (7, 10, 30))
    scale = jnp.asarray([[0.3, 0.5], [0.2, 0.1], [0.7, 0.6]])

    def attend(qkv, scale):
        return kernels.attend_packed(qkv, scale)

    one_by_one = jnp.stack([attend(x, s) for x, s in zip(qkv, scale, strict=True)])
    np.testing.assert_allclose(jax.vmap(attend)(qkv, scale), one_by_one, rtol=1e-6)

    def loss(weight, unroll):
        def layer(x, w):
            y = kernels.layer_norm(x, jnp.ones(10), jnp.zeros(10))
            return x + attend(kernels.dense(y.reshape(-1, 10), w).reshape(4, 6, 30), scale[0]), None

        return jnp.square(jax.lax.scan(layer, qkv[0, ..., :10], weight, unroll=unroll)[0]).sum()

    scanned, unrolled = (jax.jit(jax.grad(loss), static_argnums=1)(weight, unroll) for unroll in (1, 7))
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-4, atol=1e-4)


@needs_library
def test_sums_over_the_batch_have_the_same_bits_every_time():
    qkv, bias, weight = draw(0, (37, 17, 3 * 3 * 8), (3, 17, 17), (37, 17, 24))
    gradient = jax.jit(jax.grad(lambda bias: (kernels.attend_packed(qkv, jnp.ones(3), bias) * weight).sum()))
    first = gradient(bias)
    for _ in range(5):
        np.testing.assert_array_equal(gradient(bias), first)
    x, weights = draw(0, (700, 50), (50, 70))
    gradients = jax.jit(jax.grad(lambda *args: jnp.square(kernels.dense(*args)).sum(), (0, 1)))
    first = gradients(x, weights)
    for _ in range(5):
        for again, before in zip(gradients(x, weights), first, strict=True):
            np.testing.assert_array_equal(again, before)


@needs_library
def test_two_calls_at_once():
    qkv = draw(0, (16, 65, 3 * 4 * 16), (16, 65, 3 * 4 * 16))
    run = jax.jit(jax.grad(lambda x: jnp.square(kernels.attend_packed(x, jnp.ones(4))).sum()))
    alone = [run(x) for x in qkv]
    with ThreadPoolExecutor(4) as pool:
        for i, together in enumerate(pool.map(run, qkv * 10)):
            np.testing.assert_array_equal(together, alone[i % 2])


@needs_library
def test_what_does_not_fit_is_left_to_others():
    q, k, v = draw(0, (2, 4, 15), (2, 6, 15), (2, 6, 21))
    assert kernels.attends(q, k, v, 3, None, None)
    assert not kernels.attends(q, k, v, 2, None, None)
    wide = jnp.zeros((2, 4, 3 * 129))
    assert not kernels.attends(wide, wide, wide, 3, None, None)
    assert not kernels.attends(q.astype(jnp.float16), k.astype(jnp.float16), v.astype(jnp.float16), 3, None, None)
    assert not kernels.attends(q, k, v, 3, jnp.zeros((2, 4, 6)), None)
    assert not kernels.attends(q, k, v, 3, None, np.ones((3, 4, 6), bool))  # a mask for each head
    assert not kernels.attends(q[:0], k[:0], v[:0], 3, None, None)
    assert not kernels.attends_packed(jnp.zeros((2, 4, 20)), 3, None, None)
    assert kernels.attends_joined(jnp.zeros((2, 4, 3 * (5 + 5 + 7))), None, 3, 7, None, None)
    assert not kernels.attends_joined(jnp.zeros((2, 4, 3 * (5 + 6 + 7))), None, 3, 7, None, None)
    assert not kernels.attends_joined(q, jnp.zeros((2, 6, 3 * (6 + 7))), 3, 7, None, None)  # five queries, six keys
    assert not kernels.mixes(q, k, v, 2, None)
    assert not kernels.mixes(wide, wide, wide, 3, None)
    assert not kernels.multiplies(jnp.zeros((kernels.FEWEST - 1, 3)), jnp.zeros((3, 2)))
    assert not kernels.multiplies(jnp.zeros((20, 0)), jnp.zeros((0, 2)))
    assert not kernels.multiplies(jnp.zeros((20, 3), jnp.float16), jnp.zeros((3, 2), jnp.float16))
    assert kernels.unfolds(jnp.zeros((1, 4, 4, 3)), (5, 5), (1, 1), (1, 1))
    assert not kernels.unfolds(jnp.zeros((1, 4, 4, 3)), (5, 5), (1, 1), (0, 0))
    assert not kernels.unfolds(jnp.zeros((1, 4, 4, 0)), (2, 2), (1, 1), (0, 0))
    assert not kernels.takes_rows(jnp.zeros((2, 0)))
    assert not kernels.takes_rows(jnp.zeros((2, 3), jnp.int32))
    assert kernels.takes_arrays([jnp.zeros(2)], [jnp.zeros(())])
    assert not kernels.takes_arrays([jnp.zeros(2)], [jnp.zeros(2, jnp.bfloat16)])


@needs_library
def test_a_wrong_shape_is_an_error_and_not_a_crash():
    x = jnp.zeros((2, 3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="scale must have a number for each column"):
        library.call(
            "norm_forward", [jax.ShapeDtypeStruct((2, 3), jnp.float32)], x, x[0, :2], x[0], epsilon=np.float32(0)
        )
    with pytest.raises(jax.errors.JaxRuntimeError, match="must not be empty"):
        linear._product(x[:, :0], x[:0], None)
    pairs = {"size": np.asarray([2, 2]), "stride": np.asarray([1, 1]), "padding": np.asarray([0, 0])}
    with pytest.raises(jax.errors.JaxRuntimeError, match="more windows than x has room for"):
        library.call("unfold", [jax.ShapeDtypeStruct((1, 4, 4, 4), jnp.float32)], jnp.zeros((1, 4, 4, 1)), **pairs)
    scalars, results = (jnp.ones(()), jnp.ones(())), [jax.ShapeDtypeStruct((3,), jnp.float32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="the lists must be equally long"):
        library.call("weighted_sums", results, *scalars, x[0], x[0], x[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="the lists of the same sizes"):
        library.call("weighted_sums", results, *scalars, x[0], x[0, :2])
    with pytest.raises(jax.errors.JaxRuntimeError, match="a matrix must have two axes"):
        kernels.muon([x[0]], [x[0]], scalars, 0.9, 1e-8, 1.0, 5, (1.0, 1.0, 1.0))
