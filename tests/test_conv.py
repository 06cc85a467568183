"""Convolution and batch normalisation, by hand."""

from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import kernels
from smallvit.layers import BatchNorm, Conv
from smallvit.ops import max_pool, plain_convolutions
from smallvit.ops.conv import depthwise_conv


def test_padding_is_the_same_on_all_sides():
    image = jnp.arange(16.0).reshape(1, 4, 4, 1)
    out = Conv(1, 3, 2, 1, use_bias=False).apply({"params": {"kernel": jnp.ones((3, 3, 1, 1))}}, image)
    np.testing.assert_array_equal(out[0, ..., 0], [[10, 24], [51, 90]])


def test_depthwise_channels_stay_apart():
    image = jax.random.normal(jax.random.key(0), (1, 4, 4, 2))
    conv = Conv(4, 3, padding=1, depthwise=True)
    variables = conv.init(jax.random.key(1), image)
    out, changed = conv.apply(variables, image), conv.apply(variables, image.at[..., 1].add(1.0))
    assert out.shape == (1, 4, 4, 4)
    np.testing.assert_array_equal(out[..., :2], changed[..., :2])
    assert jnp.abs(out[..., 2:] - changed[..., 2:]).min() > 0
    with pytest.raises(ValueError, match="multiple of 2 channels"):
        Conv(3, 3, depthwise=True).init(jax.random.key(1), image)


def test_batch_norm_trains_with_the_moments_of_the_batch_and_remembers_them():
    x = jnp.asarray([[1.0, 2.0], [3.0, 2.0], [5.0, 8.0]])
    norm = BatchNorm()
    variables = norm.init(jax.random.key(0), x, train=True)
    np.testing.assert_array_equal(variables["batch_stats"]["mean"], [0, 0])
    out, state = norm.apply(variables, x, train=True, mutable=["batch_stats"])
    np.testing.assert_allclose(out, (x - x.mean(0)[None]) / jnp.sqrt(x.var(0) + 1e-5)[None], atol=1e-6)
    np.testing.assert_allclose(state["batch_stats"]["mean"], [0.3, 0.4], atol=1e-6)
    np.testing.assert_allclose(state["batch_stats"]["var"], [0.9 + 0.1 * 4, 0.9 + 0.1 * 12], atol=1e-6)
    evaluated = norm.apply({**variables, **state}, x)
    np.testing.assert_allclose(evaluated, (x - 0.1 * x.mean(0)[None]) / jnp.sqrt(jnp.asarray([[1.3, 2.1]])), atol=1e-4)


def test_batch_norm_computes_in_float32_and_returns_its_dtype():
    x = (1000 + jax.random.normal(jax.random.key(0), (64, 2))).astype(jnp.bfloat16)
    norm = BatchNorm(dtype=jnp.bfloat16)
    variables = norm.init(jax.random.key(0), x)
    out, state = norm.apply(variables, x, train=True, mutable=["batch_stats"])
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(state["batch_stats"]["mean"], 100.0, atol=0.1)


@pytest.mark.parametrize(
    "size, kernel, stride, padding, copies", [((7, 8), 3, 2, 1, 2), ((5, 6), 3, 1, 1, 1), ((8, 8), 2, 2, 0, 1)]
)
def test_the_derivative_of_a_depthwise_convolution_is_autodiffs(size, kernel, stride, padding, copies):
    x = jax.random.normal(jax.random.key(0), (2, *size, 3))
    weights = jax.random.normal(jax.random.key(1), (kernel, kernel, 1, 3 * copies))

    def plain(x, weights):
        return jax.lax.conv_general_dilated(
            x, weights, (stride, stride), [(padding, padding)] * 2, None, None, ("NHWC", "HWIO", "NHWC"), 3
        )

    want, pull = jax.vjp(plain, x, weights)
    got, pull_ours = jax.vjp(lambda x, w: depthwise_conv(x, w, (stride, stride), (padding, padding)), x, weights)
    np.testing.assert_allclose(got, want, atol=1e-5)
    for ours, theirs in zip(pull_ours(want), pull(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("size, kernel, stride, padding", [((9, 8), 3, 2, 1), ((6, 8), 2, 2, 0), ((7, 7), 3, 1, 1)])
def test_a_convolution_and_its_derivative_are_xlas(size, kernel, stride, padding, native):
    x = jax.random.normal(jax.random.key(0), (2, *size, 3))
    weights = jax.random.normal(jax.random.key(1), (kernel, kernel, 3, 5))

    def plain(x, weights):
        return jax.lax.conv_general_dilated(
            x, weights, (stride, stride), [(padding, padding)] * 2, None, None, ("NHWC", "HWIO", "NHWC")
        )

    conv = Conv(5, kernel, stride, padding, use_bias=False)
    want, pull = jax.vjp(plain, x, weights)
    with nullcontext() if native else kernels.disabled():
        got, pull_ours = jax.vjp(lambda x, w: conv.apply({"params": {"kernel": w}}, x), x, weights)
    np.testing.assert_allclose(got, want, atol=1e-5)
    for ours, theirs in zip(pull_ours(want), pull(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_derivative_of_batch_norm_is_autodiffs():
    x, dy = (jax.random.normal(jax.random.key(i), (7, 3)) * 2 + 1 for i in (0, 1))
    scale, bias = jnp.asarray([0.5, 1.0, 2.0]), jnp.asarray([1.0, 0.0, -1.0])

    def plain(x, scale, bias):
        return (x - x.mean(0)[None]) / jnp.sqrt(x.var(0) + 1e-5)[None] * scale[None] + bias[None]

    def ours(x, scale, bias):
        return BatchNorm().apply(
            {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": jnp.zeros(3), "var": jnp.ones(3)}},
            x,
            train=True,
            mutable=["batch_stats"],
        )[0]

    for a, b in zip(*(jax.vjp(f, x, scale, bias)[1](dy) for f in (ours, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("depthwise", [False, True])
def test_a_plain_convolution_is_one_operation_with_the_same_result(depthwise):
    image = jax.random.normal(jax.random.key(0), (2, 9, 8, 4))
    conv = Conv(8, 3, 2, 1, depthwise)
    variables = conv.init(jax.random.key(1), image)
    apply = jax.jit(conv.apply)
    ours = apply(variables, image)
    assert "stablehlo.convolution" not in apply.lower(variables, image).as_text()
    with plain_convolutions():
        np.testing.assert_allclose(apply(variables, image), ours, atol=1e-5)
        assert apply.lower(variables, image).as_text().count("stablehlo.convolution") == 1


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("stride", [(2, 2), (1, 1), (1, 2), (3, 4)])
def test_max_pooling_is_flaxs(stride: tuple[int, int], native: bool):
    x = jax.random.normal(jax.random.key(0), (2, 5, 8, 3)) - 1
    with nullcontext() if native else kernels.disabled():
        np.testing.assert_array_equal(max_pool(x, stride), nn.max_pool(x, stride, stride, "SAME"))


@pytest.mark.parametrize("native", [True, False])
def test_equal_numbers_share_the_gradient_of_max_pooling(native: bool):
    x, dy = jnp.asarray([[5.0, 5, -1], [2, 5, -1], [-3, -4, -2]]), jnp.asarray([[6.0, 8], [1, 3]])
    with nullcontext() if native else kernels.disabled():
        y, pull = jax.vjp(lambda x: max_pool(x[None, ..., None], (2, 2))[0, ..., 0], x)
        (dx,) = pull(dy)
    np.testing.assert_array_equal(y, [[5, -1], [-3, -2]])
    np.testing.assert_array_equal(dx, [[2, 2, 4], [0, 2, 4], [1, 0, 3]])
