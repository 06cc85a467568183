"""Tables for the models of vit-pytorch (https://github.com/lucidrains/vit-pytorch)."""

import numpy as np
from einops import rearrange

from smallvit.convert.rules import Shapes, Table, conv, dense, norm, positions, same


def log_temperature(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Converts one log temperature per layer to one multiplier per head."""
    return {"": np.broadcast_to(np.exp(array), shapes[path]).astype(array.dtype)}


def dense_with_bias(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Adds a zero bias to a projection without one."""
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

# Its position table has one extra row, which is never read.
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


def region_patches(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Converts a 1 x 1 convolution over patches that are flattened with their 3 channels slowest."""
    if leaf == "bias":
        return {"bias": array}
    side = round((array.shape[1] / 3) ** 0.5)
    return {"kernel": rearrange(array, "k (c p q) 1 1 -> (p q c) k", p=side, q=side)}


def region_and_local_norm(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Copies the single norm before both attentions, where the authors have two."""
    return {
        f"{part}_norm/{end}": a for part in ("region", "local") for end, a in norm(leaf, array, path, shapes).items()
    }


def bias_of_all_blocks(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Copies the stage's one bias table, columns slowest, to each block, where the authors have one per block."""
    ends = [end for i in range(len(shapes)) if f"{path}/{(end := f'block_{i}/local_attend/bias/grid')}" in shapes]
    side = round(len(array) ** 0.5)
    return {end: array.reshape(side, side, -1).swapaxes(0, 1) for end in ends}


# For RegionViT(plain_downsample=True, qkv_bias=False, heads=4, dim_head=32, norm_eps=1e-5), without its 3 convolutions.
REGION_VIT: Table = {
    "local_encoder": ("locals", conv),
    "region_encoder.1": ("regions/dense", region_patches),
    "layers.{}.0.conv": ("stage_{}/down", conv),
    "layers.{}.2.local_rel_pos_bias": ("stage_{}", bias_of_all_blocks),
    "layers.{}.2.layers.{}.0.norm": ("stage_{}/block_{}", region_and_local_norm),
    "layers.{}.2.layers.{}.0.to_qkv": ("stage_{}/block_{}/qkv", dense),
    "layers.{}.2.layers.{}.0.to_out.0": ("stage_{}/block_{}/out", dense),
    "layers.{}.2.layers.{}.1.0": ("stage_{}/block_{}/mlp_norm", norm),
    "layers.{}.2.layers.{}.1.1": ("stage_{}/block_{}/mlp/in", dense),
    "layers.{}.2.layers.{}.1.4": ("stage_{}/block_{}/mlp/out", dense),
    "to_logits.1": ("norm", norm),
    "to_logits.2": ("head", dense),
}
