"""The small-data presets are initialised as in the code of their paper: root mean squares of the values."""

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import create_model
from smallvit.common.paths import by_path

pytestmark = pytest.mark.usefixtures("as_a_user")

SHALLOW = {
    "vit_small_data": dict(depth=1),
    "t2t_small_data": dict(depth=1),
    "cait_small_data": dict(depth=1, cls_depth=1, heads=32, dim_head=4),
    "pit_small_data": dict(depth=(1, 1, 1)),
    "swin_small_data": dict(depth=(1, 1, 1)),
}


def started(name: str) -> dict[str, jax.Array]:
    model = create_model(name, num_classes=100, image_size=32, **SHALLOW[name.removeprefix("sl_")])
    return by_path(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"])


def xavier(inputs: int, outputs: int) -> float:
    return sqrt(2 / (inputs + outputs))


def mean_square(values: jax.Array) -> float:
    return float(jnp.sqrt((values**2).mean()))


EXPECTED: dict[str, dict[str, float]] = {
    "vit_small_data": {"head/kernel": xavier(192, 100), "block_0/mlp/in/kernel": xavier(192, 384), "cls/token": 1.0},
    "t2t_small_data": {
        "head/kernel": 0.02,
        "dense/kernel": 0.02,
        "block_0/attention/qkv/kernel": 0.02,
        "token_1/mlp/in/kernel": 0.02,
    },
    "cait_small_data": {
        "head/kernel": xavier(192, 100),
        "block_0/attention/attend/pre/kernel": 1.0,
        "class_block_0/attention/attend/post/kernel": 1.0,
        "positions/grid": 1.0,
    },
    "pit_small_data": {
        "head/kernel": xavier(384, 100),
        "pool_1/conv/kernel": xavier(9, 9 * 192),
        "pool_2/conv/kernel": xavier(9, 9 * 384),
        "pool_1/dense/kernel": xavier(192, 192),
    },
    "swin_small_data": {
        "head/kernel": sqrt(1 / 384 / 3),
        "head/bias": sqrt(1 / 384 / 3),
        "patches/dense/kernel": sqrt(1 / 12 / 3),
        "stage_1/block_0/mlp/in/kernel": sqrt(1 / 192 / 3),
        "stage_1/block_0/mlp/in/bias": sqrt(1 / 192 / 3),
        "merge_1/dense/kernel": sqrt(1 / 384 / 3),
        "positions/grid": 0.02,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_root_mean_squares(name: str):
    found = started(name)
    for path, wanted in EXPECTED[name].items():
        error = 4 / sqrt(2 * found[path].size)
        assert mean_square(found[path]) == pytest.approx(wanted, rel=error), path


def test_swin_starts_uniform_with_spt_too():
    for path, values in started("sl_swin_small_data").items():
        if path.endswith("/kernel"):
            bound = values.shape[0] ** -0.5
            assert 0.95 * bound < float(jnp.abs(values).max()) <= bound, path
        elif path.endswith("/bias") and "norm" not in path:
            assert float(jnp.abs(values).max()) > 0, path


def test_other_presets_have_a_small_head():
    model = create_model("vit_tiny_data", num_classes=100)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    assert mean_square(params["head"]["kernel"]) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("drops", [False, True])
def test_cait_drops_paths_of_its_class_layers(drops: bool):
    model = create_model(
        "cait_small_data", num_classes=3, depth=0, cls_depth=1, dim=16, drop_path=0.5, cls_drop_path=drops
    )
    images = jax.random.normal(jax.random.key(0), (4, 32, 32, 3))
    variables = jax.jit(model.init)(jax.random.key(0), images)
    train = jax.jit(lambda key: model.apply(variables, images, train=True, rngs={"dropout": key}))
    outputs = np.stack([train(jax.random.key(i)) for i in range(4)])
    assert (outputs != outputs[:1]).any() == drops
