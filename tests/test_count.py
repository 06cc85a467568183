"""Multiply-adds, compared with the paper's and by hand."""

import flax.linen as nn
import jax.numpy as jnp
import pytest

from smallvit import create_model, list_models
from smallvit.catalogue import catalogue
from smallvit.count import describe, multiply_adds
from smallvit.layers import Conv, Dense
from smallvit.registry import PRESETS

list_models()  # fills PRESETS
FIRST = {preset.cls: name for name, preset in reversed(PRESETS.items())}.values()  # a preset of each class

# Of the small-data paper (https://arxiv.org/abs/2112.13492), in millions, at 64 pixels: plain, with SPT and LSA.
PAPER = {
    "vit_small_data": (189.8, 199.2),
    "t2t_small_data": (643.0, 671.4),
    "cait_small_data": (613.8, 623.3),
    "pit_small_data": (279.2, 322.9),
    "swin_small_data": (242.3, 284.9),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_column(name: str):
    for prefix, millions in zip(("", "sl_"), PAPER[name], strict=True):
        count = multiply_adds(create_model(prefix + name, num_classes=200, image_size=64), 64)
        assert count / 1e6 == pytest.approx(millions, rel=0.03)


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, image: jnp.ndarray) -> jnp.ndarray:
        x = Conv(8, 3, 2, 1, name="conv")(image)
        x = Conv(8, 3, 1, 1, depthwise=True, name="depthwise")(x)
        return Dense(5, name="dense")(x)


def test_by_hand():
    assert multiply_adds(TwoLayers(), (4, 6)) == 2 * 3 * (8 * 9 * 3 + 8 * 9 + 8 * 5)


@pytest.mark.usefixtures("as_a_user")  # large models: the checks of types would double the time
@pytest.mark.parametrize("name", [*PRESETS, *(f"sl_{name}" for name in FIRST)])
def test_the_catalogue_is_up_to_date(name: str):
    """If it fails: python -m smallvit.count"""
    assert catalogue(name) == [describe(name)]


def test_the_catalogue_lists_every_model():
    """If it fails: python -m smallvit.count"""
    assert [entry.name for entry in catalogue()] == list_models()
