"""Image operations that match Pillow, written to be cheap when vmap computes all of them.

Pixels are float32 with integer grey levels from 0 to 255.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smallvit.augment.spec import Fill

GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
BLENDS = ("Color", "Sharpness")
TABLES = ("Brightness", "Contrast", "Posterize", "Solarize", "AutoContrast", "Equalize", "Invert")
OPS = ("Identity", *GEOMETRIC, *BLENDS, *TABLES)

Image = Float[Array, "H W c"]
Levels = Float[Array, "c 256"]  # the new value of each grey level of a channel
Scalar = Float[Array, ""]


def apply_op(image: Image, op: Int[Array, ""], value: Scalar, fill: Fill = "black") -> Image:
    """Applies one of OPS by index; `value` is in units of the operation: pixels, degrees, a factor minus 1, ..."""
    image = warp(image, policy_matrix(op, value, *image.shape[:2]), fill)
    changed = look_up(image, op, value)
    base = jnp.where(op == OPS.index("Sharpness"), smooth(image), grey(image))
    blends = (op == OPS.index("Sharpness")) | (op == OPS.index("Color"))
    return blend(base, changed, jnp.where(blends, 1 + value, 1.0))


def look_up(image: Image, op: Int[Array, ""], value: Scalar) -> Image:
    """Applies the operations on single grey levels by a look-up table; the identity for all others."""
    channels = image.shape[-1]
    index = (image.astype(jnp.int32) + 256 * jnp.arange(channels)[None, None]).ravel()
    histogram = jnp.zeros(256 * channels).at[index].add(1, mode="promise_in_bounds").reshape(channels, 256)
    same = jnp.broadcast_to(jnp.arange(256.0)[None], (channels, 256))
    tables = [
        same,
        blend(jnp.zeros_like(same), same, 1 + value),
        blend(jnp.full_like(same, mean_grey(image)), same, 1 + value),
        posterize(same, value),
        jnp.where(same < value, same, 255 - same),
        autocontrast(same, histogram),
        equalize(same, histogram),
        255 - same,
    ]
    # Selected by a matrix product: XLA would fuse a select into the look-up and recompute all tables for every pixel.
    chosen = jax.nn.one_hot(jnp.maximum(op - OPS.index(TABLES[0]) + 1, 0), len(tables))
    table = jnp.matmul(chosen, jnp.stack(tables).reshape(len(tables), -1), precision="highest")
    return table.at[index].get(mode="promise_in_bounds").reshape(image.shape)


def policy_matrix(op: Int[Array, ""], value: Scalar, height: int, width: int) -> Float[Array, "2 3"]:
    """The affine map from pixels of the result to the image; the identity for operations that move nothing."""

    def of(name: str) -> Scalar:
        return jnp.where(op == OPS.index(name), value, 0.0)

    angle = -jnp.deg2rad(of("Rotate"))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x, y = width / 2, height / 2
    return jnp.array(
        [
            [cos, sin + of("ShearX"), x - cos * x - sin * y - of("TranslateX")],
            [-sin + of("ShearY"), cos, y + sin * x - cos * y - of("TranslateY")],
        ]
    )


def warp(image: Image, matrix: Float[Array, "2 3"], fill: Fill) -> Image:
    """Samples the nearest pixel, with `fill` beyond the border; 16 fractional bits, since Pillow rounds this way."""
    height, width, channels = image.shape
    centre = matrix[:, 2] + matrix[:, 0] / 2 + matrix[:, 1] / 2
    fixed = jnp.floor(jnp.column_stack([matrix[:, :2], centre]) * 65536 + 0.5).astype(jnp.int32)
    rows, columns = jnp.mgrid[:height, :width]
    x, y = ((to_x * columns + to_y * rows + start) >> 16 for to_x, to_y, start in fixed)
    if fill == "mirror":
        index = mirrored(y, height) * width + mirrored(x, width)
        return image.reshape(-1, channels).at[index].get(mode="promise_in_bounds")
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    # Zero is an extra pixel: a select after the gather would be repeated by XLA for every use of a pixel.
    index = jnp.where(inside, y * width + x, height * width)
    pixels = jnp.concatenate([image.reshape(-1, channels), jnp.zeros((1, channels))])
    return pixels.at[index].get(mode="promise_in_bounds")


def resample(image: Image, matrix: Float[Array, "2 3"], size: tuple[int, int] | None = None) -> Float[Array, "h w c"]:
    """Bilinear interpolation to `size`, mirrored at the border; the matrix is on pixel centres, as in `warp`."""
    height, width, _ = image.shape
    high, wide = size or (height, width)
    rows, columns = jnp.mgrid[:high, :wide].astype(jnp.float32) + 0.5
    x, y = (to_x * columns + to_y * rows + start - 0.5 for to_x, to_y, start in matrix)

    left, top = jnp.floor(x), jnp.floor(y)
    right, bottom = (x - left)[..., None], (y - top)[..., None]
    x0, x1 = (mirrored(place.astype(jnp.int32), width) for place in (left, left + 1))
    y0, y1 = (mirrored(place.astype(jnp.int32), height) for place in (top, top + 1))
    above = _pixels(image, y0, x0) * (1 - right) + _pixels(image, y0, x1) * right
    below = _pixels(image, y1, x0) * (1 - right) + _pixels(image, y1, x1) * right
    return above * (1 - bottom) + below * bottom


def mirrored(place: Int[Array, "h w"], size: int) -> Int[Array, "h w"]:
    """The index of the pixel seen at `place` if the image is mirrored at its borders: 1 0 | 0 1 2 | 2 1."""
    i = place % (2 * size)
    return jnp.minimum(i, 2 * size - 1 - i)


def _pixels(image: Image, y: Int[Array, "h w"], x: Int[Array, "h w"]) -> Float[Array, "h w c"]:
    return image.at[y, x].get(mode="promise_in_bounds")


def blend(base: Float[Array, "*shape"], image: Float[Array, "*shape"], factor: Scalar) -> Float[Array, "*shape"]:
    return jnp.floor(jnp.clip(base + factor * (image - base), 0, 255))


def grey(image: Image) -> Image:
    return jnp.broadcast_to(_luma(image)[..., None].astype(image.dtype), image.shape)


def mean_grey(image: Image) -> Scalar:
    luma = _luma(image)
    return whole_quotient(2 * luma.sum().astype(image.dtype) + luma.size, 2 * luma.size)


def _luma(image: Image) -> Int[Array, "H W"]:
    """ITU-R 601 luma with 16 fractional bits. Integers, because their sum is vectorised: 30 times as fast."""
    red, green, blue = (image[..., min(channel, image.shape[-1] - 1)].astype(jnp.int32) for channel in range(3))
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def smooth(image: Image) -> Image:
    """A 3 x 3 mean with weight 5 for the centre; the border is unchanged."""
    rows = image[:-2] + image[1:-1] + image[2:]
    nine = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    return image.at[1:-1, 1:-1].set(jnp.floor((nine + 4 * image[1:-1, 1:-1]) / 13 + 0.5))


def posterize(levels: Levels, bits: Scalar) -> Levels:
    dropped = (8 - bits).astype(jnp.int32)
    return (levels.astype(jnp.int32) >> dropped << dropped).astype(levels.dtype)


def autocontrast(levels: Levels, histogram: Levels) -> Levels:
    low = jnp.where(histogram > 0, levels, 255).min(1, keepdims=True)
    high = jnp.where(histogram > 0, levels, 0).max(1, keepdims=True)
    stretched = whole_quotient((levels - low) * 255, jnp.maximum(high - low, 1))
    return jnp.where(high > low, stretched.clip(0, 255), levels)


def equalize(levels: Levels, histogram: Levels) -> Levels:
    """Maps each level to its rank among darker pixels; the brightest level is not counted, as in Pillow."""
    # A matrix product instead of cumsum: XLA would fuse that into the look-up and sum again for every pixel.
    darker = jnp.matmul(histogram, np.triu(np.ones((256, 256), np.float32), 1), precision="highest")
    step = whole_quotient(jnp.where(histogram > 0, darker, 0).max(1, keepdims=True), 255)
    rank = whole_quotient(jnp.floor(step / 2) + darker, jnp.maximum(step, 1))
    return jnp.where(step > 0, rank.clip(0, 255), levels)


def whole_quotient(a: Float[Array, "..."], b: Float[Array, "..."] | int) -> Float[Array, "..."]:
    """Integer division. XLA multiplies by a rounded 1 / b; the half keeps a / b away from the integer below."""
    return jnp.floor((a + 0.5) / b)
