"""One paper, one file, one public class and its presets; importing this registers all of them."""

from smallvit.models.cvt import CvT
from smallvit.models.levit import LeViT
from smallvit.models.nest import NesT
from smallvit.models.regionvit import RegionViT
from smallvit.models.simple_vit import SimpleViT
from smallvit.models.vit import SLViT, ViT

__all__ = ["CvT", "LeViT", "NesT", "RegionViT", "SLViT", "SimpleViT", "ViT"]
