"""Cutting an image, optionally with its shifted copies (https://arxiv.org/abs/2112.13492), into flat patches."""

from typing import Literal

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from smallvit.ops.size import Size, grid_size, pair

Directions = Literal["diagonal", "cardinal", "all"]
SPTOption = bool | Directions  # True is the paper's choice, "diagonal"

# Offsets of a shifted copy, in shifts: copy[i, j] = x[i + down * shift, j + across * shift].
_DIAGONAL = ((-1, -1), (-1, 1), (1, -1), (1, 1))
_CARDINAL = ((0, -1), (0, 1), (-1, 0), (1, 0))
_OFFSETS = {"diagonal": _DIAGONAL, "cardinal": _CARDINAL, "all": _DIAGONAL + _CARDINAL}


def patchify(x: Float[Array, "b H W c"], patch_size: Size) -> Float[Array, "b h w p"]:
    """Returns non-overlapping patches, each flattened row by row with the channels fastest."""
    h, w = grid_size((x.shape[1], x.shape[2]), patch_size)
    return rearrange(x, "b (h p) (w q) c -> b h w (p q c)", h=h, w=w)


def shifted_copies(x: Float[Array, "b H W c"], shift: Size, directions: str = "diagonal") -> Float[Array, "b H W k"]:
    """Concatenates the image and its copies, shifted by `shift` pixels with zero padding, along the channels."""
    if directions not in _OFFSETS:
        raise ValueError(f"unknown shift directions {directions!r}: choose one of {', '.join(_OFFSETS)}")
    down, across = (shift, shift) if isinstance(shift, int) else shift
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (down, down), (across, across), (0, 0)))

    def moved(i: int, j: int) -> Array:
        top, left = down * (1 + i), across * (1 + j)
        return padded[:, top : top + height, left : left + width]

    return jnp.concatenate([x, *(moved(i, j) for i, j in _OFFSETS[directions])], axis=-1)


def shift_image(
    image: Float[Array, "b H W c"], stride: Size, *, spt: SPTOption, shift: Size | None = None
) -> Float[Array, "b H W k"]:
    """The part of SPT before a first layer with overlapping patches: copies shifted by half its stride."""
    if not spt:
        return image
    p, q = pair(stride)
    return shifted_copies(image, (p // 2, q // 2) if shift is None else shift, spt_directions(spt))


def spt_directions(spt: SPTOption) -> Directions:
    return "diagonal" if spt is True or spt is False else spt
