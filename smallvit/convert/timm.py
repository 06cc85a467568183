"""Tables for the models of timm (https://github.com/huggingface/pytorch-image-models)."""

from smallvit.convert.rules import Table, dense, dense_part, norm, patch_conv, positions, same

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
