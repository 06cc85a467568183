"""Layers shared by two or more architectures, one idea per file.

Axes have the same letters everywhere, in einops, in einsum and in types:

    b  images of the batch       n, m  tokens: queries, keys
    H W  height, width in pixels   d   dimension of a token, or of one head
    h w  rows, columns of a grid   c   channels
    h  heads, beside n and m       k   classes, or any other number of outputs
"""

from smallvit.layers.attention import Attend, Attention, HeadMix, LSAOption
from smallvit.layers.basic import BatchNorm, Dense, Factory, LayerNorm, normal_or_xavier
from smallvit.layers.block import MLP, Block, DropPath, LayerScale, Stage, first_tokens, ramp
from smallvit.layers.classifier import Classifier
from smallvit.layers.convolution import Conv, ConvNorm
from smallvit.layers.patch import SPT, PatchEmbed, SPTPool, patch_embed
from smallvit.layers.peg import PEG
from smallvit.layers.pool import PatchMerger, Pool, check_pool, pool_tokens
from smallvit.layers.position import (
    ClassToken,
    PositionEmbed,
    abstract_variables,
    is_table,
    resample_positions,
    resample_table,
)
from smallvit.layers.window import RelativeBias, WindowAttention

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
    "LSAOption",
    "LayerNorm",
    "LayerScale",
    "PatchEmbed",
    "PatchMerger",
    "Pool",
    "PositionEmbed",
    "RelativeBias",
    "SPTPool",
    "Stage",
    "WindowAttention",
    "abstract_variables",
    "check_pool",
    "first_tokens",
    "is_table",
    "normal_or_xavier",
    "patch_embed",
    "pool_tokens",
    "ramp",
    "resample_positions",
    "resample_table",
]
