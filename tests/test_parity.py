"""The models against references that nobody here wrote; tests/make_fixtures.py made the files."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from smallvit import CvT, LeViT, NesT, RegionViT, SimpleViT, ViT
from smallvit.convert import Table, convert, timm, transformers, vit_pytorch
from smallvit.layers import Classifier

SIZES = dict(image_size=16, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24)
LUCID = {**SIZES, "qkv_bias": False, "norm_eps": 1e-5}

PARITY: dict[str, tuple[Classifier, Table]] = {
    "timm_vit": (ViT(**SIZES), timm.VIT),
    "timm_vit_mean": (ViT(**SIZES, pool="mean"), timm.VIT),
    "timm_vit_wide": (ViT(**{**SIZES, "image_size": (8, 24)}), timm.VIT),
    "timm_vit_parallel": (ViT(**SIZES, num_parallel_branches=2, layer_scale=1.0), timm.VIT),
    "vit_pytorch_small_dataset": (
        ViT(**LUCID, spt="cardinal", spt_shift=1, lsa=True),
        vit_pytorch.VIT_FOR_SMALL_DATASET,
    ),
    "vit_pytorch_patch_merger": (
        ViT(**LUCID, pool="mean", patch_norm=True, patch_merge_layer=1, patch_merge_num_tokens=3),
        vit_pytorch.VIT_WITH_PATCH_MERGER,
    ),
    "vit_pytorch_simple_vit": (SimpleViT(**LUCID, patch_norm=True), vit_pytorch.SIMPLE_VIT),
    "timm_nest": (
        NesT(image_size=16, patch_size=2, num_classes=5, dim=8, heads=2, num_hierarchies=2, block_repeats=(1, 2)),
        timm.nest(dim_head=4),
    ),
    "timm_levit": (
        LeViT(
            image_size=(32, 48),
            num_classes=5,
            dim=(8, 16),
            depth=1,
            heads=(1, 2),
            stages=2,
            dim_key=4,
            dim_value=8,
            num_distill_classes="same",
        ),
        timm.LEVIT,
    ),
    "transformers_cvt": (
        CvT(
            num_classes=5,
            s1_emb_dim=4,
            s2_emb_dim=4,
            s3_emb_dim=6,
            s2_heads=2,
            s3_heads=3,
            s3_depth=3,
            s1_mlp_mult=2,
            s2_mlp_mult=2,
            s3_mlp_mult=2,
        ),
        transformers.CVT,
    ),
    "vit_pytorch_region_vit": (
        RegionViT(
            num_classes=5,
            dim=4,
            depth=(1, 2, 1, 1),
            window_size=2,
            heads=4,
            dim_head=32,
            plain_downsample=True,
            qkv_bias=False,
            norm_eps=1e-5,
        ),
        vit_pytorch.REGION_VIT,
    ),
}


def load(name: str) -> tuple[dict[str, np.ndarray], Any, Any]:
    with np.load(Path(__file__).parent / "fixtures" / f"{name}.npz") as file:
        state = {key.removeprefix("state/"): file[key] for key in file if key.startswith("state/")}
        return state, file["image"], file["output"]


@pytest.mark.parametrize("name", PARITY)
def test_same_output_as_the_reference(name: str):
    model, table = PARITY[name]
    state, image, output = load(name)
    wanted = flatten_dict(jax.eval_shape(model.init, jax.random.key(0), image), sep="/")
    shapes = {path: leaf.shape for path, leaf in wanted.items()}
    arrays, left_over = convert(state, table, shapes)
    assert left_over == []
    assert {path: array.shape for path, array in arrays.items()} == shapes
    np.testing.assert_allclose(jax.jit(model.apply)(unflatten_dict(arrays, sep="/"), image), output, atol=1e-5)
