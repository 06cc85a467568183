"""RegionViT (https://arxiv.org/abs/2106.02689): regions attend to each other, then each to its own window."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from smallvit.layers import (
    MLP,
    PEG,
    Attend,
    Classifier,
    Conv,
    Dense,
    DropPath,
    Factory,
    LayerNorm,
    LSAOption,
    RelativeBias,
    patch_embed,
    ramp,
)
from smallvit.layers.attention import head_dim
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    exact_gelu,
    per_stage,
    shift_image,
    window_allowed,
    window_merge,
    window_partition,
)
from smallvit.registry import register


class RegionViT(Classifier, kw_only=True):
    image_size: Size | None = None  # None accepts any size that the regions divide
    dim: int | tuple[int, ...] = (64, 128, 256, 512)
    depth: int | tuple[int, ...] = (2, 2, 8, 2)
    window_size: int = 7  # local tokens per side of a region
    tokenize_local_3_conv: bool = False
    use_peg: bool = False
    local_patch_size: int = 4
    heads: int | tuple[int, ...] | None = None  # None is dim / 32
    dim_head: int | None = None  # None is dim / heads
    mlp_mult: int = 4
    plain_downsample: bool = False  # one full convolution between stages instead of norm, GELU and a depthwise one
    dropout: float = 0.0
    drop_path: float = 0.0  # of the last block, growing linearly from 0 in the first
    qkv_bias: bool = True
    norm_eps: float = 1e-6
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        """The normalised region tokens."""
        image = check_image(image, self.image_size, self.dtype)
        stages = next((len(value) for value in (self.dim, self.depth) if not isinstance(value, int)), 4)
        dims, depths = per_stage("dim", self.dim, stages), per_stage("depth", self.depth, stages)
        heads = tuple(max(dim // 32, 1) for dim in dims) if self.heads is None else self.heads
        heads = per_stage("heads", heads, stages)
        rates = ramp(self.drop_path, sum(depths))
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)

        region_size = self.local_patch_size * self.window_size
        region = patch_embed(
            dims[0],
            region_size,
            spt=self.spt,
            shift=self.spt_shift,
            dense=dense,
            norm=partial(LayerNorm, dtype=self.dtype),
            name="regions",
        )(image)
        region = rearrange(region, "b (h w) d -> b h w d", h=image.shape[1] // region_size)
        local = self._locals(image, dims[0])
        for stage, dim in enumerate(dims):
            block = partial(
                RegionToLocal,
                heads=heads[stage],
                dim_head=self.dim_head,
                window=self.window_size,
                qkv_bias=self.qkv_bias,
                dropout=self.dropout,
                mlp=partial(MLP, self.mlp_mult * dim, self.dropout, dense),
                norm=norm,
                dense=dense,
                attend=partial(Attend, lsa=self.lsa),
            )
            before = sum(depths[:stage])
            region, local = RegionStage(
                dim,
                block,
                tuple(rates[before : before + depths[stage]]),
                self.window_size,
                None if stage == 0 else "conv" if self.plain_downsample else "depthwise",
                self.use_peg,
                self.dtype,
                name=f"stage_{stage}",
            )(region, local, train=train)
        return norm(name="norm")(rearrange(region, "b h w d -> b (h w) d"))

    def _locals(self, image: Float[Array, "b H W c"], dim: int) -> Float[Array, "b h w d"]:
        """Overlapping patches by one or three convolutions; the authors' norms over grids have epsilon 1e-5."""
        patch, conv = self.local_patch_size, partial(Conv, dtype=self.dtype)
        if patch % 2 or (self.tokenize_local_3_conv and patch != 4):
            raise ValueError(f"local_patch_size={patch} must be even, and 4 with tokenize_local_3_conv")
        x = shift_image(image, 2 if self.tokenize_local_3_conv else patch, spt=self.spt, shift=self.spt_shift)
        if not self.tokenize_local_3_conv:
            return conv(dim, 2 * patch, patch, patch - 1, name="locals")(x)
        for i in range(2):
            x = conv(dim // 2 ** (2 - i), 3, 2, 1, name=f"locals_{i}")(x)
            x = exact_gelu(LayerNorm(1e-5, self.dtype, name=f"locals_{i}_norm")(x))
        return conv(dim, 3, 1, 1, name="locals_2")(x)


class RegionStage(nn.Module):
    """Halves both grids with the same convolution, then applies the blocks."""

    dim: int
    block: Factory
    rates: tuple[float, ...]  # of stochastic depth, one per block
    window: int
    downsample: str | None
    use_peg: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, region: Float[Array, "b i j c"], local: Float[Array, "b h w c"], *, train: bool = False
    ) -> tuple[Float[Array, "b r s d"], Float[Array, "b y x d"]]:
        if self.downsample is not None:
            depthwise = self.downsample == "depthwise"
            conv = Conv(self.dim, 3, 2, 1, depthwise, dtype=self.dtype, name="down")
            norm = LayerNorm(1e-5, self.dtype, name="down_norm") if depthwise else None
            region, local = (conv(x if norm is None else exact_gelu(norm(x))) for x in (region, local))
        peg = PEG(dtype=self.dtype, name="peg") if self.use_peg else None
        grid, side = (local.shape[1], local.shape[2]), region.shape[1]
        allowed = window_allowed(grid, self.window)
        allowed = None if allowed is None else _with_region(allowed)

        region = rearrange(region, "b h w d -> b (h w) d")
        local = window_partition(local, self.window)
        for i, rate in enumerate(self.rates):
            block = self.block(drop_path=rate, name=f"block_{i}")
            region, local = block(region, local, allowed=allowed, train=train)
            if i == 0 and peg is not None:
                region = rearrange(peg(rearrange(region, "b (h w) d -> b h w d", h=side)), "b h w d -> b (h w) d")
                local = window_partition(peg(window_merge(local, grid, self.window)), self.window)
        return rearrange(region, "b (h w) d -> b h w d", h=side), window_merge(local, grid, self.window)


def _with_region(allowed: Bool[np.ndarray, "g 1 n n"]) -> Bool[np.ndarray, "g 1 n+1 n+1"]:
    """A mask for tokens with the region first: all attend to it, it attends to all real tokens."""
    allowed = np.concatenate([allowed.any(-2, keepdims=True), allowed], axis=-2)
    return np.concatenate([np.ones_like(allowed[..., :1]), allowed], axis=-1)


class RegionToLocal(nn.Module):
    """Applies one attention twice, with shared weights: among all regions, then among a region and its local tokens."""

    heads: int
    dim_head: int | None
    window: int
    qkv_bias: bool
    dropout: float
    mlp: Factory
    norm: Factory
    dense: Factory
    attend: Factory
    drop_path: float = 0.0

    @nn.compact
    def __call__(
        self,
        region: Float[Array, "b g d"],
        local: Float[Array, "b g n d"],
        *,
        allowed: Bool[np.ndarray, "g 1 m m"] | None,
        train: bool = False,
    ) -> tuple[Float[Array, "b g d"], Float[Array, "b g n d"]]:
        dim = region.shape[-1]
        inner = self.heads * head_dim(dim, self.heads, self.dim_head)
        qkv = self.dense(3 * inner, use_bias=self.qkv_bias, name="qkv")
        out = self.dense(dim, name="out")
        drop = partial(nn.Dropout, self.dropout, deterministic=not train)
        bias = partial(LocalBias, self.heads, self.window)

        def attention(x: Array, name: str, bias: Factory | None, allowed: np.ndarray | None) -> Array:
            attend = self.attend(dropout=self.dropout, bias=bias, name=f"{name}_attend")
            y = self.norm(name=f"{name}_norm")(x)
            y = attend(qkv(y), heads=self.heads, same_tokens=True, allowed=allowed, train=train)
            y = drop(name=f"{name}_dropout")(out(y))
            return x + DropPath(self.drop_path, name=f"{name}_drop")(y, train=train)

        region = attention(region, "region", None, None)
        x = attention(jnp.concatenate([region[:, :, None], local], axis=2), "local", bias, allowed)
        y = self.mlp(name="mlp")(self.norm(name="mlp_norm")(x), train=train)
        x = x + DropPath(self.drop_path, name="mlp_drop")(y, train=train)
        return x[:, :, 0], x[:, :, 1:]


class LocalBias(RelativeBias):
    """The relative bias of a window, with zeros for the region, which comes first."""

    def __call__(self) -> Float[Array, "h n n"]:
        return jnp.pad(super().__call__(), ((0, 0), (1, 0), (1, 0)))


_small = dict(image_size=224, depth=(2, 2, 8, 2), tokenize_local_3_conv=True)

register(
    RegionViT,
    regionvit_tiny=dict(dim=(64, 128, 256, 512), **_small),
    regionvit_small=dict(dim=(96, 192, 384, 768), **_small),
    regionvit_base=dict(image_size=224, dim=(128, 256, 512, 1024), depth=(2, 2, 14, 2)),
    # Trains in minutes on a CPU.
    regionvit_tiny_data=dict(image_size=32, dim=(32, 64, 128), depth=(1, 2, 3), window_size=4, mlp_mult=2),
)
