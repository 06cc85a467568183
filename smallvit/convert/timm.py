"""Tables for the models of timm (https://github.com/huggingface/pytorch-image-models)."""

import numpy as np

from smallvit.convert.rules import Kind, Shapes, Table, conv, dense, norm, patch_conv, positions, same

VIT: Table = {
    "patch_embed.proj": ("patches/dense", patch_conv),
    "cls_token": ("cls/token", same),
    "pos_embed": ("positions", positions),
    "blocks.{}.norm1": ("block_{}/attention_norm", norm),
    "blocks.{}.attn.qkv": ("block_{}/attention/qkv", dense),
    "blocks.{}.attn.proj": ("block_{}/attention/out", dense),
    "blocks.{}.ls1.gamma": ("block_{}/attention_scale/scale", same),
    "blocks.{}.norm2": ("block_{}/mlp_norm", norm),
    "blocks.{}.mlp.fc1": ("block_{}/mlp/in", dense),
    "blocks.{}.mlp.fc2": ("block_{}/mlp/out", dense),
    "blocks.{}.ls2.gamma": ("block_{}/mlp_scale/scale", same),
    # The parallel block.
    "blocks.{}.attns.{}.norm": ("block_{}/attention_{}_norm", norm),
    "blocks.{}.attns.{}.attn.qkv": ("block_{}/attention_{}/qkv", dense),
    "blocks.{}.attns.{}.attn.proj": ("block_{}/attention_{}/out", dense),
    "blocks.{}.attns.{}.ls.gamma": ("block_{}/attention_{}_scale/scale", same),
    "blocks.{}.ffns.{}.norm": ("block_{}/mlp_{}_norm", norm),
    "blocks.{}.ffns.{}.mlp.fc1": ("block_{}/mlp_{}/in", dense),
    "blocks.{}.ffns.{}.mlp.fc2": ("block_{}/mlp_{}/out", dense),
    "blocks.{}.ffns.{}.ls.gamma": ("block_{}/mlp_{}_scale/scale", same),
    "norm": ("norm", norm),
    "head": ("head", dense),
}


def relative_bias(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """A row of offsets becomes their grid, square unless ours says otherwise."""
    h, w = shapes[path][:2]
    if h * w != len(array):
        h = w = round(len(array) ** 0.5)
    return {"": array.reshape(h, w, -1)}


def merged(kind: Kind) -> Kind:
    """2 x 2 tokens stand side by side column by column there, row by row here."""

    def rows_first(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
        across_down = array.reshape(*array.shape[:-1], 2, 2, -1)
        return kind(leaf, across_down.swapaxes(-3, -2).reshape(array.shape), path, shapes)

    return rows_first


SWIN: Table = {
    "patch_embed.proj": ("patches/dense", patch_conv),
    "patch_embed.norm": ("patches_norm", norm),
    "layers.{}.downsample.norm": ("merge_{}/norm", merged(norm)),
    "layers.{}.downsample.reduction": ("merge_{}/dense", merged(dense)),
    "layers.{}.blocks.{}.norm1": ("stage_{}_block_{}/attention_norm", norm),
    "layers.{}.blocks.{}.attn.qkv": ("stage_{}_block_{}/attention/window/qkv", dense),
    "layers.{}.blocks.{}.attn.proj": ("stage_{}_block_{}/attention/window/out", dense),
    "layers.{}.blocks.{}.attn.relative_position_bias_table": (
        "stage_{}_block_{}/attention/window/attend/bias/grid",
        relative_bias,
    ),
    "layers.{}.blocks.{}.norm2": ("stage_{}_block_{}/mlp_norm", norm),
    "layers.{}.blocks.{}.mlp.fc1": ("stage_{}_block_{}/mlp/in", dense),
    "layers.{}.blocks.{}.mlp.fc2": ("stage_{}_block_{}/mlp/out", dense),
    "norm": ("norm", norm),
    "head.fc": ("head", dense),
}


def twins_out(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Local and global attention have one name there, two here."""
    out = "window/out" if f"{path}/window/out/kernel" in shapes else "out"
    return {f"{out}/{end}": a for end, a in dense(leaf, array, path, shapes).items()}


TWINS_SVT: Table = {
    "patch_embeds.{}.proj": ("patches_{}/dense", patch_conv),
    "patch_embeds.{}.norm": ("patches_{}_norm", norm),
    "pos_block.{}.proj.0": ("peg_{}/conv", conv),
    "blocks.{}.{}.norm1": ("stage_{}_block_{}/attention_norm", norm),
    "blocks.{}.{}.attn.qkv": ("stage_{}_block_{}/attention/window/qkv", dense),
    "blocks.{}.{}.attn.q": ("stage_{}_block_{}/attention/q", dense),
    "blocks.{}.{}.attn.kv": ("stage_{}_block_{}/attention/kv", dense),
    "blocks.{}.{}.attn.sr": ("stage_{}_block_{}/attention/reduce", patch_conv),
    "blocks.{}.{}.attn.norm": ("stage_{}_block_{}/attention/reduce_norm", norm),
    "blocks.{}.{}.attn.proj": ("stage_{}_block_{}/attention", twins_out),
    "blocks.{}.{}.norm2": ("stage_{}_block_{}/mlp_norm", norm),
    "blocks.{}.{}.mlp.fc1": ("stage_{}_block_{}/mlp/in", dense),
    "blocks.{}.{}.mlp.fc2": ("stage_{}_block_{}/mlp/out", dense),
    "norm": ("norm", norm),
    "head": ("head", dense),
}
