"""Shared comparisons of values and gradients, with every instruction set of this machine."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from smallvit import kernels
from smallvit.kernels import library

needs_library = pytest.mark.skipif(kernels.status().instruction_set is None, reason=str(kernels.status()))
SETS = [name for name in ("avx512", "avx2", "portable") if library.PATH.exists() and library.choose(name)]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
few = settings(max_examples=14, deadline=None, derandomize=True, database=None)


def draw(seed: int, *shapes: tuple[int, ...], dtype: str = "float32") -> list[jax.Array]:
    normal = np.random.default_rng(seed).normal
    return [jnp.asarray(normal(size=shape), dtype) for shape in shapes]


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
