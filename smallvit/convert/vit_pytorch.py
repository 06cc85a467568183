"""Tables for the models of vit-pytorch (https://github.com/lucidrains/vit-pytorch)."""

import numpy as np

from smallvit.convert.rules import Shapes, Table, dense, norm, positions, same


def log_temperature(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """One logarithm a layer becomes one multiplier a head."""
    return {"": np.broadcast_to(np.exp(array), shapes[path]).astype(array.dtype)}


def dense_with_bias(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """A projection without bias is ours with the bias at zero."""
    return {"kernel": array.T, "bias": np.zeros(array.shape[0], array.dtype)}


_MLP: Table = {
    "transformer.layers.{}.1.net.0": ("block_{}/mlp_norm", norm),
    "transformer.layers.{}.1.net.1": ("block_{}/mlp/in", dense),
}
_BLOCKS: Table = {
    **_MLP,
    "transformer.layers.{}.0.norm": ("block_{}/attention_norm", norm),
    "transformer.layers.{}.0.to_qkv": ("block_{}/attention/qkv", dense),
    "transformer.layers.{}.0.to_out.0": ("block_{}/attention/out", dense),
    "transformer.layers.{}.1.net.4": ("block_{}/mlp/out", dense),
}
_NORMED_PATCHES: Table = {
    "to_patch_embedding.1": ("patches/patch_norm", norm),
    "to_patch_embedding.2": ("patches/dense", dense),
    "to_patch_embedding.3": ("patches/token_norm", norm),
}

VIT: Table = {
    **_BLOCKS,
    **_NORMED_PATCHES,
    "cls_token": ("cls/token", same),
    "pos_embedding": ("positions", positions),
    "transformer.norm": ("norm", norm),
    "mlp_head": ("head", dense),
}

VIT_FOR_SMALL_DATASET: Table = {
    **_BLOCKS,
    "to_patch_embedding.to_patch_tokens.1": ("patches/norm", norm),
    "to_patch_embedding.to_patch_tokens.2": ("patches/dense", dense),
    "cls_token": ("cls/token", same),
    "pos_embedding": ("positions", positions),
    "transformer.layers.{}.0.temperature": ("block_{}/attention/attend/temperature", log_temperature),
    "mlp_head.0": ("norm", norm),
    "mlp_head.1": ("head", dense),
}

# Its table of positions has one row too many, which it never reads.
VIT_WITH_PATCH_MERGER: Table = {
    **_BLOCKS,
    **_NORMED_PATCHES,
    "pos_embedding": ("positions", positions),
    "transformer.patch_merger.norm": ("merger/norm", norm),
    "transformer.patch_merger.queries": ("merger/queries", same),
    "transformer.norm": ("norm", norm),
    "mlp_head.1": ("head", dense),
}

SIMPLE_VIT: Table = {
    **_MLP,
    **_NORMED_PATCHES,
    "transformer.layers.{}.0.norm": ("block_{}/attention_norm", norm),
    "transformer.layers.{}.0.to_qkv": ("block_{}/attention/qkv", dense),
    "transformer.layers.{}.0.to_out": ("block_{}/attention/out", dense_with_bias),
    "transformer.layers.{}.1.net.3": ("block_{}/mlp/out", dense),
    "transformer.norm": ("norm", norm),
    "linear_head": ("head", dense),
}

DEEPVIT: Table = {
    **_BLOCKS,
    **_NORMED_PATCHES,
    "cls_token": ("cls/token", same),
    "pos_embedding": ("positions", positions),
    "transformer.layers.{}.0.reattn_weights": ("block_{}/attention/attend/post/mix/kernel", same),
    "transformer.layers.{}.0.reattn_norm.1": ("block_{}/attention/attend/post/norm", norm),
    "mlp_head.0": ("norm", norm),
    "mlp_head.1": ("head", dense),
}
