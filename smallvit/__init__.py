"""Vision transformers that learn from small image data sets, from scratch, in JAX and Flax."""

from smallvit.layers import SPT, PatchMerger, resample_positions
from smallvit.models import CvT, LeViT, NesT, RegionViT, SimpleViT, SLViT, ViT
from smallvit.registry import create_model, list_models

__version__ = "0.1.0"

__all__ = [
    "SPT",
    "CvT",
    "LeViT",
    "NesT",
    "PatchMerger",
    "RegionViT",
    "SLViT",
    "SimpleViT",
    "ViT",
    "create_model",
    "list_models",
    "resample_positions",
]
