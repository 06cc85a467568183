"""The models of benchmarks.peers: ours, and the same in torch with the same sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import benchmarks.torch_peers  # noqa: F401, first: it makes the next imports work

# ruff: isort: off
import timm
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from transformers import CvtConfig, CvtForImageClassification
from vit_pytorch.crossformer import CrossFormer as TorchCrossFormer
from vit_pytorch.deepvit import DeepViT as TorchDeepViT
from vit_pytorch.regionvit import RegionViT as TorchRegionViT
from vit_pytorch.scalable_vit import ScalableViT as TorchScalableViT
from vit_pytorch.simple_vit import SimpleViT as TorchSimpleViT
from vit_pytorch.vit_for_small_dataset import ViT as TorchSLViT
from vit_pytorch.vit_with_patch_merger import ViT as TorchPatchMerger

import smallvit
from benchmarks.torch_t2t import TorchT2T

CLASSES = 100
_SL = dict(image_size=32, patch_size=4, dim=192, depth=9, heads=12, dim_head=16, mlp_dim=384)
# vit-pytorch shifts by one pixel along the axes, and so does our side here; the cost is that of the paper's shifts.
_OURS = dict(spt="cardinal", spt_shift=1, lsa=True, qkv_bias=False, norm_eps=1e-5)
_LUCID = dict(patch_norm=True, qkv_bias=False, norm_eps=1e-5)  # as vit-pytorch has it
_TINY = dict(image_size=224, patch_size=16, dim=192, depth=12, heads=3, mlp_dim=768)
_SIMPLE = dict(image_size=224, patch_size=16, dim=384, depth=12, heads=6, mlp_dim=1536)
_DEEP = dict(image_size=224, patch_size=16, dim=384, depth=16, heads=12, mlp_dim=1152, dim_head=32)
_REGION = dict(dim=(64, 128, 256, 512), depth=(2, 2, 8, 2), window_size=7)
_MERGER = dict(patch_merge_layer=6, patch_merge_num_tokens=8)
_T2T = dict(dim=256, depth=7, heads=4, mlp_dim=512)


@dataclass(frozen=True)
class Peer:
    size: int
    batch: int
    ours: Callable[[], Any]
    theirs: Callable[[], torch.nn.Module]
    differs: str = ""  # how theirs differs, where it computes something else at about the same cost


class Logits(torch.nn.Module):
    """The logits alone of a model of transformers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)


def _timm(name: str, theirs: str, batch: int, size: int = 224) -> Peer:
    fields = dict(num_classes=CLASSES, drop_path=0.0)
    if name.startswith("levit"):
        fields["num_distill_classes"] = "same"
    return Peer(
        size,
        batch,
        lambda: smallvit.create_model(name, **fields),
        lambda: timm.create_model(theirs, num_classes=CLASSES, drop_path_rate=0.0),
    )


PEERS = {
    "sl_vit_small_data": Peer(
        32,
        128,
        lambda: smallvit.ViT(num_classes=CLASSES, **_SL, **_OURS),
        lambda: TorchSLViT(num_classes=CLASSES, **_SL),
    ),
    "vit_tiny_patch16": _timm("vit_tiny_patch16", "vit_tiny_patch16_224", 16),
    "swin_tiny": _timm("swin_tiny", "swin_tiny_patch4_window7_224", 8),
    "cait_xxs24": _timm("cait_xxs24", "cait_xxs24_224", 8),
    "pit_s": _timm("pit_s", "pit_s_224", 8),
    "twins_svt_small": _timm("twins_svt_small", "twins_svt_small", 8),
    "levit_128s": _timm("levit_128s", "levit_128s", 32),
    "crossvit_tiny": _timm("crossvit_tiny", "crossvit_tiny_240", 8, 240),
    "nest_tiny": _timm("nest_tiny", "nest_tiny_jx", 4),
    "vit_parallel": Peer(
        224,
        8,
        lambda: smallvit.ViT(num_classes=CLASSES, **{**_TINY, "depth": 6}, num_parallel_branches=2, layer_scale=1.0),
        lambda: VisionTransformer(
            num_classes=CLASSES, embed_dim=192, depth=6, num_heads=3, block_fn=ParallelThingsBlock, init_values=1.0
        ),
    ),
    "cvt_13": Peer(
        224,
        4,
        lambda: smallvit.create_model("cvt_13", num_classes=CLASSES, drop_path=0.0),
        lambda: Logits(CvtForImageClassification(CvtConfig(num_labels=CLASSES, drop_path_rate=[0.0, 0.0, 0.0]))),
    ),
    "simple_vit_small_patch16": Peer(
        224,
        4,
        lambda: smallvit.SimpleViT(num_classes=CLASSES, **_SIMPLE, **_LUCID),
        lambda: TorchSimpleViT(num_classes=CLASSES, **_SIMPLE),
    ),
    "patch_merger": Peer(
        224,
        16,
        lambda: smallvit.ViT(num_classes=CLASSES, **_TINY, **_LUCID, **_MERGER, dim_head=64, pool="mean"),
        lambda: TorchPatchMerger(num_classes=CLASSES, **_TINY, **_MERGER),
    ),
    "deepvit_s": Peer(
        224,
        4,
        lambda: smallvit.DeepViT(num_classes=CLASSES, **_DEEP, **_LUCID),
        lambda: TorchDeepViT(num_classes=CLASSES, **_DEEP),
    ),
    "regionvit_tiny": Peer(
        224,
        4,
        lambda: smallvit.RegionViT(
            num_classes=CLASSES, **_REGION, heads=4, dim_head=32, plain_downsample=True, qkv_bias=False, norm_eps=1e-5
        ),
        lambda: TorchRegionViT(num_classes=CLASSES, **_REGION),
    ),
    "crossformer_tiny": Peer(
        224,
        4,
        lambda: smallvit.create_model("crossformer_tiny", num_classes=CLASSES, depth=(2, 2, 8, 4), drop_path=0.0),
        lambda: TorchCrossFormer(num_classes=CLASSES, depth=(1, 1, 4, 2)),
        "no biases in q, k and v, no norm between stages; depths of (2, 2, 8, 4) on both sides",
    ),
    "scalable_vit_small": Peer(
        224,
        4,
        lambda: smallvit.create_model(
            "scalable_vit_small", num_classes=CLASSES, depth=(2, 2, 8, 2), head_hidden=None, drop_path=0.0
        ),
        lambda: TorchScalableViT(
            num_classes=CLASSES,
            dim=64,
            heads=(2, 4, 8, 16),
            depth=(1, 1, 4, 1),
            ssa_dim_key=(40, 40, 40, 32),
            reduction_factor=(8, 4, 2, 1),
            window_size=7,
        ),
        "a full convolution where the paper has a depthwise one; depths of (2, 2, 8, 2) on both sides",
    ),
    "t2t_vit_7": Peer(
        224,
        4,
        lambda: smallvit.create_model("t2t_vit_7", num_classes=CLASSES),
        lambda: TorchT2T(num_classes=CLASSES, **_T2T),
        "code of ours with the same shapes, for no package has the paper's token dimension",
    ),
}
