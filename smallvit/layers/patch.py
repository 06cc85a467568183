"""From an image to tokens: plain patches, or Shifted Patch Tokenization (https://arxiv.org/abs/2112.13492)."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from smallvit.layers.basic import Dense, Factory, LayerNorm
from smallvit.ops.patches import Directions, SPTOption, patchify, shifted_copies, spt_directions
from smallvit.ops.size import Size, pair


class PatchEmbed(nn.Module):
    """Maps each patch through one Dense; `norm` adds a LayerNorm before and after it."""

    dim: int
    patch_size: Size
    norm: Factory | None = None
    dense: Factory = Dense

    @property
    def sees(self) -> tuple[int, int]:
        """Height and width of the image region behind a token."""
        return pair(self.patch_size)

    @nn.compact
    def __call__(self, image: Float[Array, "b H W c"]) -> Float[Array, "b n d"]:
        x = rearrange(patchify(image, self.patch_size), "b h w p -> b (h w) p")
        if self.norm is not None:
            x = self.norm(name="patch_norm")(x)
        x = self.dense(self.dim, name="dense")(x)
        return x if self.norm is None else self.norm(name="token_norm")(x)


class SPT(nn.Module):
    """Shifted Patch Tokenization: patches of the image and its shifted copies, normalised, through one Dense.

    With the default shift of half a patch, a token sees a window of twice the patch size. Patch size 1 shifts by 0.
    """

    dim: int
    patch_size: Size
    directions: Directions = "diagonal"
    shift: Size | None = None  # in pixels, or a pair for down and across; None is half the patch
    dense: Factory = Dense
    norm: Factory = LayerNorm

    @property
    def shifts(self) -> tuple[int, int]:
        p, q = pair(self.patch_size)
        shift = (p // 2, q // 2) if self.shift is None else self.shift
        return (shift, shift) if isinstance(shift, int) else shift

    @property
    def sees(self) -> tuple[int, int]:
        """Height and width of the image region behind a token."""
        (p, q), (down, across) = pair(self.patch_size), self.shifts
        return p + 2 * down, q + 2 * across

    @nn.compact
    def __call__(self, image: Float[Array, "b H W c"]) -> Float[Array, "b n d"]:
        x = patchify(shifted_copies(image, self.shifts, self.directions), self.patch_size)
        x = rearrange(x, "b h w p -> b (h w) p")
        return self.dense(self.dim, name="dense")(self.norm(name="norm")(x))


class SPTPool(nn.Module):
    """SPT between two stages: merges 2 x 2 tokens of the grid into one; a class token has its own Dense.

    A grid with an odd side is padded with a row or column of zeros.
    """

    dim: int
    grid: tuple[int, int]
    spt: SPTOption = True
    shift: Size | None = None
    dense: Factory = Dense
    norm: Factory = LayerNorm

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b m k"]:
        h, w = self.grid
        prefix = x.shape[1] - h * w
        if prefix < 0:
            raise ValueError(f"{x.shape[1]} tokens do not fill a grid of {h} x {w}: give the grid of these tokens")
        tokens = rearrange(x[:, prefix:], "b (h w) d -> b h w d", h=h)
        tokens = jnp.pad(tokens, ((0, 0), (0, h % 2), (0, w % 2), (0, 0)))
        pool = partial(SPT, directions=spt_directions(self.spt), dense=self.dense, norm=self.norm)
        tokens = pool(self.dim, 2, shift=self.shift, name="spt")(tokens)
        if not prefix:
            return tokens
        return jnp.concatenate([self.dense(self.dim, name="cls")(x[:, :prefix]), tokens], axis=1)


def patch_embed(
    dim: int,
    patch_size: Size,
    *,
    spt: SPTOption = False,
    shift: Size | None = None,
    patch_norm: Factory | None = None,
    dense: Factory = Dense,
    norm: Factory = LayerNorm,
    name: str = "patches",
) -> PatchEmbed | SPT:
    """The first layer of an architecture that cuts patches: SPT if enabled, else plain patches."""
    if not spt:
        return PatchEmbed(dim, patch_size, patch_norm, dense, name=name)
    return SPT(dim, patch_size, spt_directions(spt), shift, dense, norm, name=name)
