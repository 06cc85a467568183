"""The architectures: one paper, one file, one public class and its presets. Importing this registers all of them."""

from smallvit.models.cait import CaiT
from smallvit.models.crossformer import CrossFormer
from smallvit.models.crossvit import CrossViT
from smallvit.models.cvt import CvT
from smallvit.models.deepvit import DeepViT
from smallvit.models.hybrid_vit import HybridViT
from smallvit.models.keras_vit import KerasViT
from smallvit.models.levit import LeViT
from smallvit.models.nest import NesT
from smallvit.models.pit import PiT
from smallvit.models.regionvit import RegionViT
from smallvit.models.scalable_vit import ScalableViT
from smallvit.models.simple_vit import SimpleViT
from smallvit.models.swin import Swin
from smallvit.models.t2t_vit import T2TViT
from smallvit.models.twins_svt import TwinsSVT
from smallvit.models.vit import (
    SLViT,
    ViT,
)

__all__ = [
    "CaiT",
    "CrossFormer",
    "CrossViT",
    "CvT",
    "DeepViT",
    "HybridViT",
    "KerasViT",
    "LeViT",
    "NesT",
    "PiT",
    "RegionViT",
    "SLViT",
    "ScalableViT",
    "SimpleViT",
    "Swin",
    "T2TViT",
    "TwinsSVT",
    "ViT",
]
