"""HybridViT in torch, with our sizes of `hybrid_vit_small` and our weights."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTHS, DEPTH, HEADS, HIDDEN, LAST = (16, 32, 64), 2, 2, 128, 128


class ConvNorm(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(self.conv(x))
        return F.relu(x if shortcut is None else x + shortcut)


class Block(nn.Module):
    def __init__(self, dim: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp_in, self.mlp_out = nn.Linear(dim, HIDDEN), nn.Linear(HIDDEN, dim)
        self.local = nn.Conv2d(HIDDEN, HIDDEN, 3, 1, 1, groups=HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(b, n, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(b, n, d))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        image = hidden.reshape(b, self.side, self.side, HIDDEN).permute(0, 3, 1, 2)  # channels last, without a copy
        return x + self.mlp_out(hidden + self.local(image).permute(0, 2, 3, 1).reshape(hidden.shape))


class Stage(nn.Module):
    """A convolution, max pooling, and residual pairs."""

    def __init__(self, inputs: int, outputs: int, stride: int, pool: int, pairs: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(pool)
        self.convolutions = nn.ModuleList([ConvNorm(inputs, outputs, stride)])
        self.convolutions.extend(ConvNorm(outputs, outputs, 1) for _ in range(2 * pairs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *pairs = self.convolutions
        x = self.pool(first(x))
        for one, two in zip(pairs[::2], pairs[1::2], strict=True):
            x = two(one(x), x)
        return x


class HybridViT(nn.Module):
    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        first, (a, b, dim) = max(size // 28, 1), WIDTHS
        self.side = size // (4 * first)
        self.stem = nn.ModuleList([Stage(3, a, first, 1, 0), Stage(a, b, 1, 2, 1), Stage(b, dim, 1, 2, 0)])
        self.positions = nn.Parameter(torch.zeros(1, self.side**2, dim))
        self.blocks = nn.ModuleList([Block(dim, self.side) for _ in range(DEPTH)])
        self.norm_blocks = nn.LayerNorm(dim)
        self.last = Stage(dim, LAST, 1, 2, 1)
        self.norm, self.head = nn.LayerNorm(LAST), nn.Linear(LAST, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stem:
            x = stage(x)
        x = x.permute(0, 2, 3, 1).flatten(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm_blocks(x).reshape(-1, self.side, self.side, x.shape[-1]).permute(0, 3, 1, 2)
        return self.head(self.norm(self.last(x).permute(0, 2, 3, 1).flatten(1, 2)).mean(1))

    def load(self, params: dict[str, Any], moments: dict[str, Any] | None = None) -> "HybridViT":
        """Takes over our parameters and, of a trained model, the moments of BatchNorm ("batch_stats")."""
        for name, stage in [*((f"conv_{i}", stage) for i, stage in enumerate(self.stem)), ("conv_last", self.last)]:
            for layer, found in zip(stage.convolutions, _convolutions(params, name), strict=True):
                _take(layer.conv, found["conv"])
                _take(layer.norm, found["norm"])
            if moments is not None:
                for layer, found in zip(stage.convolutions, _convolutions(moments, name), strict=True):
                    layer.norm.running_mean.copy_(torch.tensor(found["norm"]["mean"]))
                    layer.norm.running_var.copy_(torch.tensor(found["norm"]["var"]))
        self.positions.data.copy_(torch.tensor(params["positions"]["grid"]).reshape(self.positions.shape))
        for i, block in enumerate(self.blocks):
            found = params[f"block_{i}"]
            _take(block.attention_norm, found["attention_norm"])
            _take(block.mlp_norm, found["mlp_norm"])
            _take(block.qkv, found["attention"]["qkv"])
            _take(block.out, found["attention"]["out"])
            _take(block.mlp_in, found["mlp"]["in"])
            _take(block.local, found["mlp"]["local"])
            _take(block.mlp_out, found["mlp"]["out"])
        for name in ("norm_blocks", "norm", "head"):
            _take(getattr(self, name), params[name])
        return self


def _convolutions(variables: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    """The first convolution of a stage, then those of its pairs."""
    pairs = [variables[name] for name in sorted(variables) if name.startswith(f"{stage}_pair")]
    return [variables[stage], *(pair[which] for pair in pairs for which in ("first", "second"))]


def _take(layer: nn.Module, ours: dict[str, np.ndarray]) -> None:
    weight = np.asarray(ours["kernel"] if "kernel" in ours else ours["scale"])
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[weight.ndim]
    layer.weight.data.copy_(torch.tensor(weight.transpose(axes)))
    if "bias" in ours:
        layer.bias.data.copy_(torch.tensor(np.asarray(ours["bias"])))
