"""Vision transformers that learn from small image data sets, from scratch, in JAX and Flax."""

from smallvit.convert.load import load_pretrained
from smallvit.data import load_data
from smallvit.evaluate import Evaluation, evaluate_model
from smallvit.explained import Explainer
from smallvit.layers import SPT, PatchMerger, resample_positions
from smallvit.models import (
    CaiT,
    CrossFormer,
    CrossViT,
    CvT,
    DeepViT,
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
from smallvit.predict import Predictor, predict_files
from smallvit.registry import create_model, list_models
from smallvit.saved import from_pretrained

__version__ = "0.1.0"

__all__ = [
    "SPT",
    "CaiT",
    "CrossFormer",
    "CrossViT",
    "CvT",
    "DeepViT",
    "Evaluation",
    "Explainer",
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
    "TwinsSVT",
    "ViT",
    "create_model",
    "evaluate_model",
    "from_pretrained",
    "list_models",
    "load_data",
    "load_pretrained",
    "predict_files",
    "resample_positions",
]
