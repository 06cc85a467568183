"""Exact parameter counts, from shapes alone."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from smallvit import SimpleViT, ViT, create_model
from smallvit.catalogue import catalogue
from smallvit.ops import pair
from smallvit.registry import PRESETS
from tests.cases import COUNTS, SMALL_DATA_COUNTS

# Large models, traced for their shapes alone: the checks of types would double the time.
pytestmark = pytest.mark.usefixtures("as_a_user")


def count(model: nn.Module, size: int | tuple[int, int]) -> int:
    image = jax.ShapeDtypeStruct((1, *pair(size), 3), jnp.float32)
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0), image)["params"]))


def test_every_registered_name_has_a_count():
    assert COUNTS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", COUNTS)
def test_count(name: str):
    assert [entry.parameters for entry in catalogue(name)] == [COUNTS[name]]  # tests/test_count.py recomputes these


@pytest.mark.parametrize("name, size, classes", SMALL_DATA_COUNTS)
def test_small_data_count(name: str, size: int, classes: int):
    plain, sl = SMALL_DATA_COUNTS[name, size, classes]
    assert count(create_model(name, num_classes=classes, image_size=size), size) == plain
    assert count(create_model(f"sl_{name}", num_classes=classes, image_size=size), size) == sl


def test_the_halves_of_the_small_data_vit():
    sizes = dict(num_classes=10, image_size=32)
    assert count(create_model("vit_small_data", spt=True, **sizes), 32) == 2_729_770
    assert count(create_model("vit_small_data", lsa=True, **sizes), 32) == 2_692_426 + 9 * 12
    assert count(create_model("vit_small_data", lsa="mask", **sizes), 32) == 2_692_426


def test_the_halves_of_the_small_data_swin():
    sizes = dict(num_classes=10, image_size=32)
    assert count(create_model("swin_small_data", spt=True, **sizes), 32) == 8_562_076
    assert count(create_model("swin_small_data", lsa=True, **sizes), 32) == 7_073_188 + 90


def test_snippet_sizes():
    sizes = dict(image_size=256, patch_size=32, num_classes=1000, dim=1024, depth=6, heads=16, mlp_dim=2048)
    assert count(ViT(**sizes), 256) == 54_640_616  # timm
    assert count(ViT(**sizes, qkv_bias=False), 256) == 54_622_184  # timm
    # vit-pytorch's 54,556,648, and a bias in each output projection, which it leaves out.
    assert count(SimpleViT(**sizes, qkv_bias=False, patch_norm=True), 256) == 54_556_648 + 6 * 1024
