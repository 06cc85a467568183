"""HybridViT in torch, with our sizes of `hybrid_vit_tiny` and our weights."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTHS, DEPTH, HEADS, HIDDEN = (16, 32, 64), 2, 2, 128


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


class HybridViT(nn.Module):
    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        first, inputs = max(size // 28, 1), 3
        self.stages = nn.ModuleList()
        for width, stride in zip(WIDTHS, (first, 2, 2), strict=True):
            pairs = [ConvNorm(width, width, 1) for _ in range(4)]
            self.stages.append(nn.ModuleList([ConvNorm(inputs, width, stride), *pairs]))
            inputs = width
        side = size // (4 * first)
        self.positions = nn.Parameter(torch.zeros(1, side * side, inputs))
        self.blocks = nn.ModuleList([Block(inputs, side) for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(inputs), nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stem, *pairs in self.stages:
            x = stem(x)
            for one, two in zip(pairs[::2], pairs[1::2], strict=True):
                x = two(one(x), x)
        x = x.permute(0, 2, 3, 1).flatten(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))

    def load(self, params: dict[str, Any], moments: dict[str, Any] | None = None) -> "HybridViT":
        """Takes over our parameters and, of a trained model, the moments of BatchNorm ("batch_stats")."""
        for stage, layers in enumerate(self.stages):
            for layer, found in zip(layers, _convolutions(params, stage), strict=True):
                _take(layer.conv, found["conv"])
                _take(layer.norm, found["norm"])
            if moments is not None:
                for layer, found in zip(layers, _convolutions(moments, stage), strict=True):
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
        _take(self.norm, params["norm"])
        _take(self.head, params["head"])
        return self


def _convolutions(variables: dict[str, Any], stage: int) -> list[dict[str, Any]]:
    pairs = [variables[f"conv_{stage}_pair_{i}"][which] for i in range(2) for which in ("first", "second")]
    return [variables[f"conv_{stage}"], *pairs]


def _take(layer: nn.Module, ours: dict[str, np.ndarray]) -> None:
    weight = np.asarray(ours["kernel"] if "kernel" in ours else ours["scale"])
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[weight.ndim]
    layer.weight.data.copy_(torch.tensor(weight.transpose(axes)))
    if "bias" in ours:
        layer.bias.data.copy_(torch.tensor(np.asarray(ours["bias"])))
