"""SimpleViT (https://arxiv.org/abs/2205.01580): the plain ViT with fixed positions, no class token and no dropout."""

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
    Dense,
    LayerNorm,
    LSAOption,
    patch_embed,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    grid_size,
    pair,
    patch_of,
    sincos_2d,
)
from smallvit.registry import register


class SimpleViT(Classifier, kw_only=True):
    image_size: Size
    patch_size: Size
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    dim_head: int | None = 64  # None is dim / heads
    drop_path: float = 0.0  # the same rate in every block
    qkv_bias: bool = True
    patch_norm: bool = False  # LayerNorm before and after the plain patch embedding
    norm_eps: float = 1e-6
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(_channels_last(image, self.image_size), self.image_size, self.dtype)
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)
        attention = partial(
            Attention,
            heads=self.heads,
            dim_head=self.dim_head,
            qkv_bias=self.qkv_bias,
            dense=dense,
            attend=partial(Attend, lsa=self.lsa),
        )
        mlp = partial(MLP, self.mlp_dim, dense=dense)

        x = patch_embed(
            self.dim,
            self.patch_size,
            spt=self.spt,
            shift=self.spt_shift,
            patch_norm=norm if self.patch_norm else None,
            dense=dense,
            norm=partial(LayerNorm, dtype=self.dtype),
        )(image)
        x = x + jnp.asarray(sincos_2d(grid_size(self.image_size, self.patch_size), self.dim), x.dtype)[None]
        for i in range(self.depth):
            x = Block(attention, mlp, norm, drop_path=self.drop_path, name=f"block_{i}")(x, train=train)
        return norm(name="norm")(x)


def _channels_last(image: Images, image_size: Size) -> Images:
    """Converts channels-first images (batch, channels, height, width) if the sizes leave no doubt."""
    size = pair(image_size)
    if image.ndim == 4 and image.shape[1:3] != size and image.shape[2:4] == size:
        return jnp.moveaxis(image, 1, -1)
    return image


register(
    SimpleViT,
    simple_vit_small_patch16=dict(image_size=224, patch_size=16, dim=384, depth=12, heads=6, mlp_dim=1536),
    # Trains in minutes on a CPU.
    simple_vit_tiny_data=dict(
        image_size=32, patch_size=patch_of(8), dim=128, depth=4, heads=4, mlp_dim=256, dim_head=None
    ),
)
