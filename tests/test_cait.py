"""What is specific to CaiT: skipped layers, and a class token that also attends to itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from smallvit import CaiT

SIZES = dict(image_size=8, patch_size=4, num_classes=5, dim=8, depth=1, heads=2, dim_head=4, mlp_dim=8, layer_scale=1.0)
IMAGES = jax.random.normal(jax.random.key(1), (3, 8, 8, 3))


def test_a_layer_is_dropped_whole_for_the_whole_batch_in_training_only():
    model = CaiT(**SIZES, layer_dropout=0.5)
    variables = jax.jit(model.init)(jax.random.key(0), IMAGES)
    without = {"params": {k: v for k, v in variables["params"].items() if k != "block_0"}}
    kept = jax.jit(model.apply)(variables, IMAGES)
    dropped = jax.jit(CaiT(**{**SIZES, "depth": 0}).apply)(without, IMAGES)
    assert jnp.abs(kept - dropped).max() > 1e-2

    step = jax.jit(lambda key: model.apply(variables, IMAGES, train=True, rngs={"dropout": key}))
    outs = [step(key) for key in jax.random.split(jax.random.key(2), 40)]
    times_dropped = sum(np.allclose(out, dropped, atol=1e-5) for out in outs)
    times_kept = sum(np.allclose(out, kept, atol=1e-5) for out in outs)
    assert times_dropped + times_kept == 40
    assert 8 < times_dropped < 32  # 20 on average, 3 standard deviations are 9.5


def test_the_class_token_reads_itself_and_the_patches_even_with_lsa():
    model = CaiT(**SIZES, lsa=True)
    variables = jax.jit(model.init)(jax.random.key(0), IMAGES)
    _, state = jax.jit(lambda v, x: model.apply(v, x, mutable="intermediates"))(variables, IMAGES)
    maps = flatten_dict(state["intermediates"], sep="/")
    (read,) = maps["class_block_0/attention/attend/attention"]
    assert read.shape == (3, 2, 1, 5)
    assert read.min() > 0


@pytest.mark.parametrize("wrong", [dict(pool="mean"), dict(cls_depth=0), dict(layer_dropout=1.0)])
def test_what_cannot_be(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CaiT(**{**SIZES, **wrong}).init(jax.random.key(0), IMAGES)
