"""Shifted Patch Tokenization, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit.layers import SPT, PatchEmbed, SPTPool
from smallvit.ops import patchify, shifted_copies

COUNTING = jnp.arange(1.0, 37).reshape(1, 6, 6, 1)


def test_the_diagonal_copies_of_a_counting_image():
    x, lu, ru, lb, rb = np.moveaxis(shifted_copies(COUNTING, 2)[0], -1, 0)
    np.testing.assert_array_equal(x, COUNTING[0, ..., 0])
    np.testing.assert_array_equal(lu[2], [0, 0, 1, 2, 3, 4])
    np.testing.assert_array_equal(rb[0], [15, 16, 17, 18, 0, 0])
    np.testing.assert_array_equal(ru[2], [3, 4, 5, 6, 0, 0])
    np.testing.assert_array_equal(lb[0], [0, 0, 13, 14, 15, 16])


def test_cardinal_copies_and_all_eight():
    _, left, right, up, down = np.moveaxis(shifted_copies(COUNTING, 1, "cardinal")[0], -1, 0)
    np.testing.assert_array_equal(left[0], [0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(right[0], [2, 3, 4, 5, 6, 0])
    np.testing.assert_array_equal(up[1], [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(down[0], [7, 8, 9, 10, 11, 12])
    assert shifted_copies(COUNTING, 1, "all").shape == (1, 6, 6, 9)


def test_a_shift_larger_than_the_image_leaves_zeros():
    assert jnp.abs(shifted_copies(COUNTING, 9)[..., 1:]).max() == 0


def test_patches_are_flattened_row_column_channel():
    image = jnp.arange(2 * 4 * 6 * 2.0).reshape(2, 4, 6, 2)
    np.testing.assert_array_equal(patchify(image, (2, 3))[1, 1, 1], image[1, 2:4, 3:6].reshape(-1))


@pytest.mark.parametrize(
    "size, channels, patch, directions, copies",
    [
        ((8, 8), 3, 4, "diagonal", 5),
        ((6, 9), 1, 3, "diagonal", 5),
        ((4, 4), 2, 1, "diagonal", 5),
        ((4, 12), 4, (2, 3), "cardinal", 5),
        ((10, 5), 3, 5, "all", 9),
    ],
)
def test_spt_is_its_definition(size, channels, patch, directions, copies):
    image = jax.random.normal(jax.random.key(0), (2, *size, channels))
    spt = SPT(7, patch, directions)
    variables = jax.jit(spt.init)(jax.random.key(1), image)
    p, q = (patch, patch) if isinstance(patch, int) else patch
    width = copies * channels * p * q
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes == {
        "norm": {"scale": (width,), "bias": (width,)},
        "dense": {"kernel": (width, 7), "bias": (7,)},
    }
    x = patchify(shifted_copies(image, (p // 2, q // 2), directions), patch).reshape(2, -1, width)
    x = np.asarray(x, np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    kernel = np.asarray(variables["params"]["dense"]["kernel"], np.float64)
    np.testing.assert_allclose(spt.apply(variables, image), x @ kernel, atol=1e-5)


def test_one_token_sees_twice_the_patch():
    image = jax.random.normal(jax.random.key(0), (1, 16, 16, 1))

    def seen(embed) -> tuple[int, int]:
        variables = embed.init(jax.random.key(1), image)
        touched = jnp.abs(jax.grad(lambda x: embed.apply(variables, x)[0, 5].sum())(image))[0, ..., 0] > 0
        return int(touched.any(1).sum()), int(touched.any(0).sum())

    assert seen(PatchEmbed(8, 4)) == (4, 4)
    assert seen(SPT(8, 4)) == (8, 8)
    assert seen(SPT(8, 4, shift=1)) == (6, 6)


@pytest.mark.parametrize("prefix", [0, 1])
def test_spt_as_pooling_on_a_rectangular_grid(prefix: int):
    tokens = jax.random.normal(jax.random.key(0), (2, prefix + 4 * 6, 5))
    pool = SPTPool(10, (4, 6))
    variables = pool.init(jax.random.key(1), tokens)
    out = pool.apply(variables, tokens)
    assert out.shape == (2, prefix + 2 * 3, 10)
    grid = SPT(10, 2).apply({"params": variables["params"]["spt"]}, tokens[:, prefix:].reshape(2, 4, 6, 5))
    np.testing.assert_allclose(out[:, prefix:], grid, atol=1e-6)
    if prefix:
        np.testing.assert_allclose(out[:, 0], tokens[:, 0] @ variables["params"]["cls"]["kernel"], atol=1e-5)


def test_spt_as_pooling_pads_an_odd_grid_with_zeros():
    tokens = jax.random.normal(jax.random.key(0), (2, 3 * 5, 4))
    pool = SPTPool(8, (3, 5))
    variables = pool.init(jax.random.key(1), tokens)
    even = jnp.zeros((2, 4, 6, 4)).at[:, :3, :5].set(tokens.reshape(2, 3, 5, 4))
    np.testing.assert_allclose(
        pool.apply(variables, tokens), SPTPool(8, (4, 6)).apply(variables, even.reshape(2, 24, 4)), atol=1e-6
    )


def test_a_shift_of_the_image_by_one_patch_shifts_the_tokens():
    image = jnp.zeros((1, 16, 16, 3)).at[:, 4:8, 4:8].set(jax.random.normal(jax.random.key(0), (4, 4, 3)))
    spt = SPT(8, 4)
    variables = spt.init(jax.random.key(1), image)
    here = spt.apply(variables, image).reshape(4, 4, 8)
    there = spt.apply(variables, jnp.roll(image, (4, 4), (1, 2))).reshape(4, 4, 8)
    np.testing.assert_allclose(here[:3, :3], there[1:, 1:], atol=1e-6)


def test_unknown_directions():
    with pytest.raises(ValueError, match=r"'round'.*diagonal, cardinal, all"):
        shifted_copies(COUNTING, 1, "round")
