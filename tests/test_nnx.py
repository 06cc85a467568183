"""NNX modules compute the same as our models."""

import jax
import numpy as np
import pytest
from flax import nnx

import smallvit
from tests.cases import CASES


# LeViT has the statistics of BatchNorm.
@pytest.mark.parametrize("name", ["sl_vit", "levit"])
def test_the_same_comes_out(name: str):
    case = CASES[name]
    model = case.make(spt=True, lsa=True)
    images = np.random.default_rng(0).standard_normal((2, *case.size, case.channels), np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), images)
    # Statistics as after training: those of the start would hide that they are not read.
    draw = np.random.default_rng(1)
    variables = jax.tree.map(lambda x: np.asarray(x) + draw.uniform(0, 0.1, x.shape).astype(np.float32), variables)
    expected = jax.jit(model.apply)(variables, images)

    module = smallvit.to_nnx(model, variables)
    assert isinstance(module, nnx.Module)
    np.testing.assert_allclose(nnx.jit(lambda module, images: module(images))(module, images), expected, atol=1e-6)
    kinds = {"params": nnx.Param, "batch_stats": nnx.BatchStat}
    for collection, tree in variables.items():
        assert len(jax.tree.leaves(nnx.state(module, kinds[collection]))) == len(jax.tree.leaves(tree))


def test_weights_of_the_module_can_be_trained():
    case = CASES["sl_vit"]
    model = case.make(depth=1)
    images = np.ones((2, *case.size, case.channels), np.float32)
    module = smallvit.to_nnx(model, jax.jit(model.init)(jax.random.key(0), images))
    gradient = nnx.jit(nnx.grad(lambda module: module(images).sum()))(module)
    np.testing.assert_allclose(jax.tree.leaves(gradient["head"]["bias"])[0], 2.0, rtol=1e-6)
