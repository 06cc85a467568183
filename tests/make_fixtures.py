"""Makes tests/fixtures/*.npz: tiny models of other zoos with random weights, an input, and what they answer.

    .venv-peers/bin/python -m tests.make_fixtures [names]        (`make .venv-peers/installed` makes that environment)

Each file holds `image`, `output`, and the reference's own state under `state/`. Every parameter is drawn at random,
norms and biases too, so that no entry can be dropped or swapped unseen.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import benchmarks.torch_peers  # noqa: F401, first: it makes the next imports work

from timm.models.levit import LevitDistilled  # isort: skip
from timm.models.nest import Nest  # isort: skip
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer  # isort: skip
from transformers import CvtConfig, CvtForImageClassification  # isort: skip
from vit_pytorch import vit_for_small_dataset, vit_with_patch_merger  # isort: skip
from vit_pytorch.regionvit import RegionViT  # isort: skip
from vit_pytorch.simple_vit import SimpleViT  # isort: skip

FOLDER = Path(__file__).parent / "fixtures"
SIZES = dict(image_size=16, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24)
TIMM = dict(img_size=16, patch_size=4, num_classes=5, embed_dim=16, depth=2, num_heads=2, mlp_ratio=1.5)


def references() -> dict[str, torch.nn.Module]:
    return {
        "timm_vit": VisionTransformer(**TIMM),
        "timm_vit_mean": VisionTransformer(**TIMM, class_token=False, global_pool="avg", fc_norm=False),
        "timm_vit_wide": VisionTransformer(**{**TIMM, "img_size": (8, 24)}),
        "timm_vit_parallel": VisionTransformer(**TIMM, block_fn=ParallelThingsBlock, init_values=0.1),
        "vit_pytorch_small_dataset": vit_for_small_dataset.ViT(**SIZES),
        "vit_pytorch_patch_merger": vit_with_patch_merger.ViT(**SIZES, patch_merge_layer=1, patch_merge_num_tokens=3),
        "vit_pytorch_simple_vit": SimpleViT(**SIZES),
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
        scale = 1.0 / p[0].numel() ** 0.5 if p.ndim > 1 else 0.3
        p.data = centre + scale * drawn
    for name, moment in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            drawn = 0.3 * torch.randn(moment.shape, generator=generator)
            moment.copy_(drawn.exp() if name.endswith("var") else drawn)


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for seed, (name, model) in enumerate(references().items()):
        if names and name not in names:
            continue
        generator = torch.Generator().manual_seed(seed)
        randomise(model, generator)
        size = {"timm_levit": (32, 48), "transformers_cvt": (24, 24)}.get(
            name, (8, 24) if name.endswith("wide") else (16, 16)
        )
        image = torch.randn(2, 3, *size, generator=generator)
        with torch.inference_mode():
            output = model.eval()(image)
            output = getattr(output, "logits", output)
        state = {f"state/{key}": value.numpy() for key, value in model.state_dict().items()}
        nhwc = image.permute(0, 2, 3, 1).numpy()
        np.savez_compressed(FOLDER / f"{name}.npz", image=nhwc, output=output.numpy(), **state)
        print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main(sys.argv[1:])
