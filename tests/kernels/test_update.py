"""The update of the weights by the kernels against optax."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smallvit import kernels
from smallvit.kernels import library
from smallvit.training import optimiser
from tests.kernels.checks import SETS, TOLERANCE, draw, few, needs_library, same

pytestmark = needs_library


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


@few
@given(st.lists(_arrays, max_size=5), st.sampled_from([0.5, 1e3]), st.integers(0, 99))
@example([(210, 211), (3,)], 1.0, 0)
def test_clip(shapes, most, seed):
    updates_match(optimiser._clip(most), shapes, seed, TOLERANCE["float32"])


@few
@given(st.lists(_arrays, max_size=5), st.sampled_from([1e-3, 1.0]), st.integers(0, 99))
@example([(210, 211), (3,)], 1.0, 0)
def test_adam(shapes, rate, seed):
    updates_match(optimiser._adam(rate), shapes, seed, TOLERANCE["float32"])


@few
@given(st.lists(_matrices, max_size=3), st.sampled_from([1e-3, 1.0]), st.integers(0, 99))
@example([(60, 900), (900, 60), (3, 3, 16, 200), (200, 200)], 1.0, 0)
def test_muon(shapes, rate, seed):
    # Singular values near 0 amplify rounding errors.
    updates_match(optimiser._muon(rate), shapes, seed, 10 * TOLERANCE["float32"])


@few
@given(st.lists(_arrays, max_size=5), st.integers(0, 99))
@example([(210, 211), (3,)], 0)
def test_weighted_sums(shapes, seed):
    xs, ys, (a, b) = draw(seed, *shapes), draw(seed + 1, *shapes), draw(seed + 2, (), ())
    for name in SETS:
        library.choose(name)
        ours = jax.jit(kernels.weighted_sums)(a, xs, b, ys)
        same(ours, [a * x + b * y for x, y in zip(xs, ys, strict=True)], TOLERANCE["float32"])


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


def test_an_update_leaves_arrays_that_are_needed_later():
    (x,) = draw(0, (50,))
    before = np.array(x)
    clipped, again = jax.jit(lambda x: (kernels.clip([x], 0.1)[0], x + 0))(x)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(again, before)
    assert np.linalg.norm(clipped) == pytest.approx(0.1)


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
    options = dict(cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    one, many = (
        subprocess.run(command, env={**os.environ, "NPROC": threads}, **options).stdout for threads in ("1", "4")
    )
    assert len(one.split()) == 3
    assert one == many
