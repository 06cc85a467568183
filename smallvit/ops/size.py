"""Sizes of images, patches and grids, and their error messages."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Size = int | tuple[int, int]
Images = Array | np.ndarray  # a user's input; "b H W c" after `check_image`


def pair(size: Size) -> tuple[int, int]:
    """Returns (height, width) for an int or a pair."""
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ValueError(f"size {size} must be positive: give an int or a pair (height, width)")
    return height, width


def per_stage(name: str, value: int | tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Returns one number per stage, given as such or as one number for all."""
    values = (value,) * stages if isinstance(value, int) else value
    if len(values) != stages:
        raise ValueError(f"{name}={value} must be one number for all stages, or {stages} numbers, one per stage")
    return values


def grid_size(image_size: Size, patch_size: Size) -> tuple[int, int]:
    """Returns the number of patches in the image, down and across."""
    (height, width), (p, q) = pair(image_size), pair(patch_size)
    if height % p or width % q:
        raise ValueError(
            f"image size {height} x {width} is not divisible by patch size {p} x {q}: "
            f"resize to {max(height // p, 1) * p} x {max(width // q, 1) * q}, or choose a patch size that divides it"
        )
    return height // p, width // q


def patch_of(parts: int) -> Callable[[Size], tuple[int, int]]:
    """For presets: chooses the patch size that cuts an image into parts x parts, or the nearest number that divides."""

    def side(length: int) -> int:
        patches = [patch for patch in range(1, length + 1) if length % patch == 0]
        nearest = min(patches, key=lambda patch: (abs(patch - length / parts), -patch))
        if not parts / 2 <= length // nearest <= parts * 2:
            raise ValueError(
                f"image side {length} cannot be cut into about {parts} patches: choose a multiple of {parts}"
            )
        return nearest

    def patch_size(image_size: Size) -> tuple[int, int]:
        height, width = pair(image_size)
        return side(height), side(width)

    return patch_size


def stride_of(parts: int) -> Callable[[Size], int]:
    """For presets: chooses the stride, the same down and across, that gives about parts x parts positions."""
    return lambda image_size: max(round(min(pair(image_size)) / parts), 1)


def check_image(
    image: Images, image_size: Size | None = None, dtype: DTypeLike = jnp.float32
) -> Float[Array, "b H W c"]:
    """Returns the batch of images in the computation's type, or raises a ValueError that says what to change."""
    if image.ndim != 4:
        raise ValueError(
            f"image has shape {tuple(image.shape)}, expected (batch, height, width, channels): "
            "add the missing axis, image[None] for a single image"
        )
    if not jnp.issubdtype(image.dtype, jnp.floating):
        raise ValueError(f"image has dtype {image.dtype}, expected floats: normalise it first, as in image / 255 - 0.5")
    if image_size is not None and image.shape[1:3] != pair(image_size):
        height, width = pair(image_size)
        raise ValueError(
            f"image has shape {tuple(image.shape)}, but the model was made for {height} x {width} "
            "(batch, height, width, channels): resize the image, or make the model with another image_size "
            "and fit its parameters with resample_positions"
        )
    return jnp.asarray(image, dtype)
