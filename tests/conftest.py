"""Strict by default: shapes and types are checked at run time, nothing is promoted or broadcast in silence."""

from collections.abc import Iterator

import jax
import jaxtyping
import pytest

jaxtyping.install_import_hook("smallvit", "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # tests compile far more than they compute,
jax.config.update("jax_default_prng_impl", "rbg")  # and the default generator is long to compile


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Without the run-time types, which only the tests have: a user's mistake reaches our own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
