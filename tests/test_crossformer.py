"""CrossFormer, by hand: which tokens attend to which, the parts of the bias, the field of a token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import CrossFormer, create_model
from smallvit.layers import Attention
from smallvit.models.crossformer import CrossScaleEmbed, DynamicBias, LongDistance, groups_of_seven
from tests.test_window import reach

KEY = jax.random.key(0)


@pytest.mark.parametrize("grid, interval", [((6, 4), 2), ((5, 7), 3)])
def test_long_distance_groups_are_the_tokens_that_stand_an_interval_apart(grid, interval):
    got = reach(LongDistance(partial(Attention, heads=1), interval), grid)
    rows, columns = np.mgrid[: grid[0], : grid[1]].reshape(2, -1)
    group = rows % interval * interval + columns % interval
    np.testing.assert_array_equal(got, group[:, None] == group[None])


def test_interval_1_is_attention_among_all():
    assert reach(LongDistance(partial(Attention, heads=1), 1), (3, 3)).all()


def test_the_bias_is_a_network_of_the_offset():
    bias = DynamicBias(2, (2, 3), 4, jnp.float32)
    variables = bias.init(KEY)
    params = jax.tree.map(lambda x: x + 0.1, variables["params"])
    got = bias.apply({"params": params})
    assert got.shape == (2, 6, 6)

    def by_hand(down: int, across: int) -> jax.Array:
        x = jnp.array([down, across], jnp.float32) @ params["in"]["kernel"] + params["in"]["bias"]
        for i in range(3):
            x = (x - x.mean()) / jnp.sqrt(x.var() + 1e-5) * params[f"norm_{i}"]["scale"] + params[f"norm_{i}"]["bias"]
            x = jnp.maximum(x, 0) @ params[f"dense_{i}"]["kernel"] + params[f"dense_{i}"]["bias"]
        return x

    for n in range(6):
        for m in range(6):
            want = by_hand(n // 3 - m // 3, n % 3 - m % 3)
            np.testing.assert_allclose(got[:, n, m], want, atol=1e-5)


def test_each_scale_sees_its_own_window_around_the_same_centre():
    embed = CrossScaleEmbed(16, (4, 8, 16, 32), jnp.float32)
    image = jax.random.normal(KEY, (1, 64, 64, 1))
    variables = jax.jit(embed.init)(KEY, image)
    assert embed.apply(variables, image).shape == (1, 16, 16, 16)
    channel = 0
    for kernel, channels in ((4, 8), (8, 4), (16, 2), (32, 2)):
        seen = jax.grad(lambda x, c=channel: embed.apply(variables, x)[0, 8, 8, c])(image)[0, ..., 0]
        rows = np.flatnonzero(np.abs(seen).max(1))
        assert (rows.min(), rows.max()) == (34 - kernel // 2, 33 + kernel // 2)  # token 8 is centred on 34
        assert variables["params"][f"scale_{kernel}"]["bias"].shape == (channels,)
        channel += channels


def test_groups_at_other_image_sizes():
    assert groups_of_seven(224) == (8, 4, 2, 1)
    assert groups_of_seven(32) == (1, 1, 1, 1)
    assert create_model("crossformer_tiny").global_window_size == (8, 4, 2, 1)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(global_window_size=(8, 1)), r"grid of 8 x 8, global_window_size 8 leaves tokens alone"),
        (dict(depth=(1, 1, 1)), r"depth=\(1, 1, 1\) must have one number for each of the 2 stages"),
        (dict(dim=(32, 40)), r"dim 40 must be a multiple of dim_head=32"),
        (dict(embed_kernels=(4, 7)), r"kernels \(4, 7\) differ by even numbers"),
        (dict(embed_kernels=(5, 7)), r"not divisible by patch size 5 x 5"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_wrong_sizes_are_named(fields, message):
    model = CrossFormer(**{**dict(num_classes=2, dim=(32, 64), depth=(2, 2), global_window_size=(2, 1)), **fields})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, KEY, jnp.zeros((1, 32, 32, 3)))
