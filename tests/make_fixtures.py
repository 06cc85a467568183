"""Makes tests/fixtures/*.npz: tiny models of other zoos with random weights, an input, and what they answer.

    .venv-peers/bin/python -m tests.make_fixtures        (`make .venv-peers/installed` makes that environment)

Each file holds `image`, `output`, and the reference's own state under `state/`. Every parameter is drawn at random,
norms and biases too, so that no entry can be dropped or swapped unseen.
"""

from pathlib import Path

import numpy as np
import torch

import benchmarks.torch_peers  # noqa: F401, first: it makes the next imports work

from timm.models.cait import Cait  # isort: skip
from timm.models.crossvit import CrossVit  # isort: skip
from timm.models.pit import PoolingVisionTransformer  # isort: skip
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer  # isort: skip
from vit_pytorch import vit_for_small_dataset, vit_with_patch_merger  # isort: skip
from vit_pytorch.deepvit import DeepViT  # isort: skip
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
        "timm_cait": Cait(**TIMM, mlp_ratio_token_only=1.5),
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
    }


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, p in model.named_parameters():
        drawn = torch.randn(p.shape, generator=generator)
        centre = 1.0 if p.ndim == 1 and name.endswith("weight") else 0.0
        scale = 1.0 / p[0].numel() ** 0.5 if p.ndim > 1 else 0.3
        p.data = centre + scale * drawn


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for seed, (name, model) in enumerate(references().items()):
        generator = torch.Generator().manual_seed(seed)
        randomise(model, generator)
        size = (8, 24) if name.endswith("wide") else (16, 16)
        image = torch.randn(2, 3, *size, generator=generator)
        with torch.inference_mode():
            output = model.eval()(image)
        state = {f"state/{key}": value.numpy() for key, value in model.state_dict().items()}
        nhwc = image.permute(0, 2, 3, 1).numpy()
        np.savez_compressed(FOLDER / f"{name}.npz", image=nhwc, output=output.numpy(), **state)
        print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
