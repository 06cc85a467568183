"""Tables for the models of timm (https://github.com/huggingface/pytorch-image-models)."""

from smallvit.convert.rules import Table, conv, dense, dense_part, norm, patch_conv, position_planes, positions, same

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

PIT: Table = {
    "patch_embed.conv": ("patches", conv),
    "cls_token": ("cls/token", same),
    "pos_embed": ("positions", position_planes),
    "transformers.{}.pool.conv": ("pool_{}/conv", conv),
    "transformers.{}.pool.fc": ("pool_{}/cls", dense),
    "transformers.{}.blocks.{}.norm1": ("stage_{}_block_{}/attention_norm", norm),
    "transformers.{}.blocks.{}.attn.qkv": ("stage_{}_block_{}/attention/qkv", dense),
    "transformers.{}.blocks.{}.attn.proj": ("stage_{}_block_{}/attention/out", dense),
    "transformers.{}.blocks.{}.norm2": ("stage_{}_block_{}/mlp_norm", norm),
    "transformers.{}.blocks.{}.mlp.fc1": ("stage_{}_block_{}/mlp/in", dense),
    "transformers.{}.blocks.{}.mlp.fc2": ("stage_{}_block_{}/mlp/out", dense),
    "norm": ("norm", norm),
    "head": ("head", dense),
}


def _crossvit(number: int, name: str) -> Table:
    block, visit = f"blocks.{{}}.blocks.{number}.{{}}.", f"{name}_{{}}_visit/"
    return {
        f"patch_embed.{number}.proj": (f"{name}_patches/dense", patch_conv),
        f"cls_token_{number}": (f"{name}_cls/token", same),
        f"pos_embed_{number}": (f"{name}_positions", positions),
        f"{block}norm1": (f"{name}_{{}}_block_{{}}/attention_norm", norm),
        f"{block}attn.qkv": (f"{name}_{{}}_block_{{}}/attention/qkv", dense),
        f"{block}attn.proj": (f"{name}_{{}}_block_{{}}/attention/out", dense),
        f"{block}norm2": (f"{name}_{{}}_block_{{}}/mlp_norm", norm),
        f"{block}mlp.fc1": (f"{name}_{{}}_block_{{}}/mlp/in", dense),
        f"{block}mlp.fc2": (f"{name}_{{}}_block_{{}}/mlp/out", dense),
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
