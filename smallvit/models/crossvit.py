"""CrossViT (https://arxiv.org/abs/2103.14899): two ViTs of small and large patches whose class tokens cross-attend."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
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
    Pool,
    PositionEmbed,
    Stage,
    normal_or_xavier,
    patch_embed,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    exact_gelu,
    grid_size,
    pair,
    patch_of,
)
from smallvit.registry import register


class CrossViT(Classifier, kw_only=True):
    """The features are one token: both class tokens concatenated, or the means of both scales' patches."""

    image_size: Size
    depth: int  # blocks with both scales
    sm_dim: int
    sm_patch_size: Size
    sm_enc_depth: int  # depth of the small patches' encoder in each block
    sm_enc_heads: int
    sm_enc_mlp_dim: int
    lg_dim: int
    lg_patch_size: Size
    lg_image_size: Size | None = None  # the large patches are cut from the image resized to this
    lg_enc_depth: int
    lg_enc_heads: int
    lg_enc_mlp_dim: int
    cross_attn_depth: int = 1  # rounds of cross-attention per block
    cross_attn_heads: int
    pool: Pool = "cls"
    dim_head: int | None = None  # None is dim / heads
    dropout: float = 0.0
    emb_dropout: float = 0.0
    drop_path: float = 0.0  # the same rate in every layer
    qkv_bias: bool = True
    norm_eps: float = 1e-6
    token_std: float = 0.02  # initial standard deviation of class token and positions
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    def make_head(self) -> nn.Module:
        dense = partial(Dense, dtype=self.dtype, kernel_init=normal_or_xavier(self.head_std))
        return MeanOfHeads(self.num_classes, self.sm_dim, dense)

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b 1 d"]:
        image = check_image(image, self.image_size, self.dtype)
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)
        attention = partial(
            Attention,
            dim_head=self.dim_head,
            qkv_bias=self.qkv_bias,
            dropout=self.dropout,
            dense=dense,
            attend=partial(Attend, lsa=self.lsa),
        )

        def encode(x: Array, name: str, depth: int, heads: int, mlp_dim: int) -> Array:
            mlp = partial(MLP, mlp_dim, self.dropout, dense)
            block = partial(Block, partial(attention, heads=heads), mlp, norm, drop_path=self.drop_path)
            return Stage((block,) * depth, name=name)(x, train=train)

        read = partial(Block, partial(attention, heads=self.cross_attn_heads), None, norm, drop_path=self.drop_path)
        visit = partial(Visit, self.cross_attn_depth, read, norm, dense)

        sm = self._embed(image, "sm", self.sm_dim, self.sm_patch_size, train)
        image = resize(image, self.image_size if self.lg_image_size is None else self.lg_image_size)
        lg = self._embed(image, "lg", self.lg_dim, self.lg_patch_size, train)
        for i in range(self.depth):
            sm = encode(sm, f"sm_{i}", self.sm_enc_depth, self.sm_enc_heads, self.sm_enc_mlp_dim)
            lg = encode(lg, f"lg_{i}", self.lg_enc_depth, self.lg_enc_heads, self.lg_enc_mlp_dim)
            sm_cls = visit(name=f"sm_{i}_visit")(sm[:, :1], lg[:, 1:], train=train)
            lg_cls = visit(name=f"lg_{i}_visit")(lg[:, :1], sm[:, 1:], train=train)
            sm = jnp.concatenate([sm_cls, sm[:, 1:]], axis=1)
            lg = jnp.concatenate([lg_cls, lg[:, 1:]], axis=1)
        both = norm(name="sm_norm")(sm), norm(name="lg_norm")(lg)
        pooled = [x[:, :1] if self.pool == "cls" else x[:, 1:].mean(axis=1, keepdims=True) for x in both]
        return jnp.concatenate(pooled, axis=-1)

    def _embed(
        self, image: Float[Array, "b H W c"], name: str, dim: int, patch_size: Size, train: bool
    ) -> Float[Array, "b n d"]:
        dense, norm = partial(Dense, dtype=self.dtype), partial(LayerNorm, dtype=self.dtype)
        embed = partial(patch_embed, spt=self.spt, shift=self.spt_shift, dense=dense, norm=norm)
        x = embed(dim, patch_size, name=f"{name}_patches")(image)
        x = ClassToken(self.token_std, name=f"{name}_cls")(x)
        grid = grid_size((image.shape[1], image.shape[2]), patch_size)
        x = PositionEmbed(grid, self.token_std, name=f"{name}_positions")(x)
        return nn.Dropout(self.emb_dropout, deterministic=not train, name=f"{name}_dropout")(x)


class Visit(nn.Module):
    """Projects a class token to the other scale's dimension, lets it attend to [itself; the patches there], and back.

    In each of several rounds it attends to all of them; timm's second round attends to the token alone.
    """

    rounds: int
    read: Factory
    norm: Factory
    dense: Factory

    @nn.compact
    def __call__(
        self, cls: Float[Array, "b 1 d"], patches: Float[Array, "b n e"], *, train: bool = False
    ) -> Float[Array, "b 1 d"]:
        x = self._project(cls, patches.shape[-1], "go")
        for i in range(self.rounds):
            x = self.read(name=f"read_{i}")(x, context=patches, train=train)
        return self._project(x, cls.shape[-1], "return")

    def _project(self, x: Float[Array, "b 1 d"], dim: int, name: str) -> Float[Array, "b 1 e"]:
        x = exact_gelu(self.norm(name=f"{name}_norm")(x))
        return self.dense(dim, name=name)(x)


class MeanOfHeads(nn.Module):
    """One head per scale; the logits are averaged."""

    num_classes: int
    sm_dim: int
    dense: Factory

    @nn.compact
    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, "b k"]:
        sm = self.dense(self.num_classes, name="sm")(x[:, : self.sm_dim])
        lg = self.dense(self.num_classes, name="lg")(x[:, self.sm_dim :])
        return (sm + lg) / 2


def resize(image: Float[Array, "b H W c"], size: Size) -> Float[Array, "b h w c"]:
    """PyTorch's bicubic interpolation, which the authors' weights expect; jax.image uses another kernel."""
    height, width = pair(size)
    if image.shape[1:3] == (height, width):
        return image
    down, across = cubic_weights(image.shape[1], height), cubic_weights(image.shape[2], width)
    image = jnp.einsum("hH,bHWc->bhWc", jnp.asarray(down, image.dtype), image)
    return jnp.einsum("wW,bhWc->bhwc", jnp.asarray(across, image.dtype), image)


def cubic_weights(old: int, new: int) -> Float[np.ndarray, "{new} {old}"]:
    """The weight of each old pixel in each new one: Keys' cubic with a = -0.75, edges repeated, no antialiasing."""
    centre = (np.arange(new) + 0.5) * old / new - 0.5
    weights = np.zeros((new, old))
    for step in (-1, 0, 1, 2):
        pixel = np.floor(centre) + step
        t = np.abs(centre - pixel)
        near, far = 1.25 * t**3 - 2.25 * t**2 + 1, -0.75 * (t**3 - 5 * t**2 + 8 * t - 4)
        np.add.at(weights, (np.arange(new), np.clip(pixel, 0, old - 1).astype(int)), np.where(t <= 1, near, far))
    return weights


def _fourteen_fifteenths(image_size: Size) -> tuple[int, int]:
    height, width = pair(image_size)
    return height * 14 // 15, width * 14 // 15


_published = dict(
    image_size=240,
    depth=3,
    sm_patch_size=12,
    sm_enc_depth=1,
    lg_patch_size=16,
    lg_image_size=_fourteen_fifteenths,
    lg_enc_depth=4,
)

register(
    CrossViT,
    crossvit_tiny=dict(
        **_published,
        **dict(sm_dim=96, sm_enc_heads=3, sm_enc_mlp_dim=384),
        **dict(lg_dim=192, lg_enc_heads=3, lg_enc_mlp_dim=768, cross_attn_heads=3),
    ),
    crossvit_small=dict(
        **_published,
        **dict(sm_dim=192, sm_enc_heads=6, sm_enc_mlp_dim=768),
        **dict(lg_dim=384, lg_enc_heads=6, lg_enc_mlp_dim=1536, cross_attn_heads=6),
    ),
    # Trains in minutes on a CPU.
    crossvit_tiny_data=dict(
        image_size=32,
        depth=2,
        **dict(sm_patch_size=patch_of(8), sm_dim=64, sm_enc_depth=2, sm_enc_heads=4, sm_enc_mlp_dim=128),
        **dict(lg_patch_size=patch_of(4), lg_dim=128, lg_enc_depth=2, lg_enc_heads=4, lg_enc_mlp_dim=256),
        cross_attn_heads=4,
    ),
)
