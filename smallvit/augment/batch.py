"""Augmentation of a batch. Every image has its own key, derived from its position in the batch."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, Num, PRNGKeyArray, UInt

from smallvit.augment.ops import OPS, Image, apply_op, blend, grey, mean_grey, resample
from smallvit.augment.policies import Table, policy_table
from smallvit.augment.spec import Augment, Fill

Images = Float[Array, "b H W c"]
Targets = Float[Array, "b k"]
Draws = Float[Array, " _"]  # uniform in [0, 1)
TRIES = 10  # attempts at a rectangle that fits, as in torchvision


def augment_batch(
    key: PRNGKeyArray,
    images: UInt[Array, "b H W c"] | Images,
    labels: Int[Array, " b"],
    num_classes: int,
    spec: Augment,
    normalise: Callable[[Array], Array | np.ndarray],
    own: Callable[[PRNGKeyArray, Array], Array] | None = None,
    size: tuple[int, int] | None = None,
) -> tuple[Float[Array, "b h w c"], Targets]:
    """Applies `augment_images` or the user's `own` function, then `normalise`, `erase`, targets and `mix`."""
    pixels_key, erase_key, mix_key = jax.random.split(key, 3)
    augmented = augment_images(pixels_key, images, spec, size) if own is None else own(pixels_key, images)
    if own is not None and augmented.shape != images.shape:
        raise ValueError(f"your augment turns images of shape {images.shape} into {augmented.shape}: keep the shape")
    x = erase(erase_key, jnp.asarray(normalise(augmented)), spec)
    smoothing = spec.label_smoothing
    targets = jax.nn.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes
    return mix(mix_key, x, targets, spec)


def augment_images(
    key: PRNGKeyArray, images: UInt[Array, "b H W c"] | Images, spec: Augment, size: tuple[int, int] | None = None
) -> UInt[Array, "b h w c"] | Float[Array, "b h w c"]:
    """The part before normalisation; keeps the dtype of the images. A resized crop has `size`, else that of the images.

    Policies and colour expect integer levels from 0 to 255, so they round a batch of floats.
    """
    height, width = size or images.shape[1:3]
    out = jax.vmap(partial(_augment_image, spec=spec, size=(height, width)))(_keys(key, len(images)), images)
    return (out if jnp.issubdtype(images.dtype, jnp.floating) else jnp.round(out)).astype(images.dtype)


def erase(key: PRNGKeyArray, images: Images, spec: Augment) -> Images:
    """Random erasing of normalised images: a rectangle of 2 to 40 % of the area becomes zero, the mean colour."""
    if spec.erasing == 0:
        return images

    def one(key: PRNGKeyArray, image: Image) -> Image:
        height, width, _ = image.shape
        draws = jax.random.uniform(key, (3 + 2 * TRIES,))
        areas, tallness = 0.02 + 0.38 * draws[3 : 3 + TRIES], 0.3 + (1 / 0.3 - 0.3) * draws[3 + TRIES :]
        w, h = jnp.round(_rectangle(areas, 1 / tallness, height, width))
        rows = jnp.arange(height, dtype=jnp.float32) - jnp.floor(draws[1] * (height - h + 1))
        columns = jnp.arange(width, dtype=jnp.float32) - jnp.floor(draws[2] * (width - w + 1))
        inside = ((rows >= 0) & (rows < h))[:, None] & ((columns >= 0) & (columns < w))[None]
        return jnp.where((draws[0] < spec.erasing) & inside[..., None], 0, image)

    return jax.vmap(one)(_keys(key, len(images)), images)


def mix(key: PRNGKeyArray, images: Images, targets: Targets, spec: Augment) -> tuple[Images, Targets]:
    """Applies CutMix to the fraction `cutmix` of the batches and Mixup to the fraction `mixup`.

    Each image is mixed with the one half a batch away: the order is random, but copies of an image may be adjacent.
    """
    if spec.mixup + spec.cutmix == 0:
        return images, targets
    number, height, width, _ = images.shape
    draw_key, beta_key = jax.random.split(key)
    choice, y, x = jax.random.uniform(draw_key, (3,))
    # Beta(1, 1) is the uniform distribution, which compiles much faster.
    keep = jax.random.uniform(beta_key) if spec.alpha == 1 else jax.random.beta(beta_key, spec.alpha, spec.alpha)

    def mixed() -> tuple[Images, Targets]:
        reach = jnp.sqrt(1 - keep) / 2  # half side of the cut, as a fraction of the image
        rows = jnp.abs((jnp.arange(height, dtype=jnp.float32) + 0.5) / height - y) < reach
        columns = jnp.abs((jnp.arange(width, dtype=jnp.float32) + 0.5) / width - x) < reach
        outside = 1 - (rows[:, None] & columns[None]).astype(images.dtype)
        weight = jnp.where(choice < spec.cutmix, outside, keep.astype(images.dtype))
        share = weight.mean(dtype=targets.dtype)
        weight = weight[None, :, :, None]
        return (
            weight * images + (1 - weight) * jnp.roll(images, number // 2, axis=0),
            share * targets + (1 - share) * jnp.roll(targets, number // 2, axis=0),
        )

    return jax.lax.cond(choice < spec.cutmix + spec.mixup, mixed, lambda: (images, targets))


def _augment_image(
    key: PRNGKeyArray, image: Num[Array, "H W c"], spec: Augment, size: tuple[int, int]
) -> Num[Array, "h w c"]:
    table = None if spec.policy == "none" else policy_table(spec.policy, spec.magnitude, *size)
    rounds = spec.num_ops if spec.policy == "randaugment" else 1
    steps = 0 if table is None else rounds * table[0].shape[1]
    # One draw per image. Disabled operations have their numbers too, so enabling one does not change the others.
    sizes = (1, 2, 2 + 2 * TRIES, 3, 3, rounds + 2 * steps)
    flip, crop, box, turn, tint, policy = jnp.split(
        jax.random.uniform(key, (sum(sizes),)), np.cumsum(sizes)[:-1].tolist()
    )

    if spec.flip:
        image = jnp.where(flip[0] < 0.5, image[:, ::-1], image)
    if spec.vertical_flip or spec.quarter_turns:
        image = _turned(image, jax.random.uniform(jax.random.fold_in(key, 1), (3,)), spec)
    if spec.crop_padding:
        image = _padded_crop(image, crop, spec.crop_padding, spec.fill, size)
    if spec.resized_crop or spec.rotation or spec.zoom:
        height, width, _ = image.shape
        image = resample(image.astype(jnp.float32), _view(box, turn, spec, height, width, size), size)
    if table is not None:
        image = _apply_policy(_whole_levels(image), policy, table, rounds, spec.fill)
    if spec.colour:
        image = _whole_levels(image)
        brightness, contrast, saturation = 1 + spec.colour * (2 * tint - 1)
        image = blend(jnp.zeros_like(image), image, brightness)
        image = blend(jnp.full_like(image, mean_grey(image)), image, contrast)
        image = blend(grey(image), image, saturation)
    return image


def _turned(image: Num[Array, "H W c"], draws: Draws, spec: Augment) -> Num[Array, "H W c"]:
    height, width, _ = image.shape
    if spec.vertical_flip:
        image = jnp.where(draws[0] < 0.5, image[::-1], image)
    if spec.quarter_turns:
        if height != width:
            raise ValueError(f"images of {height} x {width} cannot make quarter turns: give one number to --image-size")
        image = jnp.where(draws[1] < 0.5, image[::-1, ::-1], image)
        image = jnp.where(draws[2] < 0.5, jnp.rot90(image), image)
    return image


def _whole_levels(image: Num[Array, "H W c"]) -> Image:
    return (jnp.round(image) if jnp.issubdtype(image.dtype, jnp.floating) else image).astype(jnp.float32)


def _padded_crop(
    image: Num[Array, "H W c"], draws: Draws, padding: int | float, fill: Fill, size: tuple[int, int]
) -> Num[Array, "H W c"]:
    """The padding is a fraction of the side, or in pixels of an image of `size`."""
    height, width, channels = image.shape
    pad_y, pad_x = (
        max(1, round(padding * side / result if padding >= 1 else padding * side))
        for side, result in zip((height, width), size, strict=True)
    )
    mode = "symmetric" if fill == "mirror" else "constant"
    padded = jnp.pad(image, ((pad_y, pad_y), (pad_x, pad_x), (0, 0)), mode)
    top, left = jnp.floor(draws * jnp.array([2 * pad_y + 1, 2 * pad_x + 1], jnp.float32)).astype(jnp.int32)
    return jax.lax.dynamic_slice(padded, (top, left, 0), (height, width, channels))


def _view(
    box: Draws, turn: Draws, spec: Augment, height: int, width: int, result: tuple[int, int]
) -> Float[Array, "2 3"]:
    """The affine map from pixels of the result to the image: zoom and rotation about the centre of the crop."""
    size, out = jnp.array([width, height], jnp.float32), jnp.array(result[::-1], jnp.float32)
    sides, corner = size, jnp.zeros(2)
    if spec.resized_crop:
        low, high = spec.resized_crop
        areas, aspects = low + (high - low) * box[2 : 2 + TRIES], (4 / 3) ** (2 * box[2 + TRIES :] - 1)
        sides = _rectangle(areas, aspects, height, width)
        corner = box[:2] * (size - sides)
    angle, zoom = 2 * jnp.pi * spec.rotation * (2 * turn[0] - 1), 1 + spec.zoom * (2 * turn[1:] - 1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    linear = (sides / out)[:, None] * jnp.array([[cos, -sin], [sin, cos]]) * zoom[None]
    return jnp.column_stack([linear, corner + sides / 2 - (linear * out[None] / 2).sum(axis=1)])


def _rectangle(areas: Draws, aspects: Draws, height: int, width: int) -> Float[Array, "2"]:
    """Width and height of the first attempt that fits into the image; if none does, the first is clipped."""
    sides = jnp.sqrt(height * width * areas[None] * jnp.stack([aspects, 1 / aspects]))
    size = jnp.array([width, height], jnp.float32)
    return jnp.minimum(sides[:, jnp.argmax((sides <= size[:, None]).all(axis=0))], size)


def _apply_policy(image: Image, draws: Draws, table: Table, rounds: int, fill: Fill) -> Image:
    ops, probabilities, values = map(jnp.asarray, table)
    choices, steps = ops.shape
    draws = draws.reshape(rounds, 1 + 2 * steps)
    rows = (draws[:, 0] * choices).astype(jnp.int32)
    on, sign = draws[:, 1 : 1 + steps] < probabilities[rows], draws[:, 1 + steps :] < 0.5
    op = jnp.where(on, ops[rows], OPS.index("Identity")).ravel()
    value = jnp.where(sign, values[rows, :, 1], values[rows, :, 0]).ravel()
    # The loop keeps XLA from fusing the steps: it would recompute the first for every use in the second.
    return jax.lax.scan(lambda image, step: (apply_op(image, *step, fill), None), image, (op, value))[0]


def _keys(key: PRNGKeyArray, number: int) -> Key[Array, " b"]:
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(number))
