"""CrossFormer (https://arxiv.org/abs/2108.00154): tokens of several scales attend to near ones, then to far ones."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from smallvit.layers import (
    MLP,
    Attend,
    Attention,
    Block,
    Classifier,
    Conv,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    Stage,
    WindowAttention,
    ramp,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    grid_size,
    pair,
    shifted_copies,
    spt_directions,
    stride_of,
    window_offsets,
)
from smallvit.registry import register


class CrossFormer(Classifier, kw_only=True):
    """Alternates short-distance attention within windows and long-distance attention.

    The latter is among tokens that are `global_window_size` apart. At 224 pixels both have groups of 7 x 7.
    """

    dim: tuple[int, ...]
    depth: tuple[int, ...]
    global_window_size: int | tuple[int, ...] = (8, 4, 2, 1)  # distance between tokens of a long-distance group
    local_window_size: int | tuple[int, ...] = 7  # of a short-distance group; at most the grid
    embed_kernels: tuple[int, ...] = (4, 8, 16, 32)  # the first is also the stride
    merge_kernels: tuple[int, ...] = (2, 4)
    dim_head: int = 32
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    drop_path: float = 0.0  # of the last block, growing linearly from 0 in the first
    norm_eps: float = 1e-5
    image_size: Size | None = None  # None accepts any size divisible by the stride of the embedding
    spt: SPTOption = False
    spt_shift: Size | None = None  # None is half the stride
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        x = check_image(image, self.image_size, self.dtype)
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)
        rates = iter(ramp(self.drop_path, sum(self.depth)))
        stride = self.embed_kernels[0]
        grid_size((x.shape[1], x.shape[2]), stride)
        if self.spt:
            shift = stride // 2 if self.spt_shift is None else self.spt_shift
            x = shifted_copies(x, shift, spt_directions(self.spt))

        stages = zip(*self._stages(), strict=True)
        for stage, (dim, depth, interval, window) in enumerate(stages):
            if stage == 0:
                x = norm(name="embed_norm")(CrossScaleEmbed(dim, self.embed_kernels, self.dtype, name="embed")(x))
            else:
                h, w = x.shape[1:3]
                x = jnp.pad(norm(name=f"merge_{stage}_norm")(x), ((0, 0), (0, h % 2), (0, w % 2), (0, 0)))
                x = CrossScaleEmbed(dim, self.merge_kernels, self.dtype, name=f"merge_{stage}")(x)
            grid = h, w = x.shape[1], x.shape[2]
            if interval > 1 and min(grid) <= interval:
                raise ValueError(
                    f"stage {stage + 1} has a grid of {h} x {w}, global_window_size {interval} leaves tokens alone: "
                    "choose a smaller one, or a larger image"
                )
            short, long = (min(h, window), min(w, window)), (-(-h // interval), -(-w // interval))
            mlp = partial(MLP, int(dim * self.mlp_ratio), self.dropout, dense)
            blocks = []
            for i in range(depth):
                bias = partial(
                    DynamicBias, dim // self.dim_head, long if i % 2 else short, max(dim // 16, 4), self.dtype
                )
                attention = partial(
                    Attention,
                    heads=dim // self.dim_head,
                    dim_head=self.dim_head,
                    qkv_bias=True,
                    dropout=self.dropout,
                    dense=dense,
                    attend=partial(Attend, lsa=self.lsa, bias=bias),
                )
                grouped = (
                    partial(LongDistance, attention, interval) if i % 2 else partial(WindowAttention, attention, short)
                )
                blocks.append(partial(Block, grouped, mlp, norm, drop_path=next(rates)))
            x = Stage(tuple(blocks), name=f"stage_{stage}")(x, train=train)
        return norm(name="norm")(rearrange(x, "b h w d -> b (h w) d"))

    def _stages(self) -> list[tuple[int, ...]]:
        """The settings of each stage, one tuple per stage."""
        stages = len(self.dim)
        given = dict(
            depth=self.depth, global_window_size=self.global_window_size, local_window_size=self.local_window_size
        )
        rows = {name: (value,) * stages if isinstance(value, int) else value for name, value in given.items()}
        for name, value in rows.items():
            if len(value) != stages:
                raise ValueError(
                    f"{name}={value} must have one number for each of the {stages} stages of dim={self.dim}"
                )
        if odd := [dim for dim in self.dim if dim % self.dim_head]:
            raise ValueError(f"dim {odd[0]} must be a multiple of dim_head={self.dim_head}")
        return [self.dim, *rows.values()]


class CrossScaleEmbed(nn.Module):
    """Concatenates convolutions of several kernel sizes with the same centres; larger ones have fewer channels."""

    dim: int
    kernels: tuple[int, ...]
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b H W c"]) -> Float[Array, "b h w d"]:
        stride, last = self.kernels[0], len(self.kernels) - 1
        # Half of the channels for the first, half of the rest for the next; the last two have the same number.
        dims = [self.dim // 2 ** min(i + 1, last) for i in range(last + 1)]
        if sum(dims) != self.dim or any((k - stride) % 2 for k in self.kernels):
            raise ValueError(
                f"dim={self.dim} must be divisible by {2**last}, and kernels {self.kernels} differ by even numbers"
            )
        scales = zip(dims, self.kernels, strict=True)
        convs = (Conv(d, k, stride, (k - stride) // 2, dtype=self.dtype, name=f"scale_{k}") for d, k in scales)
        return jnp.concatenate([conv(x) for conv in convs], axis=-1)


class LongDistance(nn.Module):
    """Applies `attention` among tokens that are `interval` apart, down and across."""

    attention: Factory
    interval: int

    @nn.compact
    def __call__(self, x: Float[Array, "b h w d"], *, train: bool = False) -> Float[Array, "b h w d"]:
        (h, w), step = x.shape[1:3], self.interval
        x = jnp.pad(x, ((0, 0), (0, -h % step), (0, -w % step), (0, 0)))
        rows = x.shape[1] // step
        x = rearrange(x, "b (n i) (m j) d -> b (i j) (n m) d", i=step, j=step)
        x = self.attention(name="window")(x, allowed=long_distance_allowed((h, w), step), train=train)
        return rearrange(x, "b (i j) (n m) d -> b (n i) (m j) d", i=step, n=rows)[:, :h, :w]


def long_distance_allowed(grid: tuple[int, int], interval: int) -> Bool[np.ndarray, "g 1 n n"] | None:
    """A mask that excludes the padding of the grid to a multiple of the interval; None without padding."""
    if grid[0] % interval == 0 and grid[1] % interval == 0:
        return None
    rows, columns = np.mgrid[: grid[0] + -grid[0] % interval, : grid[1] + -grid[1] % interval]
    real = (rows < grid[0]) & (columns < grid[1])
    real = rearrange(real, "(n i) (m j) -> (i j) 1 1 (n m)", i=interval, j=interval)
    return real.repeat(real.shape[-1], axis=-2)


class DynamicBias(nn.Module):
    """Computes the bias of two tokens of a group with a small network of their offset, so groups may have any size."""

    heads: int
    group: Size
    dim: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self) -> Float[Array, "h n n"]:
        p, q = pair(self.group)
        offsets = np.moveaxis(np.mgrid[1 - p : p, 1 - q : q], 0, -1)
        x = Dense(self.dim, dtype=self.dtype, name="in")(jnp.asarray(offsets, self.dtype))
        for i, dim in enumerate((self.dim, self.dim, self.heads)):
            x = jax.nn.relu(LayerNorm(dtype=self.dtype, name=f"norm_{i}")(x))
            x = Dense(dim, dtype=self.dtype, name=f"dense_{i}")(x)
        rows, columns = window_offsets(self.group)
        return rearrange(x[rows + p - 1, columns + q - 1], "n m h -> h n m")


def groups_of_seven(image_size: Size) -> tuple[int, ...]:
    """The intervals that leave groups of about 7 x 7 tokens."""
    side = min(pair(image_size)) // 4
    return tuple(max(side // 2**stage // 7, 1) for stage in range(4))


register(
    CrossFormer,
    crossformer_tiny=dict(
        image_size=224,
        dim=(64, 128, 256, 512),
        depth=(1, 1, 8, 6),
        global_window_size=groups_of_seven,
        drop_path=0.1,
    ),
    crossformer_small=dict(
        image_size=224,
        dim=(96, 192, 384, 768),
        depth=(2, 2, 6, 2),
        global_window_size=groups_of_seven,
        drop_path=0.2,
    ),
    # Trains in minutes on a CPU.
    crossformer_tiny_data=dict(
        image_size=32,
        dim=(32, 64, 128),
        depth=(2, 3, 3),
        embed_kernels=lambda image_size: tuple(times * stride_of(16)(image_size) for times in (1, 2, 4)),
        global_window_size=(4, 2, 1),
        local_window_size=4,
        mlp_ratio=2.0,
    ),
)
