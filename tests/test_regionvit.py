"""RegionViT by hand: its sizes, its windows, its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import RegionViT
from smallvit.models.regionvit import _with_region
from tests.test_counts import count


def test_count_of_the_snippet_as_vit_pytorch_has_it():
    model = RegionViT(num_classes=1000, heads=4, dim_head=32, plain_downsample=True, qkv_bias=False)
    norms = sum(2 * dim * depth for dim, depth in zip((64, 128, 256, 512), (2, 2, 8, 2), strict=True))
    tables = sum(4 * 13**2 * (depth - 1) for depth in (2, 2, 8, 2))
    # vit-pytorch's figure, and what the authors have of their own in every block: a norm and a table of biases.
    assert count(model, 224) == 12_749_176 + norms + tables


def test_a_region_reads_only_what_is_real():
    # A window of three places, the last of which is filling.
    allowed = np.asarray([[[[1, 1, 0], [1, 1, 0], [0, 0, 0]]]], dtype=bool)
    expected = [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]]
    np.testing.assert_array_equal(_with_region(allowed)[0, 0], np.asarray(expected, dtype=bool))


@pytest.mark.parametrize(
    "fields, image, says",
    [
        ({"image_size": 30}, 30, "not divisible by patch size 28"),
        ({"local_patch_size": 3}, 42, "must be even"),
        ({"local_patch_size": 2, "tokenize_local_3_conv": True}, 28, "4 with tokenize_local_3_conv"),
        ({"heads": (1, 2)}, 28, "4 numbers, one per stage"),
    ],
)
def test_mistakes_are_named(fields: dict, image: int, says: str):
    model = RegionViT(num_classes=3, dim=(8, 8, 8, 8), depth=1, **fields)
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, image, image, 3), jnp.float32))
