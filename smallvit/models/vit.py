"""ViT (https://arxiv.org/abs/2010.11929): an image is a sequence of patches for a transformer.

`num_parallel_branches` makes it the parallel ViT (https://arxiv.org/abs/2203.09795), `patch_merge_layer` the ViT with a
PatchMerger (https://arxiv.org/abs/2202.12015), `spt` and `lsa` the ViT for small data sets
(https://arxiv.org/abs/2112.13492), which is also `SLViT`.
"""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from smallvit.layers import (
    MLP,
    Attend,
    Attention,
    Block,
    Classifier,
    ClassToken,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    PatchMerger,
    Pool,
    PositionEmbed,
    patch_embed,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    grid_size,
    patch_of,
)
from smallvit.registry import register


class ViT(Classifier, kw_only=True):
    image_size: Size
    patch_size: Size
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    pool: Pool = "cls"
    dim_head: int | None = 64  # None is dim / heads
    dropout: float = 0.0
    emb_dropout: float = 0.0
    drop_path: float = 0.0  # the same rate in every block
    num_parallel_branches: int = 1
    patch_merge_layer: int | None = None  # merge the patches after this many blocks; a class token is kept
    patch_merge_num_tokens: int = 8
    qkv_bias: bool = True
    layer_scale: float | None = None
    patch_norm: bool = False  # LayerNorm before and after the plain patch embedding
    norm_eps: float = 1e-6
    token_std: float = 0.02  # initial standard deviation of class token and positions
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        if self.patch_merge_layer is not None and not 1 <= self.patch_merge_layer <= self.depth:
            raise ValueError(f"patch_merge_layer={self.patch_merge_layer} must be from 1 to depth={self.depth}")
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)
        block = partial(
            Block,
            attention=partial(
                Attention,
                heads=self.heads,
                dim_head=self.dim_head,
                qkv_bias=self.qkv_bias,
                dropout=self.dropout,
                dense=dense,
                attend=self._attend(),
            ),
            mlp=partial(MLP, self.mlp_dim, self.dropout, dense),
            norm=norm,
            branches=self.num_parallel_branches,
            layer_scale=self.layer_scale,
            drop_path=self.drop_path,
        )

        x = patch_embed(
            self.dim,
            self.patch_size,
            spt=self.spt,
            shift=self.spt_shift,
            patch_norm=norm if self.patch_norm else None,
            dense=dense,
            norm=partial(LayerNorm, dtype=self.dtype),
        )(image)
        if self.pool == "cls":
            x = ClassToken(self.token_std, name="cls")(x)
        x = PositionEmbed(grid_size(self.image_size, self.patch_size), self.token_std, name="positions")(x)
        x = nn.Dropout(self.emb_dropout, deterministic=not train, name="dropout")(x)
        for i in range(self.depth):
            last = i + 1 == self.depth and self.depth != self.patch_merge_layer
            x = block(last=last, name=f"block_{i}")(x, train=train)
            if i + 1 == self.patch_merge_layer:
                x = self._merge_patches(x)
        return norm(name="norm")(x)

    def _attend(self) -> Factory:
        return partial(Attend, lsa=self.lsa)

    def _merge_patches(self, x: Float[Array, "b n d"]) -> Float[Array, "b m d"]:
        merge = PatchMerger(self.dim, self.patch_merge_num_tokens, partial(LayerNorm, dtype=self.dtype), name="merger")
        prefix = 1 if self.pool == "cls" else 0
        return jnp.concatenate([x[:, :prefix], merge(x[:, prefix:])], axis=1)


class SLViT(ViT, kw_only=True):
    """The ViT for small data sets, with Shifted Patch Tokenization and Locality Self-Attention."""

    spt: SPTOption = True
    lsa: LSAOption = True


_tiny = dict(image_size=224, dim=192, depth=12, heads=3, mlp_dim=768)
_small = dict(image_size=224, dim=384, depth=12, heads=6, mlp_dim=1536)
_base = dict(image_size=224, dim=768, depth=12, heads=12, mlp_dim=3072)

register(
    ViT,
    vit_tiny_patch16=dict(patch_size=16, **_tiny),
    vit_small_patch16=dict(patch_size=16, **_small),
    vit_base_patch16=dict(patch_size=16, **_base),
    vit_base_patch32=dict(patch_size=32, **_base),
    vit_small_patch16_18x2=dict(patch_size=16, num_parallel_branches=2, layer_scale=1e-5, **{**_small, "depth": 18}),
    # The model of https://arxiv.org/abs/2112.13492 for 32 and 64 pixels.
    vit_small_data=dict(
        image_size=32,
        patch_size=patch_of(8),
        dim=192,
        depth=9,
        heads=12,
        dim_head=16,
        mlp_dim=384,
        drop_path=0.1,
        qkv_bias=False,
        norm_eps=1e-5,
        token_std=1.0,
        head_std=None,
    ),
    # Trains in minutes on a CPU: few, large patches, beyond which SPT lets tokens see.
    vit_tiny_data=dict(
        image_size=32,
        patch_size=patch_of(4),
        dim=128,
        depth=6,
        heads=4,
        dim_head=32,
        mlp_dim=256,
        qkv_bias=False,
        norm_eps=1e-5,
    ),
)
