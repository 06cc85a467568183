"""T2T-ViT in torch, for the benchmark: no package has it with the paper's token dimension.

vit-pytorch's reads the unfolded windows at their full width, 1,323 numbers a token where the paper has 64.
"""

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn


class TokenTransformer(nn.Module):
    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.scale = width**-0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, dim=-1)
        x = (v + self.out(F.scaled_dot_product_attention(q, k, v, scale=self.scale)))[:, 0]
        return x + self.mlp(x)


class TorchT2T(nn.Module):
    def __init__(self, num_classes: int, dim: int, depth: int, heads: int, mlp_dim: int, token_dim: int = 64) -> None:
        super().__init__()
        self.splits = nn.ModuleList([nn.Unfold(7, stride=4, padding=2), *(nn.Unfold(3, 1, 1, 2) for _ in range(2))])
        self.tokens = nn.ModuleList([TokenTransformer(width, token_dim) for width in (147, 9 * token_dim)])
        self.dense = nn.Linear(9 * token_dim, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.register_buffer("positions", torch.randn(1, 197, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, mlp_dim / dim, qkv_bias=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for i, split in enumerate(self.splits):
            if i:
                x = self.tokens[i - 1](x)
                side = int(x.shape[1] ** 0.5)
                x = x.transpose(1, 2).reshape(len(x), -1, side, side)
            x = split(x).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.dense(x)], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))
