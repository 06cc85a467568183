"""Models by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import SimpleViT, ViT, create_model, list_models
from smallvit.registry import register

pytestmark = pytest.mark.usefixtures("as_a_user")


def test_list_models_matches_patterns():
    assert "vit_tiny_patch16" in list_models("vit*")
    assert "sl_vit_tiny_patch16" in list_models("sl_*")
    assert not any(name.startswith("sl_") for name in list_models("vit*"))
    assert list_models() == sorted(list_models())
    assert list_models("no_such*") == []


def test_the_prefix_switches_the_add_ons_on():
    plain, sl = create_model("vit_tiny_patch16"), create_model("sl_vit_tiny_patch16")
    assert (plain.spt, plain.lsa, sl.spt, sl.lsa) == (False, False, True, True)
    assert sl.clone(spt=False, lsa=False) == plain
    assert create_model("sl_vit_tiny_patch16", lsa="mask").lsa == "mask"


@pytest.mark.parametrize("size, patch", [(32, (4, 4)), (64, (8, 8)), ((32, 64), (4, 8))])
def test_the_small_data_patch_is_an_eighth_of_the_image(size, patch):
    model = create_model("vit_small_data", num_classes=10, image_size=size)
    assert isinstance(model, ViT)
    assert (model.image_size, model.patch_size, model.num_classes) == (size, patch, 10)


def test_fields_replace_the_presets():
    model = create_model("simple_vit_small_patch16", depth=2, dim=64)
    assert isinstance(model, SimpleViT)
    assert (model.depth, model.dim, model.heads) == (2, 64, 6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32, "bfloat16"])
def test_only_the_presets_own_functions_are_called(dtype):
    for name in ("vit_small_data", "vit_tiny_patch16", "hybrid_vit_small"):
        model = create_model(name, num_classes=2, image_size=32, dtype=dtype)
        assert model.dtype is dtype
        output = jax.eval_shape(model.init_with_output, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))[0]
        assert output.dtype == jnp.dtype(dtype)
    assert create_model("vit_small_data", patch_size=(16, 4)).patch_size == (16, 4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: create_model("vit_tiny_patch61"), "did you mean 'vit_tiny_patch16'"),
        (lambda: create_model("resnet50"), "unknown model 'resnet50'"),
        (lambda: create_model("vit_tiny_patch16", dept=3), "no field 'dept', did you mean 'depth'"),
        (lambda: create_model("vit_small_data", image_size=37), "37 cannot be cut into about 8 patches"),
        (lambda: register(ViT, vit_tiny_patch16={}), "'vit_tiny_patch16' is taken"),
        (lambda: register(ViT, sl_vit={}), "'sl_vit'"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
