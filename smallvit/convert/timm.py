"""Tables for the models of timm (https://github.com/huggingface/pytorch-image-models)."""

import numpy as np
from einops import rearrange

from smallvit.convert.rules import (
    Kind,
    Shapes,
    Table,
    batch_norm,
    conv,
    dense,
    dense_part,
    norm,
    patch_conv,
    position_planes,
    positions,
    same,
)

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
    """Reshapes a row of offsets to a grid, which is square unless our shape says otherwise."""
    h, w = shapes[path][:2]
    if h * w != len(array):
        h = w = round(len(array) ** 0.5)
    return {"": array.reshape(h, w, -1)}


def merged(kind: Kind) -> Kind:
    """Reorders the 2 x 2 merged tokens from timm's column-major to our row-major order."""

    def rows_first(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
        across_down = array.reshape(*array.shape[:-1], 2, 2, -1)
        return kind(leaf, across_down.swapaxes(-3, -2).reshape(array.shape), path, shapes)

    return rows_first


SWIN: Table = {
    "patch_embed.proj": ("patches/dense", patch_conv),
    "patch_embed.norm": ("patches_norm", norm),
    "layers.{}.downsample.norm": ("merge_{}/norm", merged(norm)),
    "layers.{}.downsample.reduction": ("merge_{}/dense", merged(dense)),
    "layers.{}.blocks.{}.norm1": ("stage_{}/block_{}/attention_norm", norm),
    "layers.{}.blocks.{}.attn.qkv": ("stage_{}/block_{}/attention/window/qkv", dense),
    "layers.{}.blocks.{}.attn.proj": ("stage_{}/block_{}/attention/window/out", dense),
    "layers.{}.blocks.{}.attn.relative_position_bias_table": (
        "stage_{}/block_{}/attention/window/attend/bias/grid",
        relative_bias,
    ),
    "layers.{}.blocks.{}.norm2": ("stage_{}/block_{}/mlp_norm", norm),
    "layers.{}.blocks.{}.mlp.fc1": ("stage_{}/block_{}/mlp/in", dense),
    "layers.{}.blocks.{}.mlp.fc2": ("stage_{}/block_{}/mlp/out", dense),
    "norm": ("norm", norm),
    "head.fc": ("head", dense),
}

CAIT: Table = {
    **VIT,
    "blocks.{}.attn.proj_l": ("block_{}/attention/attend/pre", dense),
    "blocks.{}.attn.proj_w": ("block_{}/attention/attend/post", dense),
    "blocks.{}.gamma_1": ("block_{}/attention_scale/scale", same),
    "blocks.{}.gamma_2": ("block_{}/mlp_scale/scale", same),
    "blocks_token_only.{}.norm1": ("class_block_{}/attention_norm", norm),
    "blocks_token_only.{}.attn.q": ("class_block_{}/attention/q", dense),
    "blocks_token_only.{}.attn.k": ("class_block_{}/attention/kv", dense_part(0)),
    "blocks_token_only.{}.attn.v": ("class_block_{}/attention/kv", dense_part(1)),
    "blocks_token_only.{}.attn.proj": ("class_block_{}/attention/out", dense),
    "blocks_token_only.{}.gamma_1": ("class_block_{}/attention_scale/scale", same),
    "blocks_token_only.{}.norm2": ("class_block_{}/mlp_norm", norm),
    "blocks_token_only.{}.mlp.fc1": ("class_block_{}/mlp/in", dense),
    "blocks_token_only.{}.mlp.fc2": ("class_block_{}/mlp/out", dense),
    "blocks_token_only.{}.gamma_2": ("class_block_{}/mlp_scale/scale", same),
}


def nest(dim_head: int = 32) -> Table:
    """The table for a NesT; all published ones have heads of dimension 32."""

    def heads_last(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
        """Transposes the joined heads: the head is timm's fastest axis and our slowest."""
        if leaf == "bias":
            return {"bias": array}
        return {"kernel": rearrange(array, "k (d h) -> (h d) k", d=dim_head)}

    def block_positions(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
        """Converts positions per block to positions on the whole grid; timm's blocks are square."""
        blocks, tokens = (round(array.shape[axis] ** 0.5) for axis in (1, 2))
        return {"grid": rearrange(array, "1 (h w) (p q) d -> (h p) (w q) d", h=blocks, p=tokens)}

    return {
        "patch_embed.proj": ("patches/dense", patch_conv),
        "levels.{}.pos_embed": ("positions_{}", block_positions),
        "levels.{}.pool.conv": ("aggregate_{}/conv", conv),
        "levels.{}.pool.norm": ("aggregate_{}/norm", norm),
        "levels.{}.transformer_encoder.{}.norm1": ("stage_{}/block_{}/attention_norm", norm),
        "levels.{}.transformer_encoder.{}.attn.qkv": ("stage_{}/block_{}/attention/qkv", dense),
        "levels.{}.transformer_encoder.{}.attn.proj": ("stage_{}/block_{}/attention/out", heads_last),
        "levels.{}.transformer_encoder.{}.norm2": ("stage_{}/block_{}/mlp_norm", norm),
        "levels.{}.transformer_encoder.{}.mlp.fc1": ("stage_{}/block_{}/mlp/in", dense),
        "levels.{}.transformer_encoder.{}.mlp.fc2": ("stage_{}/block_{}/mlp/out", dense),
        "norm": ("norm", norm),
        "head": ("head", dense),
    }


def distance_bias(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Reshapes each head's row of distances to a grid, which is square unless our shape says otherwise."""
    h, w = shapes[f"{path}/distances"][:2]
    if h * w != array.shape[1]:
        h = w = round(array.shape[1] ** 0.5)
    return {"distances": array.T.reshape(h, w, -1)}


def _with_norm(source: str, ours: str) -> Table:
    return {f"{source}.linear": (f"{ours}/dense", dense), f"{source}.bn": (f"{ours}/norm", batch_norm)}


LEVIT: Table = {
    **{
        key: entry
        for i in range(4)
        for key, entry in {
            f"stem.conv{i + 1}.linear": (f"stem_{i}/conv", conv),
            f"stem.conv{i + 1}.bn": (f"stem_{i}/norm", batch_norm),
        }.items()
    },
    **_with_norm("stages.{}.downsample.attn_downsample.kv", "down_{}/kv"),
    **_with_norm("stages.{}.downsample.attn_downsample.q.ln", "down_{}/q"),
    **_with_norm("stages.{}.downsample.attn_downsample.proj.ln", "down_{}/out"),
    "stages.{}.downsample.attn_downsample.attention_biases": ("down_{}/attend/bias", distance_bias),
    **_with_norm("stages.{}.downsample.mlp.ln1", "down_{}_mlp/in"),
    **_with_norm("stages.{}.downsample.mlp.ln2", "down_{}_mlp/out"),
    **_with_norm("stages.{}.blocks.{}.attn.qkv", "stage_{}/block_{}/attention/qkv"),
    **_with_norm("stages.{}.blocks.{}.attn.proj.ln", "stage_{}/block_{}/attention/out"),
    "stages.{}.blocks.{}.attn.attention_biases": ("stage_{}/block_{}/attention/attend/bias", distance_bias),
    **_with_norm("stages.{}.blocks.{}.mlp.ln1", "stage_{}/block_{}/mlp/in"),
    **_with_norm("stages.{}.blocks.{}.mlp.ln2", "stage_{}/block_{}/mlp/out"),
    "head.bn": ("norm", batch_norm),
    "head.linear": ("head", dense),
    "head_dist.bn": ("distill_norm", batch_norm),
    "head_dist.linear": ("distill_head", dense),
}


def twins_out(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Splits timm's one name for local and global attention into our two."""
    out = "window/out" if f"{path}/window/out/kernel" in shapes else "out"
    return {f"{out}/{end}": a for end, a in dense(leaf, array, path, shapes).items()}


TWINS_SVT: Table = {
    "patch_embeds.{}.proj": ("patches_{}/dense", patch_conv),
    "patch_embeds.{}.norm": ("patches_{}_norm", norm),
    "pos_block.{}.proj.0": ("stage_{}/peg/conv", conv),
    "blocks.{}.{}.norm1": ("stage_{}/block_{}/attention_norm", norm),
    "blocks.{}.{}.attn.qkv": ("stage_{}/block_{}/attention/window/qkv", dense),
    "blocks.{}.{}.attn.q": ("stage_{}/block_{}/attention/q", dense),
    "blocks.{}.{}.attn.kv": ("stage_{}/block_{}/attention/kv", dense),
    "blocks.{}.{}.attn.sr": ("stage_{}/block_{}/attention/reduce", patch_conv),
    "blocks.{}.{}.attn.norm": ("stage_{}/block_{}/attention/reduce_norm", norm),
    "blocks.{}.{}.attn.proj": ("stage_{}/block_{}/attention", twins_out),
    "blocks.{}.{}.norm2": ("stage_{}/block_{}/mlp_norm", norm),
    "blocks.{}.{}.mlp.fc1": ("stage_{}/block_{}/mlp/in", dense),
    "blocks.{}.{}.mlp.fc2": ("stage_{}/block_{}/mlp/out", dense),
    "norm": ("norm", norm),
    "head": ("head", dense),
}
PIT: Table = {
    "patch_embed.conv": ("patches", conv),
    "cls_token": ("cls/token", same),
    "pos_embed": ("positions", position_planes),
    "transformers.{}.pool.conv": ("pool_{}/conv", conv),
    "transformers.{}.pool.fc": ("pool_{}/cls", dense),
    "transformers.{}.blocks.{}.norm1": ("stage_{}/block_{}/attention_norm", norm),
    "transformers.{}.blocks.{}.attn.qkv": ("stage_{}/block_{}/attention/qkv", dense),
    "transformers.{}.blocks.{}.attn.proj": ("stage_{}/block_{}/attention/out", dense),
    "transformers.{}.blocks.{}.norm2": ("stage_{}/block_{}/mlp_norm", norm),
    "transformers.{}.blocks.{}.mlp.fc1": ("stage_{}/block_{}/mlp/in", dense),
    "transformers.{}.blocks.{}.mlp.fc2": ("stage_{}/block_{}/mlp/out", dense),
    "norm": ("norm", norm),
    "head": ("head", dense),
}


def _crossvit(number: int, name: str) -> Table:
    block, visit = f"blocks.{{}}.blocks.{number}.{{}}.", f"{name}_{{}}_visit/"
    return {
        f"patch_embed.{number}.proj": (f"{name}_patches/dense", patch_conv),
        f"cls_token_{number}": (f"{name}_cls/token", same),
        f"pos_embed_{number}": (f"{name}_positions", positions),
        f"{block}norm1": (f"{name}_{{}}/block_{{}}/attention_norm", norm),
        f"{block}attn.qkv": (f"{name}_{{}}/block_{{}}/attention/qkv", dense),
        f"{block}attn.proj": (f"{name}_{{}}/block_{{}}/attention/out", dense),
        f"{block}norm2": (f"{name}_{{}}/block_{{}}/mlp_norm", norm),
        f"{block}mlp.fc1": (f"{name}_{{}}/block_{{}}/mlp/in", dense),
        f"{block}mlp.fc2": (f"{name}_{{}}/block_{{}}/mlp/out", dense),
        f"blocks.{{}}.projs.{number}.0": (f"{visit}go_norm", norm),
        f"blocks.{{}}.projs.{number}.2": (f"{visit}go", dense),
        f"blocks.{{}}.fusion.{number}.norm1": (f"{visit}read_0/attention_norm", norm),
        f"blocks.{{}}.fusion.{number}.attn.wq": (f"{visit}read_0/attention/q", dense),
        f"blocks.{{}}.fusion.{number}.attn.wk": (f"{visit}read_0/attention/kv", dense_part(0)),
        f"blocks.{{}}.fusion.{number}.attn.wv": (f"{visit}read_0/attention/kv", dense_part(1)),
        f"blocks.{{}}.fusion.{number}.attn.proj": (f"{visit}read_0/attention/out", dense),
        f"blocks.{{}}.revert_projs.{number}.0": (f"{visit}return_norm", norm),
        f"blocks.{{}}.revert_projs.{number}.2": (f"{visit}return", dense),
        f"norm.{number}": (f"{name}_norm", norm),
        f"head.{number}": (f"head/{name}", dense),
    }


CROSSVIT: Table = {**_crossvit(0, "sm"), **_crossvit(1, "lg")}
