"""ScalableViT (https://arxiv.org/abs/2203.10790): global attention to scaled keys, then interacting windows."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from smallvit.layers import (
    MLP,
    PEG,
    Attend,
    Block,
    Classifier,
    Conv,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    Stage,
    pool_tokens,
    ramp,
)
from smallvit.layers.attention import head_dim
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    exact_gelu,
    shifted_copies,
    spt_directions,
    window_allowed,
    window_merge,
    window_partition,
)
from smallvit.registry import register


class ScalableViT(Classifier, kw_only=True):
    """Alternates scalable self-attention (SSA) and interactive window attention (IWSA) in each stage."""

    dim: int  # of the first stage; doubles with each stage
    heads: tuple[int, ...]
    depth: tuple[int, ...]  # blocks per stage, of both kinds together
    ssa_dim_key: int | tuple[int, ...] = 32  # width of a key in the SSA, per head
    reduction_factor: int | tuple[int, ...] = (8, 4, 2, 1)  # SSA has one key per square of tokens with this side
    window_size: int | tuple[int | None, ...] | None = 7  # of the IWSA, for all stages or each; None is the whole grid
    mlp_ratio: float = 4.0
    head_hidden: int | None = None  # hidden layer of the head, 4096 in the published models
    dropout: float = 0.0
    drop_path: float = 0.0  # of the last block, growing linearly from 0 in the first
    norm_eps: float = 1e-6
    image_size: Size | None = None  # None accepts any size
    spt: SPTOption = False
    spt_shift: Size | None = None  # None is 2 pixels, half the stride of the embedding
    lsa: LSAOption = False

    def setup(self) -> None:
        super().setup()
        if self.head_hidden is not None:
            self.head_in = Dense(self.head_hidden, dtype=self.dtype)
            self.head_norm = LayerNorm(self.norm_eps, self.dtype)

    def __call__(self, image: Images, *, train: bool = False) -> Float[Array, "b k"]:
        x = pool_tokens(self.features(image, train=train), self.pool)
        if self.head is not None and self.head_hidden is not None:
            x = exact_gelu(self.head_norm(self.head_in(x)))
        return x if self.head is None else self.head(x)

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        x = check_image(image, self.image_size, self.dtype)
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)
        conv = partial(Conv, dtype=self.dtype)
        attend = partial(Attend, lsa=self.lsa)
        rates = iter(ramp(self.drop_path, sum(self.depth)))
        if self.spt:
            x = shifted_copies(x, 2 if self.spt_shift is None else self.spt_shift, spt_directions(self.spt))

        for stage, depth in enumerate(self.depth):
            heads, dim_key, reduction = (
                self._of(field, stage) for field in ("heads", "ssa_dim_key", "reduction_factor")
            )
            dim, window = self.dim * 2**stage, self._window(stage)
            kernel, stride, padding = (7, 4, 3) if stage == 0 else (3, 2, 1)
            x = conv(dim, kernel, stride, padding, name=f"embed_{stage}")(x)
            x = norm(name=f"embed_{stage}_norm")(x)
            x = nn.Dropout(self.dropout, deterministic=not train, name=f"dropout_{stage}")(x)
            ssa = partial(SSA, heads, dim_key, reduction, self.dropout, dense, conv, attend)
            iwsa = partial(IWSA, heads, window, self.dropout, dense, conv, attend)
            mlp = partial(MLP, int(dim * self.mlp_ratio), self.dropout, dense)
            attentions = [iwsa if i % 2 else ssa for i in range(depth)]
            blocks = tuple(partial(Block, attention, mlp, norm, drop_path=next(rates)) for attention in attentions)
            x = Stage(blocks, partial(PEG, dtype=self.dtype), name=f"stage_{stage}")(x, train=train)
        return norm(name="norm")(rearrange(x, "b h w d -> b (h w) d"))

    def _of(self, field: str, stage: int) -> int:
        value = getattr(self, field)
        if not isinstance(value, int) and len(value) != len(self.depth):
            raise ValueError(f"{field}={value} must have one number for each of the {len(self.depth)} stages of depth")
        return value if isinstance(value, int) else value[stage]

    def _window(self, stage: int) -> int | None:
        value = self.window_size
        if value is None or isinstance(value, int):
            return value
        if len(value) != len(self.depth):
            raise ValueError(f"window_size={value} must be one number, or one for each of the {len(self.depth)} stages")
        return value[stage]


class SSA(nn.Module):
    """Attention to fewer tokens: `reduction` x `reduction` tokens become one key, and keys have their own dimension."""

    heads: int
    dim_key: int
    reduction: int
    dropout: float
    dense: Factory
    conv: Factory
    attend: Factory

    @nn.compact
    def __call__(self, x: Float[Array, "b h w d"], *, train: bool = False) -> Float[Array, "b h w d"]:
        _, h, w, dim = x.shape
        head_dim(dim, self.heads, None)
        inner, r, read = self.heads * self.dim_key, self.reduction, x
        if r > 1:
            # Zero padding, so that each token is in a square.
            read = jnp.pad(x, ((0, 0), (0, -h % r), (0, -w % r), (0, 0)))
            read = self.conv(dim, r, r, depthwise=True, name="reduce")(read)
            read = self.dense(inner, name="widen")(read)
            # The authors' norm has torch's default epsilon.
            read = exact_gelu(LayerNorm(1e-5, x.dtype, name="norm")(read))
        x, read = (rearrange(tokens, "b h w d -> b (h w) d") for tokens in (x, read))
        parts = (self.dense(inner, name="q")(x), self.dense(inner, name="k")(read), self.dense(dim, name="v")(read))
        attend = self.attend(dropout=self.dropout, name="attend")
        x = attend(*parts, heads=self.heads, same_tokens=r == 1, train=train)
        x = self.dense(dim, name="out")(rearrange(x, "b (h w) d -> b h w d", h=h))
        return nn.Dropout(self.dropout, deterministic=not train, name="dropout")(x)


class IWSA(nn.Module):
    """Attention inside windows that interact by a depthwise convolution over the values of the whole grid."""

    heads: int
    window: int | None
    dropout: float
    dense: Factory
    conv: Factory
    attend: Factory

    @nn.compact
    def __call__(self, x: Float[Array, "b h w d"], *, train: bool = False) -> Float[Array, "b h w d"]:
        _, h, w, dim = x.shape
        head_dim(dim, self.heads, None)
        window = (h, w) if self.window is None else (min(h, self.window), min(w, self.window))
        qkv = self.dense(3 * dim, name="qkv")(x)
        around = self.conv(dim, 3, padding=1, depthwise=True, name="interact")(qkv[..., 2 * dim :])
        allowed = window_allowed((h, w), window)
        attend = self.attend(dropout=self.dropout, name="attend")
        x = attend(window_partition(qkv, window), heads=self.heads, same_tokens=True, allowed=allowed, train=train)
        x = window_merge(x, (h, w), window)
        x = self.dense(dim, name="out")(x + around)
        return nn.Dropout(self.dropout, deterministic=not train, name="dropout")(x)


register(
    ScalableViT,
    scalable_vit_small=dict(
        image_size=224,
        dim=64,
        heads=(2, 4, 8, 16),
        depth=(2, 2, 20, 2),
        ssa_dim_key=(40, 40, 40, 32),
        window_size=7,
        head_hidden=4096,
        drop_path=0.2,
    ),
    # Trains in minutes on a CPU.
    scalable_vit_tiny_data=dict(
        image_size=32,
        dim=32,
        heads=(1, 2, 4),
        depth=(2, 2, 4),
        ssa_dim_key=16,
        reduction_factor=(4, 2, 1),
        window_size=4,
        mlp_ratio=2.0,
    ),
)
