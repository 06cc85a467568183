"""T2T-ViT (https://arxiv.org/abs/2101.11986): overlapping tokens attend to each other and are split again.

Each soft split takes overlapping windows of the grid as tokens; a small token transformer between two splits reduces
them to 64 channels. The deep and narrow ViT after it has fixed positions.
"""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from einops import rearrange
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
    normal_or_xavier,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    pair,
    shifted_copies,
    spt_directions,
    stride_of,
    unfold,
)
from smallvit.registry import register


class T2TViT(Classifier, kw_only=True):
    image_size: Size
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    t2t_layers: tuple[tuple[int, int], ...] = ((7, 4), (3, 2), (3, 2))  # kernel and stride of each soft split
    token_dim: int = 64  # between the soft splits
    pool: Pool = "cls"
    dim_head: int | None = None  # None is dim / heads
    dropout: float = 0.0
    emb_dropout: float = 0.0
    drop_path: float = 0.0  # of the last block, growing linearly from 0 in the first
    qkv_bias: bool = False
    norm_eps: float = 1e-5
    token_std: float = 0.02  # initial standard deviation of the class token
    kernel_std: float | None = None  # initial standard deviation of all kernels but the head; None is Xavier
    spt: SPTOption = False  # shifted copies before the first soft split
    spt_shift: Size | None = None  # None is half its stride
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        if not self.t2t_layers:
            raise ValueError("t2t_layers is empty: give a (kernel, stride) for each soft split, at least one")
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype, kernel_init=normal_or_xavier(self.kernel_std))
        attend = partial(Attend, lsa=self.lsa)
        attention = partial(
            Attention,
            heads=self.heads,
            dim_head=self.dim_head,
            qkv_bias=self.qkv_bias,
            dropout=self.dropout,
            dense=dense,
            attend=attend,
        )
        mlp = partial(MLP, self.mlp_dim, self.dropout, dense)

        x = image
        if self.spt:
            stride = self.t2t_layers[0][1]
            shift = stride // 2 if self.spt_shift is None else self.spt_shift
            x = shifted_copies(x, shift, spt_directions(self.spt))
        for i, (kernel, stride) in enumerate(self.t2t_layers):
            if i:
                token_transformer = TokenTransformer(
                    self.token_dim, self.dropout, norm, dense, attend, name=f"token_{i}"
                )
                x = token_transformer(x, train=train)
            x = soft_split(x, kernel, stride)
        x = dense(self.dim, name="dense")(rearrange(x, "b h w d -> b (h w) d"))

        if self.pool == "cls":
            x = ClassToken(self.token_std, name="cls")(x)
        x = x + jnp.asarray(sinusoid(x.shape[1], self.dim), x.dtype)[None]
        x = nn.Dropout(self.emb_dropout, deterministic=not train, name="dropout")(x)
        for i, rate in enumerate(np.linspace(0, self.drop_path, self.depth)):
            block = partial(Block, attention, mlp, norm, drop_path=float(rate), last=i + 1 == self.depth)
            x = block(name=f"block_{i}")(x, train=train)
        return norm(name="norm")(x)


class TokenTransformer(nn.Module):
    """One head that reduces the tokens of a grid to `dim`; the shortcut is from the values, of that dimension."""

    dim: int
    dropout: float = 0.0
    norm: Factory = LayerNorm
    dense: Factory = Dense
    attend: Factory = Attend

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], *, train: bool = False) -> Float[Array, "b h w d"]:
        h, channels = x.shape[1], x.shape[3]
        x = self.norm(name="attention_norm")(rearrange(x, "b h w c -> b (h w) c"))
        qkv = self.dense(3 * self.dim, use_bias=False, name="qkv")(x)
        # The authors scale by the dimension before the reduction.
        attend = self.attend(dropout=self.dropout, scale=channels**-0.5, name="attend")
        x = attend(qkv, heads=1, same_tokens=True, train=train)
        x = nn.Dropout(self.dropout, deterministic=not train, name="dropout")(self.dense(self.dim, name="out")(x))
        x = qkv[..., 2 * self.dim :] + x
        mlp = MLP(self.dim, self.dropout, self.dense, name="mlp")
        x = x + mlp(self.norm(name="mlp_norm")(x), train=train)
        return rearrange(x, "b (h w) d -> b h w d", h=h)


def soft_split(x: Float[Array, "b H W c"], kernel: int, stride: int) -> Float[Array, "b h w k"]:
    """Windows of kernel x kernel, `stride` apart, flattened row by row with the channels fastest.

    The grid is padded with zeros of half a stride.
    """
    pad = stride // 2
    height, width = ((size + 2 * pad - kernel) // stride + 1 for size in x.shape[1:3])
    if height < 1 or width < 1:
        raise ValueError(
            f"a soft split of kernel {kernel} does not fit {x.shape[1]} x {x.shape[2]} tokens: "
            "choose smaller kernels or fewer t2t_layers, or a larger image"
        )
    return unfold(x, (kernel, kernel), (stride, stride), (pad, pad))


def sinusoid(length: int, dim: int) -> Float[np.ndarray, "n d"]:
    """Fixed 1D positions: alternating sine and cosine at falling frequencies (https://arxiv.org/abs/1706.03762)."""
    angle = np.arange(length)[:, None] / 10_000 ** (2 * (np.arange(dim) // 2)[None] / dim)
    return np.where(np.arange(dim)[None] % 2, np.cos(angle), np.sin(angle)).astype(np.float32)


def _down_to_8(image_size: Size) -> tuple[tuple[int, int], ...]:
    """The soft splits that halve the image to 8 tokens per side, two for 32 pixels, three for 64."""
    halvings = max(min(pair(image_size)) // 8, 2).bit_length() - 1
    return ((3, 2),) * halvings


def _by_16_and_8(image_size: Size) -> tuple[tuple[int, int], ...]:
    """Two soft splits: to 16 tokens per side, then to 8."""
    stride = stride_of(16)(image_size)
    return (2 * stride - 1, stride), (3, 2)


register(
    T2TViT,
    # With token transformers, T2T-ViT_t in the paper; its plain names stand for performers.
    t2t_vit_7=dict(image_size=224, dim=256, depth=7, heads=4, mlp_dim=512),
    t2t_vit_14=dict(image_size=224, dim=384, depth=14, heads=6, mlp_dim=1152),
    # The model of https://arxiv.org/abs/2112.13492 for 32 and 64 pixels, without a LayerNorm of 576 that it never uses.
    t2t_small_data=dict(
        image_size=32,
        t2t_layers=_down_to_8,
        dim=256,
        depth=12,
        heads=4,
        mlp_dim=512,
        drop_path=0.1,
        kernel_std=0.02,
    ),
    # Trains in minutes on a CPU.
    t2t_tiny_data=dict(image_size=32, t2t_layers=_by_16_and_8, token_dim=32, dim=96, depth=5, heads=4, mlp_dim=192),
)
