"""Blocks recomputed in the backward pass: the same gradients, less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import smallvit
from smallvit.ops import recompute

SIZE = dict(image_size=32, num_classes=5)
MODELS = {
    "sl_vit": lambda: smallvit.SLViT(patch_size=8, dim=24, depth=3, heads=2, mlp_dim=48, dim_head=12, **SIZE),
    "cait": lambda: smallvit.CaiT(
        patch_size=8, dim=24, depth=2, cls_depth=1, heads=2, mlp_dim=48, dim_head=12, layer_dropout=0.0, **SIZE
    ),
}


def gradient(model, variables, images, again: bool):
    def loss(params):
        with recompute(again):
            state, rngs = {**variables, "params": params}, {"dropout": jax.random.key(1)}
            out, _ = model.apply(state, images, train=True, rngs=rngs, mutable=["batch_stats"])
        return jnp.square(out).sum()

    return jax.value_and_grad(loss), loss


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same(name):
    model, images = MODELS[name](), jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
    variables = jax.jit(model.init)(jax.random.key(1), images)
    kept, again = (jax.jit(gradient(model, variables, images, on)[0])(variables["params"]) for on in (False, True))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * (1 + np.abs(a).max()))


def test_blocks_with_batch_norm_are_not_recomputed():
    """Its statistics must be updated only once, so the program is the same; that of a ViT is not."""
    levit = smallvit.create_model("levit_128s", dim=(16, 16, 16), depth=1, heads=1, **SIZE)
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    for model, recomputed in ((levit, False), (MODELS["sl_vit"](), True)):
        variables = jax.eval_shape(model.init, jax.random.key(1), images)
        kept, again = (
            jax.jit(lambda v, x, on=on, model=model: gradient(model, v, x, on)[0](v["params"]))
            .lower(variables, images)
            .as_text()
            for on in (False, True)
        )
        assert (kept != again) == recomputed


def test_the_second_time_drops_what_the_first_dropped():
    model, images = (
        smallvit.ViT(patch_size=16, dim=16, depth=2, heads=1, mlp_dim=16, dropout=0.5, **SIZE),
        jax.random.normal(jax.random.key(0), (2, 32, 32, 3)),
    )
    variables = jax.jit(model.init)(jax.random.key(1), images)
    with_gradient, loss = gradient(model, variables, images, True)
    params = variables["params"]
    _, grads = jax.jit(with_gradient)(params)
    norm = optax.tree.norm(grads)
    loss = jax.jit(loss)
    ahead, behind = (loss(optax.tree.add_scale(params, size / norm, grads)) for size in (1e-3, -1e-3))
    np.testing.assert_allclose((ahead - behind) / 2e-3, norm, rtol=0.02)


def test_memory_is_less_than_half():
    model, images = (
        smallvit.SLViT(patch_size=4, dim=48, depth=12, heads=4, mlp_dim=192, dim_head=12, **SIZE),
        jax.random.normal(jax.random.key(0), (32, 32, 32, 3)),
    )
    variables = jax.eval_shape(model.init, jax.random.key(1), images)
    kept, again = (
        jax.jit(gradient(model, variables, images, on)[0])
        .lower(variables["params"])
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for on in (False, True)
    )
    assert again < kept / 2
