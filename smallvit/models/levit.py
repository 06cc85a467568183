"""LeViT (https://arxiv.org/abs/2104.01136): a few convolutions, then attention on shrinking grids, made for speed."""

import math
from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit.layers import (
    Attend,
    BatchNorm,
    Block,
    Classifier,
    ConvNorm,
    Dense,
    DropPath,
    Factory,
    LSAOption,
    Stage,
    pool_tokens,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    pair,
    per_stage,
    shift_image,
    window_offsets,
)
from smallvit.registry import register


class LeViT(Classifier, kw_only=True):
    """With `num_distill_classes`, a second head learns from a teacher; `method="both_heads"` returns both logits.

    The output is their mean if the classes are the same, else that of the first head.
    """

    image_size: Size
    dim: int | tuple[int, ...]
    depth: int | tuple[int, ...]
    heads: int | tuple[int, ...]
    mlp_mult: int = 2
    stages: int = 3
    stem_depth: int = 4  # convolutions before the first stage; each halves the image
    dim_key: int = 32
    dim_value: int = 64
    dropout: float = 0.0
    drop_path: float = 0.0  # the same rate in every block
    num_distill_classes: int | Literal["same"] | None = None
    residual_init: float = 0.0  # initial scale of the last BatchNorm of each residual branch
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    def setup(self) -> None:
        super().setup()
        self.norm = BatchNorm(dtype=self.dtype)
        distilled = self.num_classes if self.num_distill_classes == "same" else self.num_distill_classes
        distilled = distilled if self.num_classes else None
        self.distill_head = Dense(distilled, dtype=self.dtype) if distilled else None
        self.distill_norm = BatchNorm(dtype=self.dtype) if distilled else None

    def __call__(self, image: Images, *, train: bool = False) -> Float[Array, "b k"]:
        scores, distilled = self.both_heads(image, train=train)
        if distilled is None or distilled.shape != scores.shape:
            return scores
        return (scores + distilled) / 2

    def both_heads(
        self, image: Images, *, train: bool = False
    ) -> tuple[Float[Array, "b k"], Float[Array, "b j"] | None]:
        """The logits of the classes, and those for distillation."""
        pooled = pool_tokens(self.features(image, train=train), self.pool)
        x = self.norm(pooled, train=train)
        if self.head is None:
            return x, None
        if self.distill_head is None or self.distill_norm is None:
            return self.head(x), None
        return self.head(x), self.distill_head(self.distill_norm(pooled, train=train))

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        """The tokens before the head. Its BatchNorm comes after the mean, whose moments it needs."""
        image = check_image(image, self.image_size, self.dtype)
        dims, depths, heads = (per_stage(name, getattr(self, name), self.stages) for name in ("dim", "depth", "heads"))
        narrowest = 2 ** (self.stem_depth - 1)
        if dims[0] % narrowest or any(dim % self.dim_key for dim in dims[:-1]):
            raise ValueError(
                f"dim={dims}: the first must be divisible by {narrowest}, all but the last by dim_key={self.dim_key}"
            )
        linear = partial(DenseNorm, dtype=self.dtype)
        attention = partial(
            LeViTAttention,
            dropout=self.dropout,
            linear=linear,
            attend=partial(Attend, lsa=self.lsa),
        )

        x = shift_image(image, 2, spt=self.spt, shift=self.spt_shift)
        for i in range(self.stem_depth):
            x = x if i == 0 else jax.nn.hard_swish(x)
            dim = dims[0] // 2 ** (self.stem_depth - 1 - i)
            x = ConvNorm(dim, 3, 2, 1, dtype=self.dtype, name=f"stem_{i}")(x, train=train)
        for stage, dim in enumerate(dims):
            if stage:
                wide = partial(attention, dim, dims[stage - 1] // self.dim_key, self.dim_key, 2 * self.dim_value)
                x = wide(stride=2, name=f"down_{stage}")(x, train=train)
                mlp = LeViTMLP(2 * dim, self.dropout, self.residual_init, linear, name=f"down_{stage}_mlp")
                x = x + DropPath(self.drop_path, name=f"down_{stage}_drop")(mlp(x, train=train), train=train)
            block = partial(
                Block,
                attention=partial(
                    attention, dim, heads[stage], self.dim_key, self.dim_value, scale_init=self.residual_init
                ),
                mlp=partial(LeViTMLP, self.mlp_mult * dim, self.dropout, self.residual_init, linear),
                norm=None,
                drop_path=self.drop_path,
            )
            x = Stage((block,) * depths[stage], name=f"stage_{stage}")(x, train=train)
        return rearrange(x, "b h w d -> b (h w) d")


class DenseNorm(nn.Module):
    """A Dense without bias, then a BatchNorm."""

    features: int
    scale_init: float = 1.0
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"], *, train: bool = False) -> Float[Array, "*lead k"]:
        x = Dense(self.features, use_bias=False, dtype=self.dtype, name="dense")(x)
        return BatchNorm(self.scale_init, dtype=self.dtype, name="norm")(x, train=train)


class LeViTAttention(nn.Module):
    """Attention with values wider than its keys; with a stride, only every other token is a query."""

    dim: int
    heads: int
    dim_key: int
    dim_value: int
    stride: int = 1
    scale_init: float = 1.0
    dropout: float = 0.0
    linear: Factory = DenseNorm
    attend: Factory = Attend

    @nn.compact
    def __call__(self, x: Float[Array, "b h w d"], *, train: bool = False) -> Float[Array, "b i j k"]:
        whole, grid = self.stride == 1, (x.shape[1], x.shape[2])
        widths = [self.dim_key, self.dim_value] if not whole else [self.dim_key, self.dim_key, self.dim_value]
        mixed = self.linear(self.heads * sum(widths), name="qkv" if whole else "kv")(x, train=train)
        parts = [rearrange(mixed, "b h w e -> b (h w) e")]  # queries, keys and values are concatenated within each head
        asking = x[:, :: self.stride, :: self.stride]
        if not whole:
            q = self.linear(self.heads * self.dim_key, name="q")(asking, train=train)
            parts = [rearrange(q, "b h w e -> b (h w) e"), *parts]
        bias = partial(DistanceBias, self.heads, grid, self.stride)
        attend = self.attend(dropout=self.dropout, bias=bias, name="attend")
        x = attend(*parts, heads=self.heads, values=self.dim_value, same_tokens=whole, train=train)
        x = jax.nn.hard_swish(rearrange(x, "b (h w) e -> b h w e", h=asking.shape[1]))
        x = self.linear(self.dim, self.scale_init, name="out")(x, train=train)
        return nn.Dropout(self.dropout, deterministic=not train, name="dropout")(x)


class DistanceBias(nn.Module):
    """A learned bias per head and distance, down and across, between a query and a key."""

    heads: int
    grid: tuple[int, int]
    stride: int

    @nn.compact
    def __call__(self) -> Float[Array, "h n m"]:
        table = self.param("distances", nn.initializers.zeros, (*self.grid, self.heads))
        rows, columns = np.mgrid[: self.grid[0], : self.grid[1]].reshape(2, -1)
        asking = (rows % self.stride == 0) & (columns % self.stride == 0)
        down, across = (np.abs(offsets[asking]) for offsets in window_offsets(self.grid))
        return rearrange(table[down, across], "n m h -> h n m")


class LeViTMLP(nn.Module):
    hidden: int
    dropout: float
    scale_init: float
    linear: Factory

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"], *, train: bool = False) -> Float[Array, "*lead d"]:
        dim = x.shape[-1]
        x = jax.nn.hard_swish(self.linear(self.hidden, name="in")(x, train=train))
        x = nn.Dropout(self.dropout, deterministic=not train, name="dropout")(x)
        return self.linear(dim, self.scale_init, name="out")(x, train=train)


def _down_to_8(image_size: Size) -> int:
    """The number of halvings that leaves about 8 tokens per side."""
    return max(round(math.log2(min(pair(image_size)) / 8)), 1)


_levit = dict(image_size=224, num_distill_classes="same")
_narrow = dict(dim_key=16, dim_value=32, **_levit)

register(
    LeViT,
    levit_128s=dict(dim=(128, 256, 384), depth=(2, 3, 4), heads=(4, 6, 8), **_narrow),
    levit_128=dict(dim=(128, 256, 384), depth=4, heads=(4, 8, 12), **_narrow),
    levit_192=dict(dim=(192, 288, 384), depth=4, heads=(3, 5, 6), **_levit),
    levit_256=dict(dim=(256, 384, 512), depth=4, heads=(4, 6, 8), **_levit),
    levit_384=dict(dim=(384, 512, 768), depth=4, heads=(6, 9, 12), drop_path=0.1, **_levit),
    # Trains in minutes on a CPU.
    levit_tiny_data=dict(
        image_size=32,
        stem_depth=_down_to_8,
        dim=(64, 96, 128),
        depth=2,
        heads=(4, 6, 8),
        dim_key=16,
        dim_value=32,
    ),
)
