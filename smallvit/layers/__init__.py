"""What two or more architectures share, one idea a file.

Axes have the same letters everywhere, in einops, in einsum and in types:

    b  image of the batch        n, m  tokens: that ask, that are read
    H W  height, width in pixels   d   dimension of a token, or of one head
    h w  rows, columns of a grid   c   channels
    h  heads, beside n and m       k   classes, or any other number of outputs
"""

from smallvit.layers.attention import Attend, Attention, HeadMix, LSAOption
from smallvit.layers.block import MLP, Block, DropPath, LayerScale, ramp, recompute
from smallvit.layers.classifier import Classifier, SequenceClassifier
from smallvit.layers.conv import BatchNorm, Conv, ConvNorm, plain_convolutions, unfold
from smallvit.layers.dense import Dense, Factory, LayerNorm, exact_gelu
from smallvit.layers.patch import (
    SPT,
    PatchEmbed,
    SPTOption,
    SPTPool,
    patch_embed,
    patchify,
    shift_image,
    shifted_copies,
    spt_directions,
)
from smallvit.layers.peg import PEG
from smallvit.layers.pool import PatchMerger, Pool, check_pool, pool_tokens
from smallvit.layers.position import ClassToken, PositionEmbed, resample_positions, sincos_2d
from smallvit.layers.size import Images, Size, check_image, grid_size, pair, patch_of, per_stage
from smallvit.layers.window import (
    RelativeBias,
    WindowAttention,
    window_allowed,
    window_merge,
    window_offsets,
    window_partition,
)

__all__ = [
    "MLP",
    "PEG",
    "SPT",
    "Attend",
    "Attention",
    "BatchNorm",
    "Block",
    "ClassToken",
    "Classifier",
    "Conv",
    "ConvNorm",
    "Dense",
    "DropPath",
    "Factory",
    "HeadMix",
    "Images",
    "LSAOption",
    "LayerNorm",
    "LayerScale",
    "PatchEmbed",
    "PatchMerger",
    "Pool",
    "PositionEmbed",
    "RelativeBias",
    "SPTOption",
    "SPTPool",
    "SequenceClassifier",
    "Size",
    "WindowAttention",
    "check_image",
    "check_pool",
    "exact_gelu",
    "grid_size",
    "pair",
    "patch_embed",
    "patch_of",
    "patchify",
    "per_stage",
    "plain_convolutions",
    "pool_tokens",
    "ramp",
    "recompute",
    "resample_positions",
    "shift_image",
    "shifted_copies",
    "sincos_2d",
    "spt_directions",
    "unfold",
    "window_allowed",
    "window_merge",
    "window_offsets",
    "window_partition",
]
