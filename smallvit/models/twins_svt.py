"""Twins-SVT (https://arxiv.org/abs/2104.13840): attention inside windows, then to one summary per region."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from smallvit.layers import (
    MLP,
    PEG,
    Attend,
    Attention,
    Block,
    Classifier,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    Stage,
    WindowAttention,
    patch_embed,
    ramp,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    grid_size,
    patch_of,
    patchify,
)
from smallvit.registry import register


class TwinsSVT(Classifier, kw_only=True):
    """Four stages, each with `depth` pairs of blocks: a local one, then a global one."""

    s1_emb_dim: int = 64
    s1_patch_size: Size = 4
    s1_local_patch_size: Size = 7
    s1_global_k: int = 7  # one key and value per k x k tokens
    s1_depth: int = 1
    s2_emb_dim: int = 128
    s2_patch_size: Size = 2
    s2_local_patch_size: Size = 7
    s2_global_k: int = 7
    s2_depth: int = 1
    s3_emb_dim: int = 256
    s3_patch_size: Size = 2
    s3_local_patch_size: Size = 7
    s3_global_k: int = 7
    s3_depth: int = 5
    s4_emb_dim: int = 512
    s4_patch_size: Size = 2
    s4_local_patch_size: Size = 7
    s4_global_k: int = 7
    s4_depth: int = 4
    peg_kernel_size: int = 3
    dim_head: int = 32
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    drop_path: float = 0.0  # of the last block, growing linearly from 0 in the first
    norm_eps: float = 1e-6
    image_size: Size | None = None  # None accepts any size that the patch sizes divide
    spt: SPTOption = False
    spt_shift: Size | None = None  # of the first stage
    spt_pool: bool = True  # with SPT, also make the patches of the later stages by SPT
    lsa: LSAOption = False

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        x = check_image(image, self.image_size, self.dtype)
        norm = partial(LayerNorm, epsilon=self.norm_eps, dtype=self.dtype)
        # The authors' norms of patches and reduced keys have torch's default epsilon.
        patch_norm = partial(LayerNorm, epsilon=1e-5, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)
        attend = partial(Attend, lsa=self.lsa)
        rates = iter(ramp(self.drop_path, 2 * (self.s1_depth + self.s2_depth + self.s3_depth + self.s4_depth)))

        for stage in range(4):
            dim, patch, window, k, depth = self._stage(stage)
            if dim % self.dim_head:
                raise ValueError(f"s{stage + 1}_emb_dim={dim} must be a multiple of dim_head={self.dim_head}")
            heads = dim // self.dim_head
            grid = grid_size((x.shape[1], x.shape[2]), patch)
            spt, shift = (self.spt, self.spt_shift) if stage == 0 else (self.spt if self.spt_pool else False, None)
            name = f"patches_{stage}"
            x = patch_embed(dim, patch, spt=spt, shift=shift, dense=dense, norm=patch_norm, name=name)(x)
            x = x if spt else patch_norm(name=f"{name}_norm")(x)
            x = rearrange(x, "b (h w) d -> b h w d", h=grid[0])

            attention = partial(Attention, heads=heads, qkv_bias=True, dropout=self.dropout, dense=dense, attend=attend)
            local = partial(WindowAttention, attention, window)
            everywhere = partial(GlobalAttention, heads, k, self.dropout, dense, patch_norm, attend)
            mlp = partial(MLP, int(dim * self.mlp_ratio), self.dropout, dense)
            attentions = [local, everywhere] * depth
            blocks = tuple(partial(Block, attention, mlp, norm, drop_path=next(rates)) for attention in attentions)
            peg = partial(PEG, self.peg_kernel_size, self.dtype)
            x = Stage(blocks, peg, name=f"stage_{stage}")(x, train=train)
        return norm(name="norm")(rearrange(x, "b h w d -> b (h w) d"))

    def _stage(self, stage: int) -> tuple[int, Size, Size, int, int]:
        """(dimension, patch, window, reduction of the keys, depth) of a stage."""
        return (
            (self.s1_emb_dim, self.s1_patch_size, self.s1_local_patch_size, self.s1_global_k, self.s1_depth),
            (self.s2_emb_dim, self.s2_patch_size, self.s2_local_patch_size, self.s2_global_k, self.s2_depth),
            (self.s3_emb_dim, self.s3_patch_size, self.s3_local_patch_size, self.s3_global_k, self.s3_depth),
            (self.s4_emb_dim, self.s4_patch_size, self.s4_local_patch_size, self.s4_global_k, self.s4_depth),
        )[stage]


class GlobalAttention(nn.Module):
    """Attention of all tokens to one summary per k x k tokens; k = 1 is plain attention."""

    heads: int
    k: int
    dropout: float
    dense: Factory
    norm: Factory
    attend: Factory

    @nn.compact
    def __call__(self, x: Float[Array, "b h w d"], *, train: bool = False) -> Float[Array, "b h w d"]:
        _, h, w, dim = x.shape
        read = x
        if self.k > 1:
            # Zero padding, so that each token is in a region.
            read = jnp.pad(x, ((0, 0), (0, -h % self.k), (0, -w % self.k), (0, 0)))
            read = self.norm(name="reduce_norm")(self.dense(dim, name="reduce")(patchify(read, self.k)))
        x, read = (rearrange(tokens, "b h w d -> b (h w) d") for tokens in (x, read))
        q = self.dense(dim, name="q")(x)
        k, v = jnp.split(self.dense(2 * dim, name="kv")(read), 2, axis=-1)
        attend = self.attend(dropout=self.dropout, name="attend")
        x = attend(q, k, v, heads=self.heads, same_tokens=self.k == 1, train=train)
        x = nn.Dropout(self.dropout, deterministic=not train, name="dropout")(self.dense(dim, name="out")(x))
        return rearrange(x, "b (h w) d -> b h w d", h=h)


_published = dict(image_size=224, s1_global_k=8, s2_global_k=4, s3_global_k=2, s4_global_k=1)

register(
    TwinsSVT,
    twins_svt_small=dict(**_published, s4_depth=2, drop_path=0.2),
    twins_svt_base=dict(
        **_published,
        s1_emb_dim=96,
        s2_emb_dim=192,
        s3_emb_dim=384,
        s4_emb_dim=768,
        s3_depth=9,
        s4_depth=1,
        drop_path=0.3,
    ),
    twins_svt_large=dict(
        **_published,
        s1_emb_dim=128,
        s2_emb_dim=256,
        s3_emb_dim=512,
        s4_emb_dim=1024,
        s3_depth=9,
        s4_depth=1,
        drop_path=0.5,
    ),
    # Trains in minutes on a CPU.
    twins_svt_tiny_data=dict(
        image_size=32,
        s1_patch_size=patch_of(16),
        **dict(s1_emb_dim=32, s2_emb_dim=64, s3_emb_dim=128, s4_emb_dim=128),
        **dict(s1_depth=1, s2_depth=1, s3_depth=2, s4_depth=1),
        **dict(s1_local_patch_size=4, s2_local_patch_size=4, s3_local_patch_size=4, s4_local_patch_size=2),
        **dict(s1_global_k=4, s2_global_k=2, s3_global_k=1, s4_global_k=1),
        dim_head=16,
        mlp_ratio=2.0,
    ),
)
