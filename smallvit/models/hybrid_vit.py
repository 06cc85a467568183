"""HybridViT, our own model for few images and short training: convolutions make the tokens, attention compares them.

Its parts are known: a convolutional stem (https://arxiv.org/abs/2106.14881), here a long one of residual pairs
(https://arxiv.org/abs/1512.03385), in some presets with max pooling and a stage after the blocks, as in the ResNet-9 of
speed runs, a depthwise convolution in the MLP (https://arxiv.org/abs/2210.05958), mean pooling,
and SPT and LSA (https://arxiv.org/abs/2112.13492) as in every model here. docs/results.md has the gain of each part.
"""

from functools import partial
from math import prod

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit.layers import (
    Attend,
    Attention,
    Block,
    Classifier,
    Conv,
    ConvNorm,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    PositionEmbed,
    ramp,
)
from smallvit.ops import Images, Size, SPTOption, check_image, pair, per_stage, shift_image
from smallvit.registry import register


class HybridViT(Classifier, kw_only=True):
    image_size: Size
    widths: tuple[int, ...]  # channels of the convolutional stages; the pixels of the last one are the tokens
    strides: tuple[Size, ...]  # of the first convolution of each stage, or of the max pooling after it
    conv_depth: int | tuple[int, ...]  # residual pairs in each stage
    depth: int
    heads: int
    mlp_dim: int
    max_pool: bool = False  # whether stages after the first have max pooling instead of a stride
    last_width: int | None = None  # channels of a last stage after the blocks: max pooling by 2 and a residual pair
    dropout: float = 0.0
    drop_path: float = 0.0  # of the last block, growing linearly from 0 in the first
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        if len(self.strides) != len(self.widths):
            raise ValueError(f"strides={self.strides} must be as many as widths={self.widths}: one per stage")
        strides = [pair(stride) for stride in self.strides]
        token = prod(down for down, _ in strides), prod(across for _, across in strides)
        norm, dense = partial(LayerNorm, dtype=self.dtype), partial(Dense, dtype=self.dtype)

        x = shift_image(image, token, spt=self.spt, shift=self.spt_shift)
        pairs = per_stage("conv_depth", self.conv_depth, len(self.widths))
        for stage, (width, stride) in enumerate(zip(self.widths, strides, strict=True)):
            pooled = self.max_pool and stage > 0
            x = self._convolve(width, stride, pooled, f"conv_{stage}")(x, train=train)
            for i in range(pairs[stage]):
                x = ConvPair(dtype=self.dtype, name=f"conv_{stage}_pair_{i}")(x, train=train)

        grid = x.shape[1], x.shape[2]
        x = PositionEmbed(grid, name="positions")(rearrange(x, "b h w d -> b (h w) d"))
        attention = partial(
            Attention, self.heads, dropout=self.dropout, dense=dense, attend=partial(Attend, lsa=self.lsa)
        )
        mlp = partial(LocalMLP, self.mlp_dim, grid, self.dropout, dense, self.dtype)
        for i, rate in enumerate(ramp(self.drop_path, self.depth)):
            x = Block(attention, mlp, norm, drop_path=rate, name=f"block_{i}")(x, train=train)
        if self.last_width is not None:
            x = rearrange(norm(name="norm_blocks")(x), "b (h w) d -> b h w d", h=grid[0])
            x = self._convolve(self.last_width, (2, 2), True, "conv_last")(x, train=train)
            x = ConvPair(dtype=self.dtype, name="conv_last_pair")(x, train=train)
            x = rearrange(x, "b h w d -> b (h w) d")
        return norm(name="norm")(x)

    def _convolve(self, width: int, stride: tuple[int, int], pooled: bool, name: str) -> ConvNorm:
        """A 3 x 3 convolution with max pooling, or with a stride, and larger if that would skip pixels."""
        if pooled:
            return ConvNorm(width, 3, 1, 1, relu=True, pool=stride, dtype=self.dtype, name=name)
        size = max(3, 2 * stride[0] - 1), max(3, 2 * stride[1] - 1)
        return ConvNorm(width, size, stride, (size[0] // 2, size[1] // 2), relu=True, dtype=self.dtype, name=name)


class ConvPair(nn.Module):
    """Two convolutions with a shortcut."""

    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], *, train: bool = False) -> Float[Array, "b h w c"]:
        conv = partial(ConvNorm, x.shape[-1], 3, 1, 1, relu=True, dtype=self.dtype)
        return conv(name="second")(conv(name="first")(x, train=train), x, train=train)


class LocalMLP(nn.Module):
    """An MLP with a depthwise convolution over the hidden tokens of the grid."""

    hidden: int
    grid: tuple[int, int]
    dropout: float = 0.0
    dense: Factory = Dense
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], *, train: bool = False) -> Float[Array, "b n d"]:
        drop = partial(nn.Dropout, self.dropout, deterministic=not train)
        dim = x.shape[-1]
        x = self.dense(self.hidden, gelu=True, name="in")(x)
        around = Conv(self.hidden, 3, 1, 1, depthwise=True, dtype=self.dtype, name="local")
        x = x + rearrange(around(rearrange(x, "b (h w) d -> b h w d", h=self.grid[0])), "b h w d -> b (h w) d")
        x = self.dense(dim, name="out")(drop(name="dropout_in")(x))
        return drop(name="dropout_out")(x)


def strides_for(image_size: Size) -> tuple[Size, ...]:
    """Strides that leave at least 7 x 7 tokens from 28 pixels on: 8 x 8 for 32 and for 64 pixels."""
    first = [min(max(side // 28, 1), 4) for side in pair(image_size)]
    return (first[0], first[1]), 2, 2


_sizes = dict(image_size=64, strides=strides_for, conv_depth=(0, 1, 0), max_pool=True, depth=2)
register(
    HybridViT,
    hybrid_vit_small=dict(**_sizes, widths=(16, 32, 64), heads=2, mlp_dim=128, last_width=128),
    hybrid_vit_base=dict(**_sizes, widths=(32, 64, 128), heads=4, mlp_dim=256, last_width=256),
)
