"""ScalableViT, by hand: what each attention attends to, and the order of the parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from smallvit import ScalableViT
from smallvit.layers import Attend, Conv, Dense
from smallvit.models.scalable_vit import IWSA, SSA
from tests.test_window import reach

KEY = jax.random.key(0)
PARTS = dict(dropout=0.0, dense=Dense, conv=Conv, attend=Attend)


def layer_norm(x, epsilon):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + epsilon)


@pytest.mark.parametrize("grid, reduction", [((4, 6), 2), ((3, 3), 2), ((3, 2), 1)])
def test_ssa_reads_everywhere(grid, reduction):
    assert reach(SSA(heads=2, dim_key=3, reduction=reduction, **PARTS), grid).all()


def test_ssa_is_its_definition():
    x = jax.random.normal(KEY, (2, 4, 6, 8))
    module = SSA(heads=2, dim_key=5, reduction=2, **PARTS)
    variables = jax.jit(module.init)(KEY, x)
    p = variables["params"]
    assert {name: p[name]["kernel"].shape for name in ("reduce", "widen", "q", "k", "v", "out")} == {
        "reduce": (2, 2, 1, 8),
        "widen": (8, 10),
        "q": (8, 10),
        "k": (10, 10),
        "v": (10, 8),
        "out": (8, 8),
    }
    squares = x.reshape(2, 2, 2, 3, 2, 8)
    read = jnp.einsum("bhpwqd,pqd->bhwd", squares, p["reduce"]["kernel"][:, :, 0]).reshape(2, 6, 8)
    read = jax.nn.gelu(layer_norm(read @ p["widen"]["kernel"], 1e-5), approximate=False)
    q = (x.reshape(2, 24, 8) @ p["q"]["kernel"]).reshape(2, 24, 2, 5)
    k = (read @ p["k"]["kernel"]).reshape(2, 6, 2, 5)
    v = (read @ p["v"]["kernel"]).reshape(2, 6, 2, 4)
    weights = jax.nn.softmax(jnp.einsum("bnhd,bmhd->bhnm", q, k) * 5**-0.5)
    want = jnp.einsum("bhnm,bmhd->bnhd", weights, v).reshape(2, 24, 8) @ p["out"]["kernel"]
    np.testing.assert_allclose(module.apply(variables, x), want.reshape(x.shape), atol=1e-5)


@pytest.mark.parametrize("grid, window", [((4, 6), 2), ((5, 4), 3), ((3, 4), None), ((2, 3), 7)])
def test_iwsa_reads_its_window_and_its_neighbours(grid, window):
    got = reach(IWSA(heads=2, window=window, **PARTS), grid)
    rows, columns = np.mgrid[: grid[0], : grid[1]].reshape(2, -1)
    side = window or 99
    own = (rows[:, None] // side == rows // side) & (columns[:, None] // side == columns // side)
    near = (abs(rows[:, None] - rows) <= 1) & (abs(columns[:, None] - columns) <= 1)
    np.testing.assert_array_equal(got, own | near)


def test_the_order_is_ssa_mlp_peg_iwsa_mlp():
    image = jax.random.normal(KEY, (1, 16, 16, 3))
    model = ScalableViT(
        num_classes=2, dim=8, heads=(2,), depth=(2,), ssa_dim_key=4, reduction_factor=(2,), window_size=2
    )
    variables = jax.jit(model.init)(KEY, image)
    assert "reduce" in variables["params"]["stage_0"]["block_0"]["attention"]
    assert "interact" in variables["params"]["stage_0"]["block_1"]["attention"]
    _, state = jax.jit(partial(model.apply, capture_intermediates=True, mutable="intermediates"))(variables, image)
    out = {
        path.removesuffix("/__call__"): value[0]
        for path, value in flatten_dict(state["intermediates"], sep="/").items()
    }
    x = out["embed_0_norm"]
    for i in (0, 1):
        block = f"stage_0/block_{i}"
        np.testing.assert_allclose(out[f"{block}/attention_norm"], layer_norm(x, 1e-6), atol=1e-5)
        x = x + out[f"{block}/attention"]
        np.testing.assert_allclose(out[f"{block}/mlp_norm"], layer_norm(x, 1e-6), atol=1e-5)
        x = x + out[f"{block}/mlp"]
        if i == 0:
            x = x + out["stage_0/peg/conv"]
    np.testing.assert_allclose(out["norm"], layer_norm(x, 1e-6).reshape(1, 16, 8), atol=1e-5)


def test_the_hidden_layer_of_the_head():
    image = jax.random.normal(KEY, (2, 16, 16, 3))
    model = ScalableViT(num_classes=3, dim=8, heads=(2,), depth=(1,), reduction_factor=(2,), head_hidden=12)
    variables = jax.jit(model.init)(KEY, image)
    p = variables["params"]
    pooled = jax.jit(model.clone(num_classes=0).apply)(variables, image)
    assert pooled.shape == (2, 8)
    x = jax.nn.gelu(layer_norm(pooled @ p["head_in"]["kernel"], 1e-6), approximate=False)
    np.testing.assert_allclose(jax.jit(model.apply)(variables, image), x @ p["head"]["kernel"], atol=1e-5)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(heads=(2, 2)), r"heads=\(2, 2\) must have one number for each of the 1 stages"),
        (dict(window_size=(2, 2)), r"window_size=\(2, 2\) must be one number"),
        (dict(heads=(3,)), r"dim=8 is not divisible by heads=3"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_wrong_sizes_are_named(fields, message):
    model = ScalableViT(**{**dict(num_classes=2, dim=8, heads=(2,), depth=(2,), reduction_factor=(2,)), **fields})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, KEY, jnp.zeros((1, 16, 16, 3)))
