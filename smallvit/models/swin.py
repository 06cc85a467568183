"""Swin (https://arxiv.org/abs/2103.14030): attention inside windows that shift from block to block.

With `spt` and `lsa` it is the SL-Swin of https://arxiv.org/abs/2112.13492: SPT makes the patches and merges them
between stages, and no token of a window attends to itself.
"""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from smallvit.layers import (
    MLP,
    Attend,
    Attention,
    Block,
    Classifier,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    PositionEmbed,
    RelativeBias,
    Stage,
    WindowAttention,
    patch_embed,
    ramp,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    grid_size,
    pair,
    patch_of,
    patchify,
)
from smallvit.registry import register


class Swin(Classifier, kw_only=True):
    image_size: Size
    dim: int  # of the first stage; doubles with each stage
    depth: tuple[int, ...]
    heads: tuple[int, ...]
    patch_size: Size = 4
    window_size: Size = 7  # at most the grid
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    emb_dropout: float = 0.0
    drop_path: float = 0.0  # of the last block, growing linearly from 0 in the first
    positions: bool = False  # learned absolute positions in addition to the relative bias
    qkv_bias: bool = True
    norm_eps: float = 1e-5
    uniform: bool = False  # initialise kernels and biases uniformly, torch's default
    spt: SPTOption = False
    spt_shift: Size | None = None  # of the first embedding
    spt_pool: bool = True  # with SPT, also merge the patches between stages by SPT
    lsa: LSAOption = False

    def make_head(self) -> nn.Module:
        return Dense(self.num_classes, dtype=self.dtype, uniform=True) if self.uniform else super().make_head()

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        if len(self.depth) != len(self.heads):
            raise ValueError(f"depth={self.depth} and heads={self.heads}: give one number per stage in both")
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype, uniform=self.uniform)
        spt_norm = partial(LayerNorm, dtype=self.dtype)
        rates = iter(ramp(self.drop_path, sum(self.depth)))

        h, w = grid_size(self.image_size, self.patch_size)
        x = patch_embed(self.dim, self.patch_size, spt=self.spt, shift=self.spt_shift, dense=dense, norm=spt_norm)(
            image
        )
        if not self.spt:
            x = norm(name="patches_norm")(x)
        if self.positions:
            x = PositionEmbed((h, w), name="positions")(x)
        x = nn.Dropout(self.emb_dropout, deterministic=not train, name="dropout")(x)
        x = rearrange(x, "b (h w) d -> b h w d", h=h)

        for stage, (depth, heads) in enumerate(zip(self.depth, self.heads, strict=True)):
            dim = self.dim * 2**stage
            if stage:
                x = jnp.pad(x, ((0, 0), (0, h % 2), (0, w % 2), (0, 0)))
                h, w = -(-h // 2), -(-w // 2)
                if self.spt and self.spt_pool:
                    x = patch_embed(dim, 2, spt=self.spt, dense=dense, norm=spt_norm, name=f"merge_{stage}")(x)
                    x = rearrange(x, "b (h w) d -> b h w d", h=h)
                else:
                    x = PatchMerge(dim, dense, norm, name=f"merge_{stage}")(x)
            window, shift = self._window((h, w))
            attention = partial(
                Attention,
                heads=heads,
                qkv_bias=self.qkv_bias,
                dropout=self.dropout,
                dense=dense,
                attend=partial(Attend, lsa=self.lsa, bias=partial(RelativeBias, heads, window)),
            )
            mlp = partial(MLP, int(dim * self.mlp_ratio), self.dropout, dense)
            windows = [partial(WindowAttention, attention, window, shift if i % 2 else 0) for i in range(depth)]
            blocks = tuple(partial(Block, window, mlp, norm, drop_path=next(rates)) for window in windows)
            x = Stage(blocks, name=f"stage_{stage}")(x, train=train)
        return norm(name="norm")(rearrange(x, "b h w d -> b (h w) d"))

    def _window(self, grid: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """The window on this grid and its shift, half a window, or 0 along an axis that one window covers."""
        (h, w), (p, q) = grid, pair(self.window_size)
        return (min(h, p), min(w, q)), (p // 2 if h > p else 0, q // 2 if w > q else 0)


class PatchMerge(nn.Module):
    """Merges 2 x 2 tokens into one: concatenated, normalised, through a Dense."""

    dim: int
    dense: Factory
    norm: Factory

    @nn.compact
    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h/2 w/2 k"]:
        return self.dense(self.dim, use_bias=False, name="dense")(self.norm(name="norm")(patchify(x, 2)))


register(
    Swin,
    swin_tiny=dict(image_size=224, dim=96, depth=(2, 2, 6, 2), heads=(3, 6, 12, 24), drop_path=0.2),
    swin_small=dict(image_size=224, dim=96, depth=(2, 2, 18, 2), heads=(3, 6, 12, 24), drop_path=0.3),
    swin_base=dict(image_size=224, dim=128, depth=(2, 2, 18, 2), heads=(4, 8, 16, 32), drop_path=0.5),
    # The model of https://arxiv.org/abs/2112.13492 for 32 and 64 pixels.
    swin_small_data=dict(
        image_size=32,
        patch_size=patch_of(16),
        dim=96,
        depth=(2, 6, 4),
        heads=(3, 6, 12),
        window_size=4,
        mlp_ratio=2.0,
        drop_path=0.1,
        positions=True,
        uniform=True,
    ),
    # Trains in minutes on a CPU.
    swin_tiny_data=dict(
        image_size=32, patch_size=patch_of(16), dim=48, depth=(2, 4, 2), heads=(2, 4, 8), window_size=4, mlp_ratio=2.0
    ),
)
