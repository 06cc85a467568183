"""Products, LayerNorm, GELU and softmax by the kernels against plain jnp."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallvit import kernels
from smallvit.kernels import library, linear
from smallvit.ops import multiply
from tests.kernels.checks import SETS, TOLERANCE, draw, few, needs_library, same, with_gradients

pytestmark = needs_library


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


def test_a_cpu_that_multiplies_bfloat16_has_xlas_product(monkeypatch):
    monkeypatch.setattr(linear, "has_bfloat16", lambda: True)
    (x, weights), (bias,) = draw(0, (20, 9), (9, 5), dtype="bfloat16"), draw(1, (5,))
    assert not kernels.multiplies(x, weights)
    assert kernels.multiplies(x.astype(jnp.float32), weights.astype(jnp.float32))

    def plain(x, weights, bias):
        return jax.nn.gelu(jnp.dot(x.astype(jnp.float32), weights.astype(jnp.float32)) + bias[None], approximate=False)

    ours = with_gradients(partial(multiply, gelu=True))(x, weights, bias)
    same(ours, with_gradients(plain)(x, weights, bias), TOLERANCE["bfloat16"])


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
