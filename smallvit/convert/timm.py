"""Tables for the models of timm (https://github.com/huggingface/pytorch-image-models)."""

import numpy as np
from einops import rearrange

from smallvit.convert.rules import Shapes, Table, conv, dense, norm, patch_conv, positions, same

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


def nest(dim_head: int = 32) -> Table:
    """All published NesTs have heads of dimension 32."""

    def heads_last(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
        """Timm joins the heads with the head as the fastest axis, we with the head as the slowest."""
        if leaf == "bias":
            return {"bias": array}
        return {"kernel": rearrange(array, "k (d h) -> (h d) k", d=dim_head)}

    def block_positions(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
        """Positions in each block become positions on the grid; timm's are square."""
        blocks, tokens = (round(array.shape[axis] ** 0.5) for axis in (1, 2))
        return {"grid": rearrange(array, "1 (h w) (p q) d -> (h p) (w q) d", h=blocks, p=tokens)}

    return {
        "patch_embed.proj": ("patches/dense", patch_conv),
        "levels.{}.pos_embed": ("positions_{}", block_positions),
        "levels.{}.pool.conv": ("aggregate_{}/conv", conv),
        "levels.{}.pool.norm": ("aggregate_{}/norm", norm),
        "levels.{}.transformer_encoder.{}.norm1": ("block_{}_{}/attention_norm", norm),
        "levels.{}.transformer_encoder.{}.attn.qkv": ("block_{}_{}/attention/qkv", dense),
        "levels.{}.transformer_encoder.{}.attn.proj": ("block_{}_{}/attention/out", heads_last),
        "levels.{}.transformer_encoder.{}.norm2": ("block_{}_{}/mlp_norm", norm),
        "levels.{}.transformer_encoder.{}.mlp.fc1": ("block_{}_{}/mlp/in", dense),
        "levels.{}.transformer_encoder.{}.mlp.fc2": ("block_{}_{}/mlp/out", dense),
        "norm": ("norm", norm),
        "head": ("head", dense),
    }
