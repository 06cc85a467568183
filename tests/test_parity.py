"""The models compared with independent references; tests/make_fixtures.py made the files."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from smallvit import (
    CaiT,
    CrossViT,
    CvT,
    DeepViT,
    LeViT,
    NesT,
    PiT,
    RegionViT,
    SimpleViT,
    Swin,
    TwinsSVT,
    ViT,
    load_weights,
)
from smallvit.layers import Classifier

SIZES = dict(image_size=16, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24)
LUCID = {**SIZES, "qkv_bias": False, "norm_eps": 1e-5}
SWIN = dict(image_size=16, patch_size=2, num_classes=5, dim=8, depth=(2, 2), heads=(2, 4), window_size=4, mlp_ratio=2.0)
CROSSVIT = dict(
    **dict(image_size=16, lg_image_size=12, num_classes=5, depth=2, cross_attn_heads=2),
    **dict(sm_dim=8, sm_patch_size=4, sm_enc_depth=1, sm_enc_heads=2, sm_enc_mlp_dim=12),
    **dict(lg_dim=12, lg_patch_size=6, lg_enc_depth=1, lg_enc_heads=2, lg_enc_mlp_dim=18),
)

PARITY: dict[str, Classifier] = {
    "timm_vit": ViT(**SIZES),
    "timm_vit_mean": ViT(**SIZES, pool="mean"),
    "timm_vit_wide": ViT(**{**SIZES, "image_size": (8, 24)}),
    "timm_vit_parallel": ViT(**SIZES, num_parallel_branches=2, layer_scale=1.0),
    "vit_pytorch_vit": ViT(**LUCID, patch_norm=True),
    "vit_pytorch_vit_mean": ViT(**LUCID, patch_norm=True, pool="mean"),
    "vit_pytorch_small_dataset": ViT(**LUCID, spt="cardinal", spt_shift=1, lsa=True),
    "vit_pytorch_patch_merger": ViT(
        **LUCID, pool="mean", patch_norm=True, patch_merge_layer=1, patch_merge_num_tokens=3
    ),
    "vit_pytorch_simple_vit": SimpleViT(**LUCID, patch_norm=True),
    "timm_swin": Swin(**SWIN),
    "timm_swin_wide": Swin(**{**SWIN, "image_size": (8, 24), "window_size": (4, 6)}),
    "timm_cait": CaiT(**SIZES),
    "timm_nest": NesT(
        image_size=16, patch_size=2, num_classes=5, dim=8, heads=2, num_hierarchies=2, block_repeats=(1, 2)
    ),
    "timm_levit": LeViT(
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
    "timm_twins_svt": TwinsSVT(
        num_classes=5,
        s1_emb_dim=4,
        s2_emb_dim=4,
        s3_emb_dim=8,
        s4_emb_dim=8,
        s1_patch_size=1,
        s1_local_patch_size=4,
        s2_local_patch_size=2,
        s3_local_patch_size=4,
        s4_local_patch_size=2,
        s1_global_k=8,
        s2_global_k=4,
        s3_global_k=2,
        s4_global_k=1,
        s3_depth=1,
        s4_depth=1,
        dim_head=4,
        mlp_ratio=2.0,
    ),
    "timm_pit": PiT(image_size=16, patch_size=4, num_classes=5, dim=8, depth=(1, 2), heads=(1, 2), mlp_dim=(16, 32)),
    "vit_pytorch_deepvit": DeepViT(**LUCID, patch_norm=True),
    "timm_crossvit": CrossViT(**CROSSVIT),
    "transformers_cvt": CvT(
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
    "vit_pytorch_region_vit": RegionViT(
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
}


def load(name: str) -> tuple[dict[str, np.ndarray], Any, Any]:
    with np.load(Path(__file__).parent / "fixtures" / f"{name}.npz") as file:
        state = {key.removeprefix("state/"): file[key] for key in file if key.startswith("state/")}
        return state, file["image"], file["output"]


@pytest.mark.parametrize("name", PARITY)
def test_same_output_as_the_reference(name: str, tmp_path: Path):
    model = PARITY[name]
    state, image, output = load(name)
    save_file(state, tmp_path / "model.safetensors")
    variables = load_weights(model, tmp_path / "model.safetensors")
    np.testing.assert_allclose(jax.jit(model.apply)(variables, image), output, atol=1e-5)
