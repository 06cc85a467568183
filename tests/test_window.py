"""Windows, by hand: partition and its inverse, who attends to whom, and the relative bias."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit.layers import Attention, RelativeBias, WindowAttention
from smallvit.ops import window_allowed, window_merge, window_partition

KEY = jax.random.key(0)


@pytest.mark.parametrize("grid, window", [((4, 6), 2), ((4, 6), (4, 3)), ((5, 7), (2, 3)), ((3, 3), 4)])
def test_there_and_back(grid, window):
    x = jax.random.normal(KEY, (2, *grid, 3))
    np.testing.assert_array_equal(window_merge(window_partition(x, window), grid, window), x)


def test_windows_are_cut_row_by_row():
    x = jnp.arange(24.0).reshape(1, 4, 6, 1)
    cut = window_partition(x, (2, 3))[0, ..., 0]
    np.testing.assert_array_equal(cut[1], [3, 4, 5, 9, 10, 11])
    np.testing.assert_array_equal(cut[2], [12, 13, 14, 18, 19, 20])


def test_nothing_is_masked_where_windows_fit():
    assert window_allowed((4, 6), (2, 3)) is None


def test_padding_is_read_by_nobody():
    allowed = window_allowed((2, 3), 2)
    assert allowed is not None
    assert allowed.shape == (2, 1, 4, 4)
    assert allowed[0].all()
    np.testing.assert_array_equal(allowed[1, 0], np.tile([True, False, True, False], (4, 1)))


def reach(module, grid) -> np.ndarray:
    """reach[i, j] is whether token j influences token i."""
    x = jax.random.normal(KEY, (1, *grid, 4))
    variables = jax.jit(module.init)(KEY, x)
    jacobian = jax.jit(jax.jacobian(lambda x: module.apply(variables, x).sum(-1)))(x)
    return np.asarray(jnp.abs(jacobian).sum(-1)).reshape(grid[0] * grid[1], -1) > 0


def test_shifted_windows_stop_at_the_border():
    # Rolled by 2, windows of 4 cover places -2..1, 2..5, 6..9: the places beyond both ends are not there.
    got = reach(WindowAttention(partial(Attention, heads=1), 4, 2), (8, 8))
    group = (np.arange(8) + 2) // 4
    window = group[:, None] * 3 + group[None]
    np.testing.assert_array_equal(got, window.reshape(-1, 1) == window.reshape(1, -1))


def test_windows_that_do_not_fit_see_only_what_is_there():
    got = reach(WindowAttention(partial(Attention, heads=1), (2, 4)), (3, 6))
    window = (np.arange(3) // 2)[:, None] * 2 + (np.arange(6) // 4)[None]
    np.testing.assert_array_equal(got, window.reshape(-1, 1) == window.reshape(1, -1))


def test_the_bias_is_the_same_for_the_same_offset():
    bias = RelativeBias(2, (2, 3))
    variables = bias.init(KEY)
    assert jax.tree.map(jnp.shape, variables) == {"params": {"grid": (3, 5, 2)}}
    got, grid = bias.apply(variables), variables["params"]["grid"]
    assert got.shape == (2, 6, 6)
    np.testing.assert_array_equal(got[:, 0, 0], grid[1, 2])
    np.testing.assert_array_equal(got[:, 0, 5], grid[0, 0])  # one up, two to the left
    np.testing.assert_array_equal(got[:, 5, 0], grid[2, 4])
    np.testing.assert_array_equal(got[:, 3, 1], grid[2, 1])  # one down, one to the left
