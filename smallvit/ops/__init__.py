"""Stateless functions on arrays, used by the layers; they call a native kernel where one is available."""

from smallvit.ops.attention import attend
from smallvit.ops.conv import convolve, max_pool, plain_convolutions, unfold
from smallvit.ops.dense import align, at_least_float32, exact_gelu, multiply
from smallvit.ops.norm import batch_norm, layer_norm
from smallvit.ops.patches import SPTOption, patchify, shift_image, shifted_copies, spt_directions
from smallvit.ops.positions import sincos_2d
from smallvit.ops.remat import recompute
from smallvit.ops.size import Images, Size, check_image, grid_size, pair, patch_of, per_stage, stride_of
from smallvit.ops.windows import window_allowed, window_merge, window_offsets, window_partition

__all__ = [
    "Images",
    "SPTOption",
    "Size",
    "align",
    "at_least_float32",
    "attend",
    "batch_norm",
    "check_image",
    "convolve",
    "exact_gelu",
    "grid_size",
    "layer_norm",
    "max_pool",
    "multiply",
    "pair",
    "patch_of",
    "patchify",
    "per_stage",
    "plain_convolutions",
    "recompute",
    "shift_image",
    "shifted_copies",
    "sincos_2d",
    "spt_directions",
    "stride_of",
    "unfold",
    "window_allowed",
    "window_merge",
    "window_offsets",
    "window_partition",
]
