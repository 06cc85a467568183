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
    "cait": Case(smallvit.CaiT, {**_VIT, **_RANDOM, "cls_depth": 1, "layer_dropout": 0.3}),
    "cait_mix_class": Case(
        smallvit.CaiT,
        {
            **_VIT,
            **dict(qkv_bias=False, mix_class=True, mix_bias=False, layer_scale=1.0, layer_dropout=0.5),
            "image_size": (8, 16),
            "dim_head": None,
        },
        (8, 16),
    ),
    "pit": Case(
        smallvit.PiT,  # a grid of 7 x 7 becomes 4 x 4
        {**_RANDOM, **dict(image_size=16, patch_size=4, dim=8, depth=(1, 1), heads=(1, 2), mlp_dim=16, token_std=1.0)},
    ),
    "pit_small_data": Case(
        smallvit.PiT,
        dict(
            **dict(image_size=(8, 16), patch_size=2, stride=2, dim=8, depth=(1, 1), heads=2, mlp_dim=(12, 16)),
            **dict(class_position=True, pool_dense=True, qkv_bias=False, dropout=0.3),
        ),
        (8, 16),
    ),
    "deepvit": Case(smallvit.DeepViT, {**_VIT, **_RANDOM}),
    "crossvit": Case(
        smallvit.CrossViT,
        {
            **_RANDOM,
            **dict(image_size=16, lg_image_size=12, depth=1, cross_attn_heads=2, token_std=1.0),
            **dict(sm_dim=8, sm_patch_size=4, sm_enc_depth=1, sm_enc_heads=2, sm_enc_mlp_dim=12),
            **dict(lg_dim=12, lg_patch_size=6, lg_enc_depth=1, lg_enc_heads=3, lg_enc_mlp_dim=16),
        },
    ),
    "t2t_vit": Case(
        smallvit.T2TViT,
        {**_RANDOM, **dict(image_size=(8, 12), t2t_layers=((3, 2), (3, 2)), dim=16, depth=2, heads=2, mlp_dim=16)},
        (8, 12),
    ),
}

COUNTS = {
    # timm's figures.
    "vit_tiny_patch16": 5_717_416,
    "vit_small_patch16": 22_050_664,
    "vit_base_patch16": 86_567_656,
    "vit_base_patch32": 88_224_232,
    "vit_small_patch16_18x2": 64_665_448,
    # vit_small_patch16 without its class token (384) and its positions (197 x 384).
    "simple_vit_small_patch16": 22_050_664 - 384 - 197 * 384,
    # The paper's 2,692,426 for 10 classes, and 990 more rows of the head.
    "vit_small_data": 2_692_426 + 990 * 193,
    # timm's figures, and the paper's 9,020,618 for 10 classes.
    "cait_xxs24": 11_956_264,
    "cait_s24": 46_916_200,
    "cait_small_data": 9_020_618 + 990 * 193,
    # timm's figures, and the paper's 6,972,586 for 10 classes.
    "pit_ti": 4_847_272,
    "pit_s": 23_461_912,
    "pit_b": 73_764_840,
    "pit_small_data": 6_972_586 + 990 * 385,
    # timm's ViT of these sizes, and in each block a mix of 12 x 12 with a norm of 2 x 12.
    "deepvit_s": 24_423_784 + 16 * (12 * 12 + 2 * 12),
    # timm's figures.
    "crossvit_tiny": 7_014_800,
    "crossvit_small": 26_856_272,
    # The authors say 4.3 and 21.5 million. The digits: two token transformers, the projection, the class token, the
    # blocks, the last norm and the head.
    "t2t_vit_7": 41_126 + 124_352 + 577 * 256 + 256 + 7 * 526_336 + 512 + 257_000,
    "t2t_vit_14": 41_126 + 124_352 + 577 * 384 + 384 + 14 * 1_478_016 + 768 + 385_000,
    # The authors' 6,486,080 for 10 classes has a LayerNorm of 576, 1,152 parameters, that is never read.
    "t2t_small_data": 6_486_080 - 1_152 + 990 * 257,
}

# The paper's model at (image size, classes): plain, with SPT and LSA.
SMALL_DATA_COUNTS = {
    ("vit_small_data", 32, 10): (2_692_426, 2_729_878),
    ("vit_small_data", 32, 100): (2_709_796, 2_747_248),
    ("vit_small_data", 64, 200): (2_756_744, 2_906_228),
    ("cait_small_data", 32, 10): (9_020_618, 9_058_066),
    ("cait_small_data", 32, 100): (9_037_988, 9_075_436),
    ("cait_small_data", 64, 200): (9_084_936, 9_234_416),
    ("pit_small_data", 32, 10): (6_972_586, 8_642_014),
    ("pit_small_data", 32, 100): (7_007_236, 8_676_664),
    ("pit_small_data", 64, 200): (7_049_192, 8_732_804),
    # Less the LayerNorm of 576 that the authors' code never reads.
    ("t2t_small_data", 32, 10): (6_486_080 - 1_152, 6_507_081 - 1_152),
    ("t2t_small_data", 32, 100): (6_509_210 - 1_152, 6_530_211 - 1_152),
    ("t2t_small_data", 64, 200): (6_659_262 - 1_152, 6_680_264 - 1_152),
}
