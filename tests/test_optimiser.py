"""Weight decay, Muon, and the same update by kernels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import scale_by_muon

from smallvit import kernels as native
from smallvit.common.paths import by_path
from smallvit.training import RECIPES, Recipe
from smallvit.training.optimiser import _as_matrices, kernels, optimiser
from smallvit.training.step import STILL
from tests.small import PREPROCESS, Small

pytestmark = pytest.mark.usefixtures("as_optax_needs")


def test_only_kernels_decay_unless_all_do():
    params = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "positions": {"grid": jnp.ones((2, 2))}}
    assert kernels(params) == {"dense": {"kernel": True, "bias": False}, "positions": {"grid": False}}
    for decay_all in (False, True):
        small = Small(Recipe(learning_rate=1.0, weight_decay=0.5, decay_all=decay_all))
        state, _, _ = small.run(1, rate=0.0, decay=0.5)
        before = by_path(small.state.params)
        for path, leaf in by_path(state.params).items():
            factor = 0.5 if decay_all or path.endswith("/kernel") else 1.0
            np.testing.assert_allclose(leaf, factor * before[path], atol=1e-6, err_msg=path)


def test_muon_trains_the_hidden_matrices_and_adam_the_rest():
    shapes = {
        "head": {"kernel": (32, 20), "bias": (20,)},
        "block": {"kernel": (32, 64)},
        "conv": {"kernel": (3, 3, 16, 32)},
        "few": {"kernel": (3, 3, 1, 16)},
        "norm": {"scale": (32,)},
    }
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(lambda shape: jnp.asarray(draw(size=shape)), shapes, is_leaf=lambda x: isinstance(x, tuple))
    update = optimiser(Recipe(learning_rate=1e-3, weight_decay=0.0, optimiser="muon", matrix_rate=0.1))
    updates, _ = update.update(params, update.init(params), params)
    for name in ("block", "conv"):  # orthogonal: all singular values are about the same
        matrix = np.asarray(updates[name]["kernel"]).reshape(-1, params[name]["kernel"].shape[-1])
        values = np.linalg.svd(matrix, compute_uv=False) / (0.1 * max(1, matrix.shape[1] / matrix.shape[0]) ** 0.5)
        assert 0.6 < values.min() < values.max() < 1.3
    for path, leaf in by_path({name: updates[name] for name in ("head", "few", "norm")}).items():
        np.testing.assert_allclose(np.abs(leaf), 1e-3, rtol=1e-3, err_msg=path)  # Adam's first step


def test_muon_is_that_of_optax():
    shapes = {"a": (32, 64), "b": (64, 32), "c": (3, 3, 16, 32), "d": (32, 64), "e": (20, 20), "flat": (32, 64)}
    key, names = jax.random.key(0), list(shapes)
    recipe = Recipe(learning_rate=1e-3, weight_decay=0.0, optimiser="muon", matrix_rate=1.0)
    ours, optaxs = optimiser(recipe), scale_by_muon(weight_dimension_numbers=_as_matrices)
    params = {name: {"kernel": jnp.zeros(shapes[name])} for name in names}
    state, theirs = ours.init(params), optaxs.init(params)
    for step in range(2):
        keys = jax.random.split(jax.random.fold_in(key, step), len(names))
        grads = {
            name: {"kernel": jax.random.normal(each, shapes[name])} for name, each in zip(names, keys, strict=True)
        }
        grads["flat"]["kernel"] = jnp.outer(grads["flat"]["kernel"][:, 0], jnp.ones(64))  # of rank 1
        updates, state = ours.update(grads, state, params)
        expected, theirs = optaxs.update(grads, theirs, params)
    for name in names:
        wanted = np.asarray(expected[name]["kernel"])
        wider = max(1.0, wanted.shape[-1] ** 2 / wanted.size) ** 0.5
        # Singular values of 0 amplify rounding errors.
        np.testing.assert_allclose(updates[name]["kernel"], -wider * wanted, atol=2e-4 if name == "flat" else 1e-5)


@pytest.mark.skipif(not native.usable(), reason=str(native.status()))
@pytest.mark.parametrize("fields", [{}, {"layer_decay": 0.7, "decay_all": True, "ema": 0.0}, {"freeze": "backbone"}])
def test_a_step_with_update_kernels_is_that_of_optax(monkeypatch, fields):
    recipe = replace(RECIPES["default"], batch_size=8, clip=0.5, **fields)
    small = Small(recipe, "hybrid_vit_small")
    ours, _, _ = small.run(3, decay=0.01)
    batch = small.images, small.labels, jax.random.key(1), STILL, PREPROCESS.normalisation
    text = str(jax.make_jaxpr(small.step)(small.state, *batch))
    assert all(f"smallvit_{name}" in text for name in ("clip", "adam", "weighted_sums"))
    assert ("smallvit_muon" in text) == (recipe.freeze == "none")
    monkeypatch.setattr(native, "takes_arrays", lambda *_: False)
    theirs, _, _ = Small(recipe, "hybrid_vit_small").run(3, decay=0.01)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=jax.tree_util.keystr(path))
