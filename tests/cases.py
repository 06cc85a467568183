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
    idle: str | None = None  # parameters below this path have no effect, by the authors' own design

    def make(self, **changes: Any) -> Classifier:
        return self.cls(**{"num_classes": 7, **self.fields, **changes})


_VIT = dict(image_size=16, patch_size=4, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24, token_std=1.0)
_RANDOM = dict(dropout=0.2, emb_dropout=0.2, drop_path=0.3)
_LEVIT = dict(image_size=(48, 64), dim=(16, 24), depth=1, heads=(1, 2), stages=2, dim_key=4, dim_value=6)
_CVT = {
    f"s{stage}_{name}": value
    for stage in (1, 2, 3)
    for name, value in dict(emb_dim=8 * stage, emb_kernel=3, emb_stride=2, heads=stage, depth=1, mlp_mult=2).items()
}
_REGION = dict(dim=8, depth=(1, 1), window_size=2, local_patch_size=2, heads=2, mlp_mult=2)
_LAST_BIAS = "stage_1/block_0/local_attend/bias/"
_DROP = dict(dropout=0.2, drop_path=0.3)

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
    "nest": Case(
        smallvit.NesT,
        dict(image_size=16, patch_size=2, dim=8, heads=2, num_hierarchies=2, block_repeats=1, **_DROP),
    ),
    "nest_wide": Case(
        smallvit.NesT,
        dict(image_size=(9, 20), patch_size=(3, 2), dim=8, heads=1, num_hierarchies=1, block_repeats=2, dropout=0.2),
        (9, 20),
        1,
    ),
    "levit": Case(smallvit.LeViT, {**_LEVIT, **_DROP, "residual_init": 1.0}, (48, 64)),
    # In the last block only the class token's query counts, and it takes no convolution.
    "cvt": Case(smallvit.CvT, {**_CVT, **_DROP}, idle="block_2_0/attention/q_conv/"),
    "cvt_mean": Case(smallvit.CvT, {**_CVT, "pool": "mean", "s2_kv_proj_stride": 1, "dropout": 0.3}, (9, 20), 1),
    # Only the regions leave the last block, and the bias is among local tokens.
    "regionvit": Case(smallvit.RegionViT, {**_REGION, **_DROP}, idle=_LAST_BIAS),
    # 3 x 5 regions become 2 x 3, and the windows of the last ones are filled up.
    "regionvit_wide": Case(
        smallvit.RegionViT, {**_REGION, "use_peg": True, "dropout": 0.3}, (12, 20), 1, idle=_LAST_BIAS
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
    # timm's figures.
    "nest_tiny": 17_057_608,
    "nest_small": 38_351_176,
    "nest_base": 67_723_368,
    # timm's figures, two heads included.
    "levit_128s": 7_777_058,
    "levit_128": 9_213_936,
    "levit_192": 10_947_069,
    "levit_256": 18_893_876,
    "levit_384": 39_128_836,
    # The figures of transformers.
    "cvt_13": 19_997_480,
    "cvt_21": 31_622_696,
    # The authors' layers added up by hand; the paper says 13.8, 30.6 and 72.7 million.
    "regionvit_tiny": 13_842_676,
    "regionvit_small": 30_586_618,
    "regionvit_base": 72_747_232,
    # The paper's 2,692,426 for 10 classes, and 990 more rows of the head.
    "vit_small_data": 2_692_426 + 990 * 193,
}

# The paper's model at (image size, classes): plain, with SPT and LSA.
SMALL_DATA_COUNTS = {
    ("vit_small_data", 32, 10): (2_692_426, 2_729_878),
    ("vit_small_data", 32, 100): (2_709_796, 2_747_248),
    ("vit_small_data", 64, 200): (2_756_744, 2_906_228),
}
