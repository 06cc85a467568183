"""Dense without the kernels, by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import kernels
from smallvit.ops import exact_gelu, multiply


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * np.vectorize(math.erfc)(-x / 2**0.5)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 2**-5)])  # half a step of bfloat16 at 12
def test_gelu_is_exact(dtype, tolerance):
    x = jnp.linspace(-12, 12, 4001).astype(dtype)
    out = exact_gelu(x)
    assert out.dtype == x.dtype
    error = np.abs(np.asarray(out, np.float64) - gelu(np.asarray(x, np.float64)))
    assert error.max() <= tolerance
    assert error[np.abs(np.asarray(x, np.float64)) < 1].max() < tolerance / 10
    assert exact_gelu(jnp.asarray(-1e30, dtype)) == 0


@pytest.mark.parametrize("biased", [True, False])
def test_a_product_without_kernels(biased):
    draw = np.random.default_rng(0)
    x, weights, bias = draw.normal(size=(20, 9)), draw.normal(size=(9, 5)), draw.normal(size=5) * biased
    expected = x @ weights + bias
    args = [jnp.asarray(each, jnp.float32) for each in ((x, weights, bias) if biased else (x, weights))]
    with kernels.disabled():
        np.testing.assert_allclose(multiply(*args), expected, atol=1e-5)
        np.testing.assert_allclose(multiply(*args, gelu=True), gelu(expected), atol=1e-5)
