"""One paper, one file, one public class and its presets; importing this registers all of them."""

from smallvit.models.crossformer import CrossFormer
from smallvit.models.scalable_vit import ScalableViT
from smallvit.models.simple_vit import SimpleViT
from smallvit.models.swin import Swin
from smallvit.models.twins_svt import TwinsSVT
from smallvit.models.vit import SLViT, ViT

__all__ = ["CrossFormer", "SLViT", "ScalableViT", "SimpleViT", "Swin", "TwinsSVT", "ViT"]
