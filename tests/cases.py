"""The table of the contract suite: each architecture, and each of its ways, small enough for seconds.

A newcomer adds a row. `COUNTS` has the parameters of every registered name at its own image size and 1000 classes.
"""

from dataclasses import dataclass, field
from typing import Any

import smallvit
from smallvit.layers import Classifier


@dataclass(frozen=True)
class Case:
    cls: type[Classifier]
    fields: dict[str, Any] = field(hash=False)
    size: tuple[int, int] = (16, 16)
    channels: int = 3
    random: bool = True  # something is random in training, given a rate

    def make(self, **changes: Any) -> Classifier:
        return self.cls(**{"num_classes": 7, **self.fields, **changes})


_VIT = dict(image_size=16, patch_size=4, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24, token_std=1.0)
_RANDOM = dict(dropout=0.2, emb_dropout=0.2, drop_path=0.3)
_SWIN = dict(image_size=16, patch_size=2, dim=8, depth=(2, 1), heads=(2, 4), window_size=4, mlp_ratio=2.0)
_TWINS = dict(
    **dict(s1_emb_dim=4, s1_patch_size=2, s1_local_patch_size=3, s1_global_k=4),
    **dict(s2_emb_dim=8, s2_patch_size=2, s2_local_patch_size=2, s2_global_k=2),
    **dict(s3_emb_dim=8, s3_patch_size=2, s3_local_patch_size=2, s3_global_k=1, s3_depth=1),
    **dict(s4_emb_dim=8, s4_patch_size=1, s4_local_patch_size=2, s4_global_k=1, s4_depth=1),
    **dict(dim_head=4, mlp_ratio=2.0),
)
_CROSSFORMER = dict(
    dim=(8, 16), depth=(2, 2), global_window_size=(2, 1), local_window_size=(3, 2), embed_kernels=(2, 4), dim_head=4
)
_SCALABLE = dict(
    dim=8, heads=(2, 4), depth=(2, 2), ssa_dim_key=(5, 4), reduction_factor=(2, 1), window_size=(3, None), mlp_ratio=2.0
)

CASES = {
    "vit": Case(smallvit.ViT, {**_VIT, **_RANDOM}),
    "vit_mean": Case(smallvit.ViT, {**_VIT, "pool": "mean", "dropout": 0.5, "qkv_bias": False}),
    "vit_parallel": Case(smallvit.ViT, {**_VIT, "num_parallel_branches": 2, "layer_scale": 0.1, "drop_path": 0.3}),
    "vit_merger": Case(smallvit.ViT, {**_VIT, "patch_merge_layer": 1, "patch_merge_num_tokens": 3, "emb_dropout": 0.3}),
    "vit_merger_mean": Case(smallvit.ViT, {**_VIT, "patch_merge_layer": 1, "pool": "mean", "drop_path": 0.3}),
    "vit_wide": Case(
        smallvit.ViT, {**_VIT, **_RANDOM, "image_size": (9, 20), "patch_size": (3, 5), "patch_norm": True}, (9, 20), 1
    ),
    "sl_vit": Case(smallvit.SLViT, {**_VIT, **_RANDOM}),
    "simple_vit": Case(
        smallvit.SimpleViT,
        dict(image_size=16, patch_size=4, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24, drop_path=0.5),
    ),
    "swin": Case(smallvit.Swin, {**_SWIN, "dropout": 0.2, "emb_dropout": 0.2, "drop_path": 0.3}),
    # Windows that do not fit, an odd grid to merge, absolute positions.
    "swin_wide": Case(
        smallvit.Swin,
        {**_SWIN, "image_size": (12, 20), "patch_size": (4, 2), "positions": True, "window_size": 4, "drop_path": 0.5},
        (12, 20),
        1,
    ),
    "twins_svt": Case(smallvit.TwinsSVT, {**_TWINS, "dropout": 0.1, "drop_path": 0.3}),
    "crossformer": Case(smallvit.CrossFormer, {**_CROSSFORMER, "dropout": 0.1, "drop_path": 0.3}),
    "scalable_vit": Case(smallvit.ScalableViT, {**_SCALABLE, "dropout": 0.1, "drop_path": 0.3}, (32, 32)),
}

COUNTS = {
    # Added up by hand from the authors' layers, with their head of two; their README says 32.4 million.
    "scalable_vit_small": 32_000_472,
    # Added up by hand from the authors' layers, which they give as 27.8 and 30.7 million.
    "crossformer_tiny": 27_776_794,
    "crossformer_small": 30_657_394,
    # timm's figures.
    "twins_svt_small": 24_060_776,
    "twins_svt_base": 56_070_952,
    "twins_svt_large": 99_271_400,
    # timm's figures.
    "vit_tiny_patch16": 5_717_416,
    "vit_small_patch16": 22_050_664,
    "vit_base_patch16": 86_567_656,
    "vit_base_patch32": 88_224_232,
    "vit_small_patch16_18x2": 64_665_448,
    # vit_small_patch16 without its class token (384) and its positions (197 x 384).
    "simple_vit_small_patch16": 22_050_664 - 384 - 197 * 384,
    # timm's figures.
    "swin_tiny": 28_288_354,
    "swin_small": 49_606_258,
    "swin_base": 87_768_224,
    # The paper's 7,073,188 for 10 classes, and 990 more rows of the head.
    "swin_small_data": 7_073_188 + 990 * 385,
    # The paper's 2,692,426 for 10 classes, and 990 more rows of the head.
    "vit_small_data": 2_692_426 + 990 * 193,
}

# The paper's model at (image size, classes): plain, with SPT and LSA.
SMALL_DATA_COUNTS = {
    ("vit_small_data", 32, 10): (2_692_426, 2_729_878),
    ("vit_small_data", 32, 100): (2_709_796, 2_747_248),
    ("vit_small_data", 64, 200): (2_756_744, 2_906_228),
    ("swin_small_data", 32, 10): (7_073_188, 8_562_166),
    ("swin_small_data", 32, 100): (7_107_838, 8_596_816),
    ("swin_small_data", 64, 200): (7_149_794, 8_652_956),
}
