"""Fills in the tables of docs/models/: fields from the source, presets from the catalogue.

    .venv/bin/python -m tools.make_tables

A page marks a table with `<!-- fields CLASS -->` or `<!-- presets CLASS or PATTERN -->`, and its end with
`<!-- end -->`. Run `python -m smallvit.count` first if models have changed.
"""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

from smallvit.catalogue import catalogue

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "models").glob("*.md"))

PARTS = {"s": "stage", "sm": "small patches", "lg": "large patches", "cross_attn": "cross-attention"}  # by prefix

# Fields that mean the same in every model, or are not explained by a comment.
MEANINGS = {
    "num_classes": "number of classes; 0 returns the pooled features",
    "image_size": "height and width, or one number for both",
    "patch_size": "side of a patch",
    "dim": "width of a token",
    "depth": "number of blocks",
    "heads": "number of attention heads",
    "mlp_dim": "hidden width of the MLP",
    "mlp_ratio": "hidden width of the MLP, as a multiple of the token's",
    "mlp_mult": "hidden width of the MLP, as a multiple of the token's",
    "pool": '"cls" uses the class token, "mean" the average of the tokens',
    "dim_head": "width of a head",
    "dropout": "dropout rate in attention and MLP",
    "emb_dropout": "dropout rate after the embedding",
    "drop_path": "stochastic depth",
    "layer_scale": "initial value of LayerScale",
    "qkv_bias": "bias of queries, keys and values",
    "norm_eps": "epsilon of the norms",
    "emb_dim": "width of a token",
    "emb_kernel": "kernel of the convolution that makes the tokens",
    "emb_stride": "its stride",
    "proj_kernel": "kernel of the convolutions that make queries, keys and values",
    "kv_proj_stride": "stride of those for keys and values",
    "local_patch_size": "side of a window of the local attention",
    "global_k": "side of the region that one key of the global attention summarises",
    "stages": "number of stages",
    "dim_key": "width of a key",
    "dim_value": "width of a value",
    "num_distill_classes": 'classes of a second head for distillation; "same" is num_classes',
    "num_hierarchies": "number of hierarchies",
    "head_dims": "hidden widths of the MLP before the head",
    "head_dropout": "dropout rate in that MLP",
    "mix_bias": "bias of the head mixing",
    "merge_kernels": "kernels of the convolutions between the stages",
    "tokenize_local_3_conv": "three convolutions make the local tokens, instead of one",
    "use_peg": "a depthwise convolution adds positions in each stage",
    "peg_kernel_size": "kernel of the convolution that adds positions",
    "num_parallel_branches": "number of parallel attentions and MLPs in a block",
    "patch_merge_num_tokens": "number of tokens after the merger",
    "spt": "[Shifted Patch Tokenization](sl_vit.md)",
    "spt_shift": "distance of the shift in pixels",
    "lsa": "[Locality Self-Attention](sl_vit.md)",
}


def fields(name: str) -> list[str]:
    """The fields of a class with their defaults, explained by their comments."""
    for file in sorted((ROOT / "smallvit" / "models").glob("*.py")):
        source = file.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                rows = [_row(each, source.splitlines()) for each in node.body if isinstance(each, ast.AnnAssign)]
                return ["| field | default | meaning |", "|---|---|---|", *rows]
    raise ValueError(f"no class {name} in smallvit/models")


def _row(node: ast.AnnAssign, lines: list[str]) -> str:
    assert isinstance(node.target, ast.Name)
    name = node.target.id
    default = "required" if node.value is None else f"`{ast.unparse(node.value)}`"
    _, _, comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
    comment = comment or ("None is half a patch" if name == "spt_shift" else "")
    part = re.fullmatch(r"(s(?=\d)|sm|lg|cross_attn)(\d?)_(?:enc_)?(.+)", name)
    prefix, known = (f"{PARTS[part[1]]} {part[2]}".strip() + ": ", part[3]) if part else ("", name)
    if name in MEANINGS:
        prefix, known = "", name
    meaning = prefix + "; ".join(text for text in (MEANINGS.get(known, ""), comment) if text)
    return f"| `{name}` | {default} | {meaning} |"


def presets(name: str) -> list[str]:
    """The presets of a class, or those whose name matches a pattern."""
    found = [
        entry
        for entry in catalogue()
        if (fnmatch(entry.name, name) if "*" in name else entry.cls == name and not entry.name.startswith("sl_"))
    ]
    rows = [
        f"| `{entry.name}` | {entry.image_size[0]} x {entry.image_size[1]} | {entry.parameters:,} "
        f"| {entry.multiply_adds / 1e6:,.0f} M |"
        for entry in found
    ]
    return ["| preset | image | parameters | multiply-adds |", "|---|---|---:|---:|", *rows]


def filled(text: str) -> str:
    """A page with its tables up to date."""

    def table(match: re.Match[str]) -> str:
        rows = {"fields": fields, "presets": presets}[match[1]](match[2])
        return "\n".join((f"<!-- {match[1]} {match[2]} -->", *rows, "<!-- end -->"))

    return re.sub(r"<!-- (fields|presets) (\S+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
