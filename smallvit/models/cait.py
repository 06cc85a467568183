"""CaiT (https://arxiv.org/abs/2103.17239): patches attend to each other first, then a class token to the patches.

Two parts allow for depth: a small learned factor on every branch (LayerScale), and talking heads.
"""

from functools import partial

import flax.linen as nn
import jax
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
    LayerNorm,
    LSAOption,
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


class CaiT(Classifier, kw_only=True):
    image_size: Size
    patch_size: Size
    dim: int
    depth: int
    cls_depth: int = 2  # layers in which only the class token attends, without dropout
    heads: int
    mlp_dim: int
    pool: Pool = "cls"
    dim_head: int | None = 64  # None is dim / heads
    dropout: float = 0.0
    emb_dropout: float = 0.0
    drop_path: float = 0.0  # the same rate in every patch layer
    cls_drop_path: bool = False  # the same rate in the class token's layers, too
    layer_dropout: float = 0.0  # probability that a patch layer is skipped for the whole batch
    qkv_bias: bool = True
    layer_scale: float | None = None  # None is 0.1 up to the 18th layer, 1e-5 up to the 24th, then 1e-6
    mix_bias: bool = True
    mix_std: float | None = None  # initial standard deviation of the head mix; None is Xavier
    mix_class: bool = False  # talking heads in the class token's attention, too
    norm_eps: float = 1e-6
    token_std: float = 0.02  # initial standard deviation of class token and positions
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        if self.pool != "cls":
            raise ValueError(f"pool={self.pool!r}: CaiT pools by its class layers, leave it at 'cls'")
        if self.cls_depth < 1:
            raise ValueError(f"cls_depth={self.cls_depth} must be at least 1, or the class token never sees the image")
        if not 0 <= self.layer_dropout < 1:
            raise ValueError(f"layer_dropout={self.layer_dropout} must be a probability from 0 to below 1")
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)
        attention = partial(Attention, heads=self.heads, dim_head=self.dim_head, qkv_bias=self.qkv_bias, dense=dense)
        attend = partial(Attend, lsa=self.lsa)
        mix = partial(HeadMix, use_bias=self.mix_bias, std=self.mix_std)
        talk = partial(attend, pre=mix, post=mix)
        block = partial(
            Block,
            partial(attention, dropout=self.dropout, attend=talk),
            partial(MLP, self.mlp_dim, self.dropout, dense),
            norm,
            drop_path=self.drop_path,
        )
        class_block = partial(
            Block,
            partial(attention, attend=talk if self.mix_class else attend),
            partial(MLP, self.mlp_dim, dense=dense),
            norm,
            drop_path=self.drop_path if self.cls_drop_path else 0.0,
        )

        x = patch_embed(
            self.dim,
            self.patch_size,
            spt=self.spt,
            shift=self.spt_shift,
            dense=dense,
            norm=partial(LayerNorm, dtype=self.dtype),
        )(image)
        x = PositionEmbed(grid_size(self.image_size, self.patch_size), self.token_std, name="positions")(x)
        x = nn.Dropout(self.emb_dropout, deterministic=not train, name="dropout")(x)
        for i in range(self.depth):
            new = block(layer_scale=self._scale(i), name=f"block_{i}")(x, train=train)
            x = self._drop_layer(x, new, train)

        cls = ClassToken(self.token_std, name="cls")(x)[:, :1]
        for i in range(self.cls_depth):
            cls = class_block(layer_scale=self._scale(i), name=f"class_block_{i}")(cls, context=x, train=train)
        return norm(name="norm")(jnp.concatenate([cls, x], axis=1))

    def _scale(self, layer: int) -> float:
        if self.layer_scale is not None:
            return self.layer_scale
        return 0.1 if layer < 18 else 1e-5 if layer < 24 else 1e-6

    def _drop_layer(self, x: Float[Array, "b n d"], new: Float[Array, "b n d"], train: bool) -> Float[Array, "b n d"]:
        if not train or not self.layer_dropout:
            return new
        return jnp.where(jax.random.bernoulli(self.make_rng("dropout"), self.layer_dropout), x, new)


_published = dict(image_size=224, patch_size=16, depth=24, dim_head=None, layer_scale=1e-5)

register(
    CaiT,
    cait_xxs24=dict(dim=192, heads=4, mlp_dim=768, **_published),
    cait_s24=dict(dim=384, heads=8, mlp_dim=1536, **_published),
    # The model of https://arxiv.org/abs/2112.13492 for 32 and 64 pixels, except for its class attention, which excludes
    # the class token itself: ours attends to [cls; patches], as in CaiT, with the same parameters.
    cait_small_data=dict(
        image_size=32,
        patch_size=patch_of(8),
        dim=192,
        depth=24,
        heads=4,
        mlp_dim=384,
        drop_path=0.1,
        qkv_bias=False,
        mix_bias=False,
        mix_class=True,
        norm_eps=1e-5,
        cls_drop_path=True,
        token_std=1.0,
        mix_std=1.0,
        head_std=None,
    ),
    # Trains in minutes on a CPU.
    cait_tiny_data=dict(image_size=32, patch_size=patch_of(8), dim=96, depth=6, heads=4, dim_head=24, mlp_dim=192),
)
