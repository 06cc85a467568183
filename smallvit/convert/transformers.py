"""Tables for the models of Hugging Face transformers (https://github.com/huggingface/transformers)."""

from smallvit.convert.rules import Table, batch_norm, conv, dense, norm, same

_STAGE = "cvt.encoder.stages.{}"
_LAYER = f"{_STAGE}.layers.{{}}"
_ATTENTION = f"{_LAYER}.attention.attention"


def _projection(name: str, ours: str) -> Table:
    convolution = f"{_ATTENTION}.convolution_projection_{name}.convolution_projection"
    return {
        f"{convolution}.convolution": (f"stage_{{}}/block_{{}}/attention/{ours}_conv/conv", conv),
        f"{convolution}.normalization": (f"stage_{{}}/block_{{}}/attention/{ours}_conv/norm", batch_norm),
        f"{_ATTENTION}.projection_{name}": (f"stage_{{}}/block_{{}}/attention/{ours}", dense),
    }


CVT: Table = {
    f"{_STAGE}.embedding.convolution_embeddings.projection": ("embed_{}", conv),
    f"{_STAGE}.embedding.convolution_embeddings.normalization": ("embed_{}_norm", norm),
    f"{_STAGE}.cls_token": ("cls/token", same),
    f"{_LAYER}.layernorm_before": ("stage_{}/block_{}/attention_norm", norm),
    **_projection("query", "q"),
    **_projection("key", "k"),
    **_projection("value", "v"),
    f"{_LAYER}.attention.output.dense": ("stage_{}/block_{}/attention/out", dense),
    f"{_LAYER}.layernorm_after": ("stage_{}/block_{}/mlp_norm", norm),
    f"{_LAYER}.intermediate.dense": ("stage_{}/block_{}/mlp/in", dense),
    f"{_LAYER}.output.dense": ("stage_{}/block_{}/mlp/out", dense),
    "layernorm": ("norm", norm),
    "classifier": ("head", dense),
}
