"""Native CPU kernels, called by XLA. They are optional, and only a faster way to the same results.

Check before a call: `if attends(q, k, v, heads, bias, allowed): return attend(q, k, v, scale, bias, allowed)`.
"""

from smallvit.kernels.attention import attend, attend_packed, attends, attends_joined, attends_packed
from smallvit.kernels.convolutions import conv, convolves, convolves_depthwise, depthwise
from smallvit.kernels.grid import unfold, unfolds
from smallvit.kernels.library import VARIABLE, Status, disabled, status, usable
from smallvit.kernels.linear import FEWEST, dense, multiplies
from smallvit.kernels.mixing import attend_mixed, mixes
from smallvit.kernels.pooling import batch_norm_pool, max_pool, pools
from smallvit.kernels.rows import batch_norm, bias_gelu, layer_norm, takes_rows, transpose
from smallvit.kernels.update import adam, clip, muon, takes_arrays, weighted_sums

__all__ = [
    "FEWEST",
    "VARIABLE",
    "Status",
    "adam",
    "attend",
    "attend_mixed",
    "attend_packed",
    "attends",
    "attends_joined",
    "attends_packed",
    "batch_norm",
    "batch_norm_pool",
    "bias_gelu",
    "clip",
    "conv",
    "convolves",
    "convolves_depthwise",
    "dense",
    "depthwise",
    "disabled",
    "layer_norm",
    "max_pool",
    "mixes",
    "multiplies",
    "muon",
    "pools",
    "status",
    "takes_arrays",
    "takes_rows",
    "transpose",
    "unfold",
    "unfolds",
    "usable",
    "weighted_sums",
]
