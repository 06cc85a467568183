"""Vision transformers that learn from small image data sets, from scratch, in JAX and Flax."""

from typing import TYPE_CHECKING

from smallvit.common.lazy import lazy

if TYPE_CHECKING:
    from smallvit.common.env import fast_env
    from smallvit.common.errors import Stopped
    from smallvit.convert.load import load_weights
    from smallvit.data.load import load_data
    from smallvit.evaluation import Evaluation, evaluate
    from smallvit.explanation.pictures import Explainer, explain
    from smallvit.exporting.formats import export
    from smallvit.exporting.hub import load, pull, push
    from smallvit.exporting.nnx import to_nnx
    from smallvit.layers import SPT, PatchMerger, resample_positions
    from smallvit.models import (
        CaiT,
        CrossFormer,
        CrossViT,
        CvT,
        DeepViT,
        HybridViT,
        KerasViT,
        LeViT,
        NesT,
        PiT,
        RegionViT,
        ScalableViT,
        SimpleViT,
        SLViT,
        Swin,
        T2TViT,
        TwinsSVT,
        ViT,
    )
    from smallvit.registry import create_model, list_models
    from smallvit.runs.prediction import Predictor, predict, predict_files
    from smallvit.runs.sorting import sort_into
    from smallvit.serving.server import serve
    from smallvit.training.callbacks import Callback
    from smallvit.training.config import CompareConfig, TrainConfig
    from smallvit.training.keywords import compare, train

__version__ = "0.1.0"

__all__ = [
    "SPT",
    "CaiT",
    "Callback",
    "CompareConfig",
    "CrossFormer",
    "CrossViT",
    "CvT",
    "DeepViT",
    "Evaluation",
    "Explainer",
    "HybridViT",
    "KerasViT",
    "LeViT",
    "NesT",
    "PatchMerger",
    "PiT",
    "Predictor",
    "RegionViT",
    "SLViT",
    "ScalableViT",
    "SimpleViT",
    "Stopped",
    "Swin",
    "T2TViT",
    "TrainConfig",
    "TwinsSVT",
    "ViT",
    "compare",
    "create_model",
    "evaluate",
    "explain",
    "export",
    "fast_env",
    "list_models",
    "load",
    "load_data",
    "load_weights",
    "predict",
    "predict_files",
    "pull",
    "push",
    "resample_positions",
    "serve",
    "sort_into",
    "to_nnx",
    "train",
]
__getattr__, __dir__ = lazy(__name__, __file__)
