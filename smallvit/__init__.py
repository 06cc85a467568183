"""Vision transformers that learn from small image data sets, from scratch, in JAX and Flax."""

from smallvit.layers import SPT, PatchMerger, resample_positions
from smallvit.models import CaiT, CrossViT, DeepViT, PiT, SimpleViT, SLViT, T2TViT, ViT
from smallvit.registry import create_model, list_models

__version__ = "0.1.0"

__all__ = [
    "SPT",
    "CaiT",
    "CrossViT",
    "DeepViT",
    "PatchMerger",
    "PiT",
    "SLViT",
    "SimpleViT",
    "T2TViT",
    "ViT",
    "create_model",
    "list_models",
    "resample_positions",
]
