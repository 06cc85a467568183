"""PiT (https://arxiv.org/abs/2103.16302): a ViT that halves its grid and doubles its dimension between stages."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from smallvit.layers import (
    MLP,
    SPT,
    Attend,
    Attention,
    Block,
    Classifier,
    ClassToken,
    Conv,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    Pool,
    PositionEmbed,
    SPTPool,
    Stage,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    pair,
    patch_of,
    per_stage,
    shifted_copies,
    spt_directions,
)
from smallvit.registry import register


class PiT(Classifier, kw_only=True):
    image_size: Size
    patch_size: Size
    stride: Size | None = None  # None is half the patch, as in the paper
    dim: int  # of the first stage
    depth: tuple[int, ...]  # per stage
    heads: int | tuple[int, ...]  # of all stages, or per stage
    mlp_dim: int | tuple[int, ...]  # of all stages, or per stage
    pool: Pool = "cls"
    dim_head: int | None = None  # None is dim / heads
    dropout: float = 0.0
    emb_dropout: float = 0.0
    drop_path: float = 0.0  # the same rate in every block
    qkv_bias: bool = True
    class_position: bool = False  # the class token has a position too
    pool_dense: bool = False  # a Dense after the pooling convolution
    pool_xavier: bool = False  # Xavier initialisation of that convolution with the fan of all channels, so smaller
    norm_eps: float = 1e-6
    token_std: float = 0.02  # initial standard deviation of class token and positions
    spt: SPTOption = False
    spt_shift: Size | None = None
    spt_pool: bool = True  # pool with SPT, too
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        heads, mlp_dims = (per_stage(name, getattr(self, name), len(self.depth)) for name in ("heads", "mlp_dim"))
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)

        x = self._embed(image, dense)
        grid = (x.shape[1], x.shape[2])
        x = rearrange(x, "b h w d -> b (h w) d")
        cls = ClassToken(self.token_std, name="cls") if self.pool == "cls" else None
        if cls and self.class_position:
            x = cls(x)
        x = PositionEmbed(grid, self.token_std, name="positions")(x)
        if cls and not self.class_position:
            x = cls(x)
        x = nn.Dropout(self.emb_dropout, deterministic=not train, name="dropout")(x)

        for stage, depth in enumerate(self.depth):
            if stage:
                dim = self.dim * 2**stage
                x = self._pool(dim, grid, dense, name=f"pool_{stage}")(x)
                grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
            attention = partial(
                Attention,
                heads=heads[stage],
                dim_head=self.dim_head,
                qkv_bias=self.qkv_bias,
                dropout=self.dropout,
                dense=dense,
                attend=partial(Attend, lsa=self.lsa),
            )
            mlp = partial(MLP, mlp_dims[stage], self.dropout, dense)
            block = partial(Block, attention, mlp, norm, drop_path=self.drop_path)
            last = stage + 1 == len(self.depth)
            blocks = tuple(partial(block, last=last and i + 1 == depth) for i in range(depth))
            x = Stage(blocks, name=f"stage_{stage}")(x, train=train)
        return norm(name="norm")(x)

    def _embed(self, image: Float[Array, "b H W c"], dense: Factory) -> Float[Array, "b h w d"]:
        """Overlapping patches by a convolution; SPT shifts by half the stride, or half a patch without overlap."""
        p, q = pair(self.patch_size)
        down, across = (max(p // 2, 1), max(q // 2, 1)) if self.stride is None else pair(self.stride)
        if p > image.shape[1] or q > image.shape[2]:
            raise ValueError(f"patch size {p} x {q} is larger than the image, {image.shape[1]} x {image.shape[2]}")
        if self.spt and (down, across) == (p, q):
            spt = partial(
                SPT, directions=spt_directions(self.spt), dense=dense, norm=partial(LayerNorm, dtype=self.dtype)
            )
            x = spt(self.dim, (p, q), shift=self.spt_shift, name="patches")(image)
            return rearrange(x, "b (h w) d -> b h w d", h=image.shape[1] // p)
        if self.spt:
            shift = (down // 2, across // 2) if self.spt_shift is None else self.spt_shift
            image = shifted_copies(image, shift, spt_directions(self.spt))
        conv = partial(Conv, kernel_init=nn.initializers.xavier_normal(), dtype=self.dtype, name="patches")
        return conv(self.dim, (p, q), (down, across))(image)

    def _pool(self, dim: int, grid: tuple[int, int], dense: Factory, name: str) -> nn.Module:
        if self.spt and self.spt_pool:
            norm = partial(LayerNorm, dtype=self.dtype)
            return SPTPool(dim, grid, self.spt, dense=dense, norm=norm, name=name)
        return ConvPool(dim, grid, dense, self.pool_dense, self.pool_xavier, name=name)


class ConvPool(nn.Module):
    """Depthwise 3 x 3 convolutions with stride 2; a class token has its own Dense."""

    dim: int
    grid: tuple[int, int]
    dense: Factory = Dense
    project: bool = False
    xavier: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b m k"]:
        h, w = self.grid
        prefix = x.shape[1] - h * w
        tokens = rearrange(x[:, prefix:], "b (h w) d -> b h w d", h=h)
        init = nn.initializers.xavier_normal() if self.xavier else Conv.kernel_init
        conv = Conv(self.dim, 3, 2, padding=1, depthwise=True, dtype=x.dtype, kernel_init=init, name="conv")
        tokens = conv(tokens)
        tokens = rearrange(tokens, "b h w d -> b (h w) d")
        if self.project:
            tokens = self.dense(self.dim, name="dense")(tokens)
        if not prefix:
            return tokens
        return jnp.concatenate([self.dense(self.dim, name="cls")(x[:, :prefix]), tokens], axis=1)


register(
    PiT,
    pit_ti=dict(image_size=224, patch_size=16, dim=64, depth=(2, 6, 4), heads=(2, 4, 8), mlp_dim=(256, 512, 1024)),
    pit_s=dict(image_size=224, patch_size=16, dim=144, depth=(2, 6, 4), heads=(3, 6, 12), mlp_dim=(576, 1152, 2304)),
    pit_b=dict(image_size=224, patch_size=14, dim=256, depth=(3, 6, 4), heads=(4, 8, 16), mlp_dim=(1024, 2048, 4096)),
    # The model of https://arxiv.org/abs/2112.13492 for 32 and 64 pixels.
    pit_small_data=dict(
        image_size=32,
        patch_size=patch_of(16),
        stride=patch_of(16),
        dim=96,
        depth=(2, 6, 4),
        heads=(2, 4, 8),
        mlp_dim=(192, 384, 768),
        drop_path=0.1,
        qkv_bias=False,
        class_position=True,
        pool_dense=True,
        pool_xavier=True,
        norm_eps=1e-5,
        token_std=1.0,
        head_std=None,
    ),
    # Trains in minutes on a CPU.
    pit_tiny_data=dict(
        image_size=32,
        patch_size=patch_of(16),
        stride=patch_of(16),
        dim=48,
        depth=(1, 3, 2),
        heads=(2, 4, 8),
        mlp_dim=(96, 192, 384),
    ),
)
