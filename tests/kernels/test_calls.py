"""What all kernels have in common: transformations of jax, threads, shapes that are not theirs."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import kernels
from smallvit.kernels import library, linear
from tests.kernels.checks import draw, needs_library

pytestmark = needs_library


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
    images, weights = draw(0, (40, 13, 11, 3), (3, 3, 3, 16))
    conv = partial(kernels.conv, stride=(1, 1), padding=(1, 1))
    gradient = jax.jit(jax.grad(lambda weights: jnp.square(conv(images, weights)).sum()))
    first = gradient(weights)
    for _ in range(5):
        np.testing.assert_array_equal(gradient(weights), first)


def test_two_calls_at_once():
    qkv = draw(0, (16, 65, 3 * 4 * 16), (16, 65, 3 * 4 * 16))
    run = jax.jit(jax.grad(lambda x: jnp.square(kernels.attend_packed(x, jnp.ones(4))).sum()))
    alone = [run(x) for x in qkv]
    with ThreadPoolExecutor(4) as pool:
        for i, together in enumerate(pool.map(run, qkv * 10)):
            np.testing.assert_array_equal(together, alone[i % 2])


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
    assert not kernels.pools(jnp.zeros((1, 4, 4, 0)), (2, 2))
    assert not kernels.pools(jnp.zeros((1, 4, 4, 3), jnp.float16), (2, 2))
    assert not kernels.pools(jnp.zeros((1, 4, 4, 3)), (5, 13))
    assert not kernels.takes_rows(jnp.zeros((2, 0)))
    assert not kernels.takes_rows(jnp.zeros((2, 3), jnp.int32))
    assert kernels.takes_arrays([jnp.zeros(2)], [jnp.zeros(())])
    assert not kernels.takes_arrays([jnp.zeros(2)], [jnp.zeros(2, jnp.bfloat16)])


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
    with pytest.raises(jax.errors.JaxRuntimeError, match="a pixel for each rectangle"):
        library.call(
            "max_pool", [jax.ShapeDtypeStruct((1, 3, 2, 1), jnp.float32)], x[None, :, :, None], stride=pairs["size"]
        )
    scalars, results = (jnp.ones(()), jnp.ones(())), [jax.ShapeDtypeStruct((3,), jnp.float32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="the lists must be equally long"):
        library.call("weighted_sums", results, *scalars, x[0], x[0], x[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="the lists of the same sizes"):
        library.call("weighted_sums", results, *scalars, x[0], x[0, :2])
    with pytest.raises(jax.errors.JaxRuntimeError, match="a matrix must have two axes"):
        kernels.muon([x[0]], [x[0]], scalars, 0.9, 1e-8, 1.0, 5, (1.0, 1.0, 1.0))
