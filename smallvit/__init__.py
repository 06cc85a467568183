"""Vision transformers that learn from small image data sets, from scratch, in JAX and Flax."""

from typing import TYPE_CHECKING

from smallvit.common.lazy import lazy

if TYPE_CHECKING:
    from smallvit.common.env import fast_env
    from smallvit.convert.load import load_pretrained
    from smallvit.data import load_data
    from smallvit.evaluation import Evaluation, evaluate_model
    from smallvit.explanation.pictures import Explainer
    from smallvit.exporting.formats import export_model
    from smallvit.exporting.hub import pull, push
    from smallvit.exporting.nnx import to_nnx
    from smallvit.layers import SPT, PatchMerger, resample_positions
    from smallvit.models import (
        CaiT,
        CrossFormer,
        CrossViT,
        CvT,
        DeepViT,
        HybridViT,
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
    from smallvit.runs.prediction import Predictor, predict_files
    from smallvit.runs.saved import from_pretrained
    from smallvit.training.comparison import compare
    from smallvit.training.config import CompareConfig, TrainConfig
    from smallvit.training.loop import train

__version__ = "0.1.0"

__all__ = [
    "SPT",
    "CaiT",
    "CompareConfig",
    "CrossFormer",
    "CrossViT",
    "CvT",
    "DeepViT",
    "Evaluation",
    "Explainer",
    "HybridViT",
    "LeViT",
    "NesT",
    "PatchMerger",
    "PiT",
    "Predictor",
    "RegionViT",
    "SLViT",
    "ScalableViT",
    "SimpleViT",
    "Swin",
    "T2TViT",
    "TrainConfig",
    "TwinsSVT",
    "ViT",
    "compare",
    "create_model",
    "evaluate_model",
    "export_model",
    "fast_env",
    "from_pretrained",
    "list_models",
    "load_data",
    "load_pretrained",
    "predict_files",
    "pull",
    "push",
    "resample_positions",
    "to_nnx",
    "train",
]
__getattr__, __dir__ = lazy(__name__, __file__)
