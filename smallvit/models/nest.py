"""NesT (https://arxiv.org/abs/2105.12723): transformers inside blocks of the image, merged four to one."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit.layers import (
    MLP,
    Attend,
    Attention,
    Block,
    Classifier,
    Conv,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    PositionEmbed,
    Stage,
    patch_embed,
    ramp,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    grid_size,
    patch_of,
    per_stage,
    window_merge,
    window_partition,
)
from smallvit.registry import register


class NesT(Classifier, kw_only=True):
    image_size: Size
    patch_size: Size
    dim: int  # of the lowest level; doubles with each level
    heads: int  # of the lowest level; doubles with each level
    num_hierarchies: int
    block_repeats: int | tuple[int, ...]  # layers per level, from the lowest
    mlp_mult: int = 4
    dropout: float = 0.0
    drop_path: float = 0.0  # of the last layer, growing linearly from 0 in the first
    qkv_bias: bool = True
    norm_eps: float = 1e-6
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        h, w = grid_size(self.image_size, self.patch_size)
        blocks = 2 ** (self.num_hierarchies - 1)  # per side, at the lowest level
        if self.num_hierarchies < 1 or h % blocks or w % blocks:
            raise ValueError(
                f"a grid of {h} x {w} patches is not divisible into {blocks} x {blocks} blocks of "
                f"num_hierarchies={self.num_hierarchies}: change it, image_size or patch_size"
            )
        block_size = h // blocks, w // blocks  # the same at every level
        depths = per_stage("block_repeats", self.block_repeats, self.num_hierarchies)
        rates = iter(ramp(self.drop_path, sum(depths)))
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)

        x = patch_embed(
            self.dim,
            self.patch_size,
            spt=self.spt,
            shift=self.spt_shift,
            dense=dense,
            norm=partial(LayerNorm, dtype=self.dtype),
        )(image)
        for level, depth in enumerate(depths):
            dim = self.dim * 2**level
            if level:
                x = Aggregate(dim, norm, self.dtype, name=f"aggregate_{level}")(x)
                h, w = x.shape[1:3]
                x = rearrange(x, "b h w d -> b (h w) d")
            x = PositionEmbed((h, w), name=f"positions_{level}")(x)
            x = window_partition(rearrange(x, "b (h w) d -> b h w d", h=h), block_size)
            attention = partial(
                Attention,
                heads=self.heads * 2**level,
                qkv_bias=self.qkv_bias,
                dropout=self.dropout,
                dense=dense,
                attend=partial(Attend, lsa=self.lsa),
            )
            mlp = partial(MLP, dim * self.mlp_mult, self.dropout, dense)
            blocks = tuple(partial(Block, attention, mlp, norm, drop_path=next(rates)) for _ in range(depth))
            x = Stage(blocks, name=f"stage_{level}")(x, train=train)
            x = window_merge(x, (h, w), block_size)
        return norm(name="norm")(rearrange(x, "b h w d -> b (h w) d"))


class Aggregate(nn.Module):
    """Between two levels, across the borders of blocks: convolution, norm, 3 x 3 max pooling with stride 2."""

    dim: int
    norm: Factory
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b i j d"]:
        x = self.norm(name="norm")(Conv(self.dim, 3, padding=1, dtype=self.dtype, name="conv")(x))
        # The authors' "SAME" only pads the bottom and the right. A separate operation here, for the ONNX export.
        x = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=-jnp.inf)
        return nn.max_pool(x, window_shape=(3, 3), strides=(2, 2))


_nest = dict(image_size=224, patch_size=4, num_hierarchies=3)

register(
    NesT,
    nest_tiny=dict(dim=96, heads=3, block_repeats=(2, 2, 8), drop_path=0.2, **_nest),
    nest_small=dict(dim=96, heads=3, block_repeats=(2, 2, 20), drop_path=0.3, **_nest),
    nest_base=dict(dim=128, heads=4, block_repeats=(2, 2, 20), drop_path=0.5, **_nest),
    # Trains in minutes on a CPU.
    nest_tiny_data=dict(
        image_size=32, patch_size=patch_of(16), dim=48, heads=2, num_hierarchies=3, block_repeats=(1, 2, 2), mlp_mult=2
    ),
)
