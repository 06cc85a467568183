"""One paper, one file, one public class and its presets; importing this registers all of them."""

from smallvit.models.cait import CaiT
from smallvit.models.crossvit import CrossViT
from smallvit.models.deepvit import DeepViT
from smallvit.models.pit import PiT
from smallvit.models.simple_vit import SimpleViT
from smallvit.models.t2t_vit import T2TViT
from smallvit.models.vit import SLViT, ViT

__all__ = ["CaiT", "CrossViT", "DeepViT", "PiT", "SLViT", "SimpleViT", "T2TViT", "ViT"]
