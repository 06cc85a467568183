"""The table of the contract suite: each architecture and its variants, small enough to run in seconds.

A new architecture adds a row. `COUNTS` has the parameters of every registered name at its own image size and 1000
classes.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import smallvit
from smallvit.layers import Classifier
from smallvit.models import KerasViT


@dataclass(frozen=True)
class Case:
    cls: type[Classifier]
    fields: dict[str, Any] = field(hash=False)
    size: tuple[int, int] = (16, 16)
    channels: int = 3
    both: bool = True  # run plain too; the further ways of an architecture run with SPT and LSA only
    one_size: bool = False  # parameters other than positions depend on the image size
    idle: str | None = None  # parameters below this path have no effect, by the authors' own design

    def make(self, **changes: Any) -> Classifier:
        return self.cls(**{"num_classes": 7, **self.fields, **changes})

    def draw(self, model: Classifier) -> Any:
        """Variables without the initialisers, which take longer to compile than the model: none is 0, few are equal."""
        images = jax.ShapeDtypeStruct((1, *self.size, self.channels), jnp.float32)
        random = np.random.default_rng(0)

        def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
            if path[-1].key in ("scale", "var", "temperature"):  # positive
                return jnp.asarray(random.uniform(0.5, 1, leaf.shape), jnp.float32)
            inputs = np.prod(leaf.shape[:-1])
            return jnp.asarray(random.standard_normal(leaf.shape) * max(inputs, 4) ** -0.5, jnp.float32)

        return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(model.init, jax.random.key(0), images))


_VIT = dict(image_size=16, patch_size=4, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24, token_std=1.0)
_RANDOM = dict(dropout=0.2, emb_dropout=0.2, drop_path=0.3)
_SWIN = dict(image_size=16, patch_size=2, dim=8, depth=(2, 1), heads=(2, 4), window_size=4, mlp_ratio=2.0)
_LEVIT = dict(image_size=(48, 64), dim=(16, 24), depth=1, heads=(1, 2), stages=2, dim_key=4, dim_value=6)
_CVT = {
    f"s{stage}_{name}": value
    for stage in (1, 2, 3)
    for name, value in dict(emb_dim=8 * stage, emb_kernel=3, emb_stride=2, heads=stage, depth=1, mlp_mult=2).items()
}
_REGION = dict(dim=8, depth=(1, 1), window_size=2, local_patch_size=2, heads=2, mlp_mult=2)
_LAST_BIAS = "stage_1/block_0/local_attend/bias/"
_DROP = dict(dropout=0.2, drop_path=0.3)
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
    "vit_mean": Case(smallvit.ViT, {**_VIT, "pool": "mean", "dropout": 0.5, "qkv_bias": False}, both=False),
    "vit_parallel": Case(
        smallvit.ViT, {**_VIT, "num_parallel_branches": 2, "layer_scale": 0.1, "drop_path": 0.3}, both=False
    ),
    "vit_merger": Case(
        smallvit.ViT, {**_VIT, "patch_merge_layer": 1, "patch_merge_num_tokens": 3, "emb_dropout": 0.3}, both=False
    ),
    "vit_merger_mean": Case(
        smallvit.ViT, {**_VIT, "patch_merge_layer": 1, "pool": "mean", "drop_path": 0.3}, both=False
    ),
    "vit_wide": Case(
        smallvit.ViT,
        {**_VIT, **_RANDOM, "image_size": (9, 20), "patch_size": (3, 5), "patch_norm": True},
        (9, 20),
        1,
        both=False,
    ),
    "sl_vit": Case(smallvit.SLViT, {**_VIT, **_RANDOM}, both=False),
    "simple_vit": Case(
        smallvit.SimpleViT,
        dict(image_size=16, patch_size=4, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24, drop_path=0.5),
    ),
    "keras_vit": Case(
        KerasViT,
        dict(
            image_size=12,
            patch_size=4,
            dim=8,
            depth=2,
            heads=2,
            dim_head=6,
            mlp_dim=16,
            head_dims=(24, 12),
            dropout=0.1,
        ),
        (12, 12),
        one_size=True,
    ),
    "swin": Case(smallvit.Swin, {**_SWIN, "dropout": 0.2, "emb_dropout": 0.2, "drop_path": 0.3}),
    # Windows that do not fit, an odd grid to merge, absolute positions.
    "swin_wide": Case(
        smallvit.Swin,
        {**_SWIN, "image_size": (12, 20), "patch_size": (4, 2), "positions": True, "window_size": 4, "drop_path": 0.5},
        (12, 20),
        1,
        both=False,
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
        both=False,
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
        both=False,
    ),
    "levit": Case(smallvit.LeViT, {**_LEVIT, **_DROP, "residual_init": 1.0}, (48, 64)),
    "twins_svt": Case(smallvit.TwinsSVT, {**_TWINS, "dropout": 0.1, "drop_path": 0.3}),
    "crossformer": Case(smallvit.CrossFormer, {**_CROSSFORMER, "dropout": 0.1, "drop_path": 0.3}),
    "scalable_vit": Case(smallvit.ScalableViT, {**_SCALABLE, "dropout": 0.1, "drop_path": 0.3}, (32, 32)),
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
        both=False,
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
    "hybrid_vit": Case(
        smallvit.HybridViT,
        dict(
            **dict(image_size=16, widths=(4, 8, 16), strides=(1, 2, 2), conv_depth=(0, 1, 1)),
            **dict(depth=2, heads=2, mlp_dim=24, dropout=0.2, drop_path=0.3),
        ),
    ),
    # Rectangles, a stride above 2, a side that no stride divides.
    "hybrid_vit_wide": Case(
        smallvit.HybridViT,
        dict(
            **dict(image_size=(9, 22), widths=(4, 16), strides=((1, 3), 2), conv_depth=(1, 0)),
            **dict(depth=1, heads=1, mlp_dim=24, dropout=0.3),
        ),
        (9, 22),
        1,
        both=False,
    ),
    # Sides that pooling does not divide, and convolutions after the blocks.
    "hybrid_vit_pooled": Case(
        smallvit.HybridViT,
        dict(
            **dict(image_size=(9, 22), widths=(4, 8, 16), strides=(1, 2, 2), conv_depth=(0, 1, 0)),
            **dict(depth=1, heads=2, mlp_dim=24, max_pool=True, last_width=24, dropout=0.3),
        ),
        (9, 22),
        1,
        both=False,
    ),
    # In the last block only the class token's query counts, and it takes no convolution.
    "cvt": Case(smallvit.CvT, {**_CVT, **_DROP}, idle="stage_2/block_0/attention/q_conv/"),
    "cvt_mean": Case(
        smallvit.CvT, {**_CVT, "pool": "mean", "s2_kv_proj_stride": 1, "dropout": 0.3}, (9, 20), 1, both=False
    ),
    "t2t_vit": Case(
        smallvit.T2TViT,
        {**_RANDOM, **dict(image_size=(8, 12), t2t_layers=((3, 2), (3, 2)), dim=16, depth=2, heads=2, mlp_dim=16)},
        (8, 12),
    ),
    # Only the regions leave the last block, and the bias is among local tokens.
    "regionvit": Case(smallvit.RegionViT, {**_REGION, **_DROP}, idle=_LAST_BIAS),
    # 3 x 5 regions become 2 x 3, and the windows of the last ones are filled up.
    "regionvit_wide": Case(
        smallvit.RegionViT, {**_REGION, "use_peg": True, "dropout": 0.3}, (12, 20), 1, idle=_LAST_BIAS, both=False
    ),
}


def _hybrid(a: int, b: int, d: int, last: int) -> int:
    """HybridViT's stages of a, b and d channels, positions, two blocks, the last stage, norm and a head of 1,000."""
    hidden = 2 * d
    convolutions = [(3, a), (a, b), (b, b), (b, b), (b, d), (d, last), (last, last), (last, last)]
    block = 4 * d + 4 * d * d + d + 2 * d * hidden + hidden + d + 9 * hidden + hidden
    norms = 2 * d + 2 * last  # after the blocks, and after the last stage
    return sum(9 * i * o + 2 * o for i, o in convolutions) + 64 * d + 2 * block + norms + 1000 * last + 1000


COUNTS = {
    "hybrid_vit_small": _hybrid(16, 32, 64, 128),
    "hybrid_vit_base": _hybrid(32, 64, 128, 256),
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
    # Keras' 21,759,012 for 100 classes, and 900 more columns of the head.
    "keras_vit_small_ds": 21_759_012 + 900 * 1025,
    # timm's figures.
    "swin_tiny": 28_288_354,
    "swin_small": 49_606_258,
    "swin_base": 87_768_224,
    # The paper's 7,073,188 for 10 classes, and 990 more rows of the head.
    "swin_small_data": 7_073_188 + 990 * 385,
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
    # Patches, class token and positions, blocks, norm, head.
    "vit_tiny_data": 193 * 128
    + 18 * 128
    + 6 * (4 * 128 * 128 + 2 * 128 * 256 + 128 + 128 + 256 + 4 * 128)
    + 256
    + 129_000,
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
    # Ours, for a few minutes: no reference but the classes' own counts.
    "cait_tiny_data": 708_184,
    "crossformer_tiny_data": 750_368,
    "crossvit_tiny_data": 1_126_544,
    "cvt_tiny_data": 1_151_016,
    "deepvit_tiny_data": 673_992,
    "levit_tiny_data": 1_012_712,
    "nest_tiny_data": 1_186_312,
    "pit_tiny_data": 1_069_912,
    "regionvit_tiny_data": 637_001,
    "scalable_vit_tiny_data": 807_992,
    "simple_vit_tiny_data": 665_448,
    "swin_tiny_data": 1_220_284,
    "t2t_tiny_data": 503_390,
    "twins_svt_tiny_data": 1_152_680,
}

# At an image size and a number of classes: plain, with SPT and LSA.
SMALL_DATA_COUNTS = {
    ("vit_small_data", 32, 10): (2_692_426, 2_729_878),
    ("vit_small_data", 32, 100): (2_709_796, 2_747_248),
    ("vit_small_data", 64, 200): (2_756_744, 2_906_228),
    ("keras_vit_small_ds", 72, 100): (21_759_012, 21_787_748),
    ("swin_small_data", 32, 10): (7_073_188, 8_562_166),
    ("swin_small_data", 32, 100): (7_107_838, 8_596_816),
    ("swin_small_data", 64, 200): (7_149_794, 8_652_956),
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
