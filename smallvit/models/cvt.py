"""CvT (https://arxiv.org/abs/2103.15808): convolutions make the tokens, and the queries, keys and values."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit.layers import (
    MLP,
    Attend,
    Block,
    Classifier,
    ClassToken,
    Conv,
    ConvNorm,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    Pool,
    Stage,
    ramp,
)
from smallvit.layers.attention import head_dim
from smallvit.ops import Images, Size, SPTOption, check_image, shift_image, stride_of
from smallvit.registry import register


class CvT(Classifier, kw_only=True):
    image_size: Size | None = None  # None accepts any size: there are no positions
    pool: Pool = "cls"  # the class token is added in the last stage
    s1_emb_dim: int = 64
    s1_emb_kernel: int = 7
    s1_emb_stride: int = 4
    s1_proj_kernel: int = 3
    s1_kv_proj_stride: int = 2
    s1_heads: int = 1
    s1_depth: int = 1
    s1_mlp_mult: int = 4
    s2_emb_dim: int = 192
    s2_emb_kernel: int = 3
    s2_emb_stride: int = 2
    s2_proj_kernel: int = 3
    s2_kv_proj_stride: int = 2
    s2_heads: int = 3
    s2_depth: int = 2
    s2_mlp_mult: int = 4
    s3_emb_dim: int = 384
    s3_emb_kernel: int = 3
    s3_emb_stride: int = 2
    s3_proj_kernel: int = 3
    s3_kv_proj_stride: int = 2
    s3_heads: int = 6
    s3_depth: int = 10
    s3_mlp_mult: int = 4
    dropout: float = 0.0
    drop_path: float = 0.0  # of the last block, growing linearly from 0 at the start of the last stage
    qkv_bias: bool = True
    norm_eps: float = 1e-5
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)

        x = shift_image(image, self.s1_emb_stride, spt=self.spt, shift=self.spt_shift)
        for stage in range(3):
            dim, kernel, stride = (self._of(stage, name) for name in ("emb_dim", "emb_kernel", "emb_stride"))
            # The authors' values: 2 for kernel 7 and stride 4, 1 for kernel 3 and stride 2.
            padding = max(kernel - stride + 1, 0) // 2
            x = Conv(dim, kernel, stride, padding, dtype=self.dtype, name=f"embed_{stage}")(x)
            grid = x.shape[1], x.shape[2]
            x = norm(name=f"embed_{stage}_norm")(rearrange(x, "b h w d -> b (h w) d"))
            if stage == 2 and self.pool == "cls":
                x = ClassToken(name="cls")(x)
            attention = partial(
                ConvAttention,
                heads=self._of(stage, "heads"),
                grid=grid,
                kernel=self._of(stage, "proj_kernel"),
                kv_stride=self._of(stage, "kv_proj_stride"),
                qkv_bias=self.qkv_bias,
                dropout=self.dropout,
                dense=dense,
                attend=partial(Attend, lsa=self.lsa),
                dtype=self.dtype,
            )
            mlp = partial(MLP, dim * self._of(stage, "mlp_mult"), self.dropout, dense)
            rates = ramp(self.drop_path if stage == 2 else 0.0, self._of(stage, "depth"))
            blocks = tuple(partial(Block, attention, mlp, norm, drop_path=rate) for rate in rates)
            x = Stage(blocks, name=f"stage_{stage}")(x, train=train)
            if stage < 2:
                x = rearrange(x, "b (h w) d -> b h w d", h=grid[0])
        return norm(name="norm")(x)

    def _of(self, stage: int, name: str) -> int:
        return getattr(self, f"s{stage + 1}_{name}")


class ConvAttention(nn.Module):
    """Attention with depthwise convolutions for queries, keys and values; a stride leaves fewer keys and values."""

    heads: int
    grid: tuple[int, int]
    kernel: int
    kv_stride: int
    qkv_bias: bool = True
    dropout: float = 0.0
    dense: Factory = Dense
    attend: Factory = Attend
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], *, train: bool = False) -> Float[Array, "b n d"]:
        dim, prefix = x.shape[-1], x.shape[1] - self.grid[0] * self.grid[1]
        head_dim(dim, self.heads, None)
        if self.kernel % 2 == 0:
            raise ValueError(f"proj_kernel={self.kernel} must be odd, so that queries keep the grid of their tokens")
        cls, tokens = x[:, :prefix], rearrange(x[:, prefix:], "b (h w) d -> b h w d", h=self.grid[0])

        def project(name: str, stride: int) -> Array:
            conv = ConvNorm(
                dim, self.kernel, stride, self.kernel // 2, depthwise=True, dtype=self.dtype, name=f"{name}_conv"
            )
            y = rearrange(conv(tokens, train=train), "b h w d -> b (h w) d")
            return self.dense(dim, use_bias=self.qkv_bias, name=name)(jnp.concatenate([cls, y], axis=1))

        q, k, v = project("q", 1), project("k", self.kv_stride), project("v", self.kv_stride)
        # The authors divide by the square root of the whole dimension, not of one head's.
        attend = self.attend(dropout=self.dropout, scale=dim**-0.5, name="attend")
        x = attend(q, k, v, heads=self.heads, same_tokens=q.shape == k.shape, train=train)
        x = self.dense(dim, name="out")(x)
        return nn.Dropout(self.dropout, deterministic=not train, name="dropout")(x)


register(
    CvT,
    cvt_13=dict(image_size=224, drop_path=0.1),
    cvt_21=dict(image_size=224, s2_depth=4, s3_depth=16, drop_path=0.1),
    # Trains in minutes on a CPU.
    cvt_tiny_data=dict(
        image_size=32,
        s1_emb_stride=stride_of(16),
        s1_emb_kernel=lambda image_size: max(2 * stride_of(16)(image_size) - 1, 3),
        **dict(s1_emb_dim=32, s2_emb_dim=64, s3_emb_dim=128),
        **dict(s1_heads=1, s2_heads=2, s3_heads=4),
        **dict(s1_depth=1, s2_depth=2, s3_depth=4),
    ),
)
