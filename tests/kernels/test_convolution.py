"""Convolutions, max pooling and BatchNorm by the kernels against plain jnp."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smallvit import kernels
from smallvit.kernels import library
from smallvit.ops import max_pool
from tests.kernels.checks import SETS, TOLERANCE, draw, few, matches, needs_library, same, with_gradients

pytestmark = needs_library


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
@example(9, (9, 9), 3, 16, (3, 3), (1, 1), (1, 1), "float32", 0)  # a small gradient, summed over parts of the images
@example(9, (9, 9), 2, 70, (4, 4), (2, 2), (1, 1), "bfloat16", 0)
@example(2, (9, 9), 40, 40, (4, 4), (1, 1), (1, 1), "float32", 0)  # a larger one, whose rows are divided
def test_conv(images, sides, channels, features, size, stride, padding, dtype, seed):
    padding = tuple(max(p, -(-(k - n) // 2)) for p, k, n in zip(padding, size, sides, strict=True))  # one window fits
    x, kernel = draw(seed, (images, *sides, channels), (*size, channels, features), dtype=dtype)
    assert kernels.convolves(x, kernel, stride, padding) == (dtype == "float32" or not library.has_bfloat16())
    ours, theirs = (partial(each, stride=stride, padding=padding) for each in (kernels.conv, convolved))
    matches(ours, theirs, (x, kernel), TOLERANCE[dtype])


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


@pytest.mark.parametrize("name", SETS)
def test_tiles_round_little(name):
    """Against float64. With the zeros 0, 1, -1, 2 and -2 in Winograd's algorithm the error would be 2e-6."""
    library.choose(name)
    x, kernel = draw(0, (16, 16, 16, 64), (3, 3, 64, 64))
    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    taps = np.asarray(kernel, np.float64)
    exact = sum(padded[:, i : i + 16, j : j + 16] @ taps[i, j] for i in range(3) for j in range(3))
    error = np.asarray(kernels.conv(x, kernel, (1, 1), (1, 1)), np.float64) - exact
    assert np.sqrt(np.square(error).mean() / np.square(exact).mean()) < 1.4e-6


@few
@given(
    images=st.integers(1, 3),
    sides=_sides,
    channels=st.integers(1, 40),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    ties=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
@example(64, (9, 7), 24, (2, 2), True, "float32", 0)  # work for several threads
def test_max_pool(images, sides, channels, stride, ties, dtype, seed):
    """The same to the bit, also among equal numbers."""
    (x,) = draw(seed, (images, *sides, channels), dtype=dtype)
    x = jnp.round(x) if ties else x
    assert kernels.pools(x, stride)

    def plain(x):
        with kernels.disabled():
            return max_pool(x, stride)

    run, expected = with_gradients(partial(kernels.max_pool, stride=stride)), with_gradients(plain)(x)
    for name in SETS:
        library.choose(name)
        for mine, their in zip(run(x), expected, strict=True):
            assert mine.dtype == their.dtype
            np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(their, np.float32))


@pytest.mark.parametrize("name", SETS)
def test_max_pool_keeps_nan(name):
    """XLA's does not."""
    library.choose(name)
    (x,) = draw(0, (2, 5, 5, 20))
    y, dx = with_gradients(partial(kernels.max_pool, stride=(2, 2)))(x.at[1, 2, 3, 17].set(jnp.nan))
    assert np.argwhere(np.isnan(y)).tolist() == [[1, 1, 1, 17]]
    assert np.argwhere(np.isnan(dx)).tolist() == [[1, i, j, 17] for i in (2, 3) for j in (2, 3)]


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


@few
@given(
    st.integers(1, 3),
    st.tuples(st.integers(2, 9), st.integers(2, 9)),
    st.integers(1, 40),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 99),
)
@example(64, (9, 7), 24, (2, 2), True, "float32", 0)  # work for several threads
def test_batch_norm_pool(images, sides, channels, stride, relu, dtype, seed):
    (x,), (scale, bias) = draw(seed, (images, *sides, channels), dtype=dtype), draw(seed + 1, (channels,), (channels,))

    def theirs(x, scale, bias):
        y = normed(x.reshape(-1, channels).astype(jnp.float32), scale, bias, None, relu).reshape(x.shape)
        return kernels.max_pool(y, stride).astype(x.dtype)

    matches(
        lambda *args: kernels.batch_norm_pool(*args, 1e-5, relu, stride)[0],
        theirs,
        (3 * x + 2, scale, bias),
        TOLERANCE[dtype],
    )


def test_batch_norm_of_a_large_mean():
    """The variance of parts of the rows, which have different means."""
    (x,) = draw(0, (9000, 40))
    x = x + 100 + jnp.linspace(0, 50, 9000)[:, None]
    _, mean, var = kernels.batch_norm(x, jnp.ones(40), jnp.zeros(40), None, 1e-5, True)
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(var, exact.var(0), rtol=1e-5)


def test_batch_norm_gives_the_moments_and_nan_goes_through():
    (x,) = draw(0, (50, 3))
    y, mean, var = kernels.batch_norm(x, jnp.ones(3), jnp.zeros(3), None, 1e-5, True)
    np.testing.assert_allclose(mean, x.mean(0), atol=1e-6)
    np.testing.assert_allclose(var, x.var(0), rtol=1e-5)
    assert bool((y >= 0).all())
    y, _, _ = kernels.batch_norm(x.at[4, 1].set(jnp.nan), jnp.ones(3), jnp.zeros(3), None, 1e-5, True)
    assert np.isnan(y).any(axis=0).tolist() == [False, True, False]


def test_which_convolutions_the_kernels_take():
    x, kernel = jnp.zeros((1, 4, 4, 2)), jnp.zeros((3, 3, 2, 5))
    assert kernels.convolves(x, kernel, (1, 1), (0, 0))
    assert not kernels.convolves(x, jnp.zeros((3, 3, 1, 4)), (1, 1), (1, 1))  # two groups
    assert not kernels.convolves(x, jnp.zeros((5, 5, 2, 4)), (1, 1), (0, 0))  # larger than the grid
    assert not kernels.convolves_depthwise(x, jnp.zeros((3, 3, 1, 2)), (2, 2), (1, 1))  # its derivative is no other
    assert not kernels.convolves_depthwise(x, jnp.zeros((3, 3, 1, 4)), (1, 1), (1, 1))  # two kernels a channel
    with kernels.disabled():
        assert not kernels.convolves(x, kernel, (1, 1), (1, 1))
