"""DeepViT (https://arxiv.org/abs/2103.11886): deep layers all read alike, so heads remix their maps ("re-attention").

Behind the softmax each head's map becomes a learned mix of all heads' maps, normalised over the heads.
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
    HeadMix,
    Images,
    LayerNorm,
    LSAOption,
    Pool,
    PositionEmbed,
    Size,
    SPTOption,
    check_image,
    grid_size,
    patch_embed,
)
from smallvit.registry import register


class DeepViT(Classifier, kw_only=True):
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
    qkv_bias: bool = True
    patch_norm: bool = False  # LayerNorm before and after the plain patch embedding
    norm_eps: float = 1e-6
    token_std: float = 0.02  # of the class token and the positions, at first
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)
        attention = partial(
            Attention,
            heads=self.heads,
            dim_head=self.dim_head,
            qkv_bias=self.qkv_bias,
            dropout=self.dropout,
            dense=dense,
            attend=partial(Attend, lsa=self.lsa, post=ReAttention),
        )
        mlp = partial(MLP, self.mlp_dim, self.dropout, dense)

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
            x = Block(attention, mlp, norm, drop_path=self.drop_path, name=f"block_{i}")(x, train=train)
        return norm(name="norm")(x)


class ReAttention(nn.Module):
    """Norm(mix(maps)). The paper leaves the norm open; a LayerNorm over the heads keeps images independent."""

    @nn.compact
    def __call__(self, maps: Float[Array, "*lead h n m"]) -> Float[Array, "*lead h n m"]:
        maps = HeadMix(use_bias=False, name="mix")(maps)
        norm = LayerNorm(epsilon=1e-5, dtype=maps.dtype, name="norm")
        return jnp.moveaxis(norm(jnp.moveaxis(maps, -3, -1)), -1, -3)


register(
    DeepViT,
    # The paper's 16 blocks of 384 channels, 24.5 M parameters, re-attention in each; without the convolution stem of
    # its ImageNet models.
    deepvit_s=dict(image_size=224, patch_size=16, dim=384, depth=16, heads=12, mlp_dim=1152, dim_head=None),
)
