"""Makes tests/fixtures/*.npz: tiny models of other zoos with random weights, an input, and their outputs.

    .venv-peers/bin/python -m tests.make_fixtures [names]        (`make .venv-peers/installed` makes that environment)

Each file holds `image`, `output`, and the reference's own state under `state/`. Every parameter is random, including
norms and biases, so that no entry can be dropped or swapped unnoticed.
"""

import sys
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

import benchmarks.torch_peers  # noqa: F401, first: it makes the next imports work

# ruff: isort: off
from timm.models.cait import Cait
from timm.models.crossvit import CrossVit
from timm.models.levit import LevitDistilled
from timm.models.nest import Nest
from timm.models.pit import PoolingVisionTransformer
from timm.models.swin_transformer import SwinTransformer
from timm.models.twins import Twins
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from transformers import CvtConfig, CvtForImageClassification
from vit_pytorch import vit, vit_for_small_dataset, vit_with_patch_merger
from vit_pytorch.deepvit import DeepViT
from vit_pytorch.regionvit import RegionViT
from vit_pytorch.simple_vit import SimpleViT

FOLDER = Path(__file__).parent / "fixtures"
IMAGES = {
    "timm_vit_wide": (8, 24),
    "timm_swin_wide": (8, 24),
    "timm_levit": (32, 48),
    "transformers_cvt": (24, 24),
}
SIZES = dict(image_size=16, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24)
SWIN = dict(
    img_size=16, patch_size=2, num_classes=5, embed_dim=8, depths=(2, 2), num_heads=(2, 4), window_size=4, mlp_ratio=2
)
TIMM = dict(img_size=16, patch_size=4, num_classes=5, embed_dim=16, depth=2, num_heads=2, mlp_ratio=1.5)


def references() -> dict[str, torch.nn.Module]:
    return {
        "timm_vit": VisionTransformer(**TIMM),
        "timm_vit_mean": VisionTransformer(**TIMM, class_token=False, global_pool="avg", fc_norm=False),
        "timm_vit_wide": VisionTransformer(**{**TIMM, "img_size": (8, 24)}),
        "timm_vit_parallel": VisionTransformer(**TIMM, block_fn=ParallelThingsBlock, init_values=0.1),
        "vit_pytorch_vit": vit.ViT(**SIZES),
        "vit_pytorch_vit_mean": vit.ViT(**SIZES, pool="mean"),
        "vit_pytorch_small_dataset": vit_for_small_dataset.ViT(**SIZES),
        "vit_pytorch_patch_merger": vit_with_patch_merger.ViT(**SIZES, patch_merge_layer=1, patch_merge_num_tokens=3),
        "vit_pytorch_simple_vit": SimpleViT(**SIZES),
        "timm_swin": SwinTransformer(**SWIN),
        "timm_swin_wide": SwinTransformer(**{**SWIN, "img_size": (8, 24), "window_size": (4, 6)}),
        "timm_cait": Cait(**TIMM, mlp_ratio_token_only=1.5),
        "timm_nest": Nest(
            img_size=16,
            patch_size=2,
            num_classes=5,
            num_levels=2,
            embed_dims=(8, 16),
            num_heads=(2, 4),
            depths=(1, 2),
            pad_type="same",  # as the authors pad, and timm's nest_*_jx
        ),
        "timm_levit": LevitDistilled(
            img_size=(32, 48), num_classes=5, embed_dim=(8, 16), key_dim=4, depth=(1, 1), num_heads=(1, 2)
        ),
        "timm_twins_svt": Twins(
            img_size=16,
            patch_size=1,
            num_classes=5,
            embed_dims=(4, 4, 8, 8),
            num_heads=(1, 1, 2, 2),
            mlp_ratios=(2, 2, 2, 2),
            depths=(2, 2, 2, 2),
            sr_ratios=(8, 4, 2, 1),
            wss=(4, 2, 4, 2),
        ),
        "timm_pit": PoolingVisionTransformer(
            img_size=16,
            patch_size=4,
            stride=2,
            base_dims=(8, 8),
            depth=(1, 2),
            heads=(1, 2),
            mlp_ratio=2,
            num_classes=5,
        ),
        "vit_pytorch_deepvit": DeepViT(**SIZES),
        "timm_crossvit": CrossVit(
            img_size=16,
            img_scale=(1.0, 0.75),
            patch_size=(4, 6),
            embed_dim=(8, 12),
            depth=((1, 1, 0), (1, 1, 0)),
            num_heads=(2, 2),
            mlp_ratio=(1.5, 1.5, 1),
            num_classes=5,
        ),
        "transformers_cvt": CvtForImageClassification(
            CvtConfig(
                num_labels=5, embed_dim=(4, 4, 6), num_heads=(1, 2, 3), depth=(1, 2, 3), mlp_ratio=(2.0, 2.0, 2.0)
            )
        ),
        "vit_pytorch_region_vit": RegionViT(num_classes=5, dim=4, depth=(1, 2, 1, 1), window_size=2),
    }


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, p in model.named_parameters():
        drawn = torch.randn(p.shape, generator=generator)
        centre = 1.0 if p.ndim == 1 and name.endswith("weight") else 0.0
        scale = (p.shape[0] / max(p.numel(), 1)) ** 0.5 if p.ndim > 1 else 0.3
        p.data = centre + scale * drawn
    for name, moment in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            drawn = 0.3 * torch.randn(moment.shape, generator=generator)
            moment.copy_(drawn.exp() if name.endswith("var") else drawn)


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, model in references().items():
        if names and name not in names:
            continue
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        randomise(model, generator)
        image = torch.randn(2, 3, *IMAGES.get(name, (16, 16)), generator=generator)
        with torch.inference_mode():
            output = model.eval()(image)
            output = getattr(output, "logits", output)
        state = {f"state/{key}": value.numpy() for key, value in model.state_dict().items()}
        nhwc = image.permute(0, 2, 3, 1).numpy()
        np.savez_compressed(FOLDER / f"{name}.npz", image=nhwc, output=output.numpy(), **state)
        print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main(sys.argv[1:])
