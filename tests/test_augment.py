"""Augmentation: the operations against Pillow, the draws against their probabilities."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy.ndimage import affine_transform

from smallvit.augment import Augment, augment_batch, augment_images, erase, mix
from smallvit.augment.ops import OPS, apply_op, resample
from smallvit.augment.policies import AUTOAUGMENT, magnitude, policy_table

HEIGHT, WIDTH = 24, 32
KEY = jax.random.key(0)
SIGNS = dict.fromkeys(("Brightness", "Contrast", "Color", "Sharpness", "Rotate"), (-1, 1))
SIGNS |= {f"{move}{axis}": (-1, 1) for move in ("Shear", "Translate") for axis in "XY"}
apply_ops = jax.jit(jax.vmap(apply_op))
augment = jax.jit(augment_images, static_argnames=("spec", "size"))


def photograph(channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth shapes with some noise, neither all dark nor all bright, like a photograph."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:HEIGHT, :WIDTH, :1][:2] / WIDTH
    phase, speed = rng.uniform(0, 6, channels), rng.uniform(3, 9, channels)
    waves = np.sin(speed * x + phase) * np.cos(speed[::-1] * y)
    return (120 + 90 * waves + rng.normal(0, 8, waves.shape)).clip(10, 240).astype(np.uint8)


def to_pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def ours(image: np.ndarray, cases: list[tuple[str, float]]) -> np.ndarray:
    batch = np.broadcast_to(image.astype(np.float32), (len(cases), *image.shape))
    ops = np.array([OPS.index(op) for op, _ in cases], np.int32)
    return np.asarray(apply_ops(batch, ops, np.array([value for _, value in cases], np.float32)))


def pillow(image: Image.Image, op: str, value: float) -> Image.Image:
    match op:
        case "Brightness" | "Contrast" | "Color" | "Sharpness":
            return getattr(ImageEnhance, op)(image).enhance(1 + value)
        case "Posterize":
            return ImageOps.posterize(image, int(value))
        case "Solarize":
            return ImageOps.solarize(image, value)
        case "AutoContrast" | "Equalize" | "Invert":
            return getattr(ImageOps, op.lower())(image)
        case "Rotate":
            return image.rotate(value)
        case "Identity":
            return image
    matrix = {
        "ShearX": (1, value, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, value, 1, 0),
        "TranslateX": (1, 0, -value, 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, -value),
    }[op]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


ENHANCE = [(op, v) for op in ("Brightness", "Contrast", "Color", "Sharpness") for v in (-0.9, -0.27, 0.0, 0.27, 0.9)]
POINT = [("Posterize", b) for b in (4, 6, 8)] + [("Solarize", t) for t in (0.0, 100.5, 255.0)]
MOVES = [(op, v) for op in ("ShearX", "ShearY") for v in (-0.3, 0.07, 0.2)]
MOVES += [("Rotate", v) for v in (-30.0, -9.0, 0.0, 3.3, 20.0)] + [(f"Translate{a}", v) for a in "XY" for v in (-9, 4)]
CASES = [*ENHANCE, *POINT, ("AutoContrast", 0), ("Equalize", 0), ("Invert", 0), ("Identity", 0), *MOVES]


@pytest.mark.parametrize("channels", [1, 3])
def test_operations_are_pillows(channels):
    image = photograph(channels)
    for (op, value), result in zip(CASES, ours(image, CASES), strict=True):
        wanted = np.asarray(pillow(to_pillow(image), op, value), np.float32).reshape(image.shape)
        if op in ("Brightness", "Contrast", "Color", "Sharpness", "AutoContrast"):
            # Pillow cuts off fractions of float32 and float64 products, so the last bit can tip a whole level.
            assert np.abs(result - wanted).max() <= 1, (op, value)
            assert (result != wanted).mean() < 0.02, (op, value)
        elif op in ("Rotate", "ShearX", "ShearY"):
            # Matrices are float32 here: pixels whose place lies between two others to 5 digits may go either way.
            assert (result != wanted).any(-1).sum() <= 1, (op, value)
        else:
            np.testing.assert_array_equal(result, wanted, err_msg=f"{op} {value}")


def test_what_moves_is_mirrored_at_the_border():
    """Black areas of Pillow's result are mirrored instead; everything else is equal."""
    image = photograph()
    wide = np.pad(image, ((HEIGHT, HEIGHT), (WIDTH, WIDTH), (0, 0)), "symmetric").astype(np.float32)
    batch = np.broadcast_to(image.astype(np.float32), (len(MOVES), *image.shape))
    ops = np.array([OPS.index(op) for op, _ in MOVES], np.int32)
    values = np.array([value for _, value in MOVES], np.float32)
    mirrored = jax.jit(jax.vmap(partial(apply_op, fill="mirror")))(batch, ops, values)
    same = 0
    for (op, value), result, black in zip(MOVES, np.asarray(mirrored), ours(image, MOVES), strict=True):
        inside = (black > 0).any(-1)
        np.testing.assert_array_equal(result[inside], black[inside], err_msg=f"{op} {value}")
        if op.startswith("Translate"):
            down, across = (0, value) if op.endswith("X") else (value, 0)
            top, left = HEIGHT - int(down), WIDTH - int(across)
            np.testing.assert_array_equal(result, wide[top : top + HEIGHT, left : left + WIDTH], err_msg=op)
            same += 1
        assert result.min() > 0
    assert same == 4


def test_flat_and_two_level_images_as_in_pillow():
    flat, two = np.full((HEIGHT, WIDTH, 3), 77, np.uint8), photograph() // 128 * 128
    cases: list[tuple[str, float]] = [("AutoContrast", 0), ("Equalize", 0)] * len(CASES)
    for image in (flat, two):
        for (op, value), result in zip(cases[:2], ours(image, cases[: len(CASES)])[:2], strict=True):
            np.testing.assert_array_equal(result, np.asarray(pillow(to_pillow(image), op, value)), err_msg=op)


def test_published_policies():
    for rows in AUTOAUGMENT.values():
        assert len(rows) == 25
    assert AUTOAUGMENT["cifar10"][0] == (("Invert", 0.1, 0), ("Contrast", 0.2, 6))
    assert AUTOAUGMENT["cifar10"][21] == (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9))
    assert AUTOAUGMENT["svhn"][1] == (("ShearY", 0.9, 8), ("Invert", 0.7, 0))
    assert AUTOAUGMENT["svhn"][22] == (("ShearX", 0.7, 9), ("TranslateY", 0.8, 3))
    assert AUTOAUGMENT["imagenet"][0] == (("Posterize", 0.4, 8), ("Rotate", 0.6, 9))
    assert AUTOAUGMENT["imagenet"][14] == (("Color", 0.6, 4), ("Contrast", 1.0, 8))


def test_magnitudes():
    top = {op: magnitude(op, 9, 9, 32, 64) for op in OPS}
    assert (top["ShearX"], top["Rotate"], top["Contrast"], top["Solarize"], top["Posterize"]) == (0.3, 30, 0.9, 0, 4)
    assert (top["TranslateX"], top["TranslateY"]) == (29, 14)  # 150/331 of the side, cut to whole pixels
    assert [magnitude("Posterize", i, 9, 32, 32) for i in range(10)] == [8, 8, 7, 7, 6, 6, 5, 5, 4, 4]

    ops, probabilities, values = policy_table("randaugment", 10, 32, 64)
    assert dict(zip((OPS[op] for op in ops[:, 0]), values[:, 0, 1], strict=True)) == pytest.approx(
        {op: value for op, value in top.items() if op != "Invert"}
    )
    ops, probabilities, values = policy_table("randaugment", 9, 32, 32)
    assert values[ops == OPS.index("Brightness"), 1] == pytest.approx(0.9 * 0.9)
    assert [OPS[op] for op in ops[:, 0]] == [op for op in OPS if op != "Invert"]
    assert (probabilities == 1).all()
    either_sign = {OPS[op] for op, (low, high) in zip(ops[:, 0], values[:, 0], strict=True) if low == -high != 0}
    assert (
        either_sign
        == set(SIGNS)
        == {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", *("Brightness", "Color", "Contrast", "Sharpness")}
    )


def test_randaugment_draws_all_operations_alike():
    names = [op for op in OPS if op != "Invert"]
    cases = [(op, sign * magnitude(op, 10, 10, HEIGHT, WIDTH)) for op in names for sign in SIGNS.get(op, (1,))]
    batch = np.broadcast_to(photograph(), (512, HEIGHT, WIDTH, 3))
    out = np.asarray(augment(KEY, batch, Augment(policy="randaugment", num_ops=1, magnitude=10, fill="black")))
    same = (ours(photograph(), cases)[:, None] == out[None]).all((2, 3, 4))
    np.testing.assert_array_equal(same.sum(0), 1)
    shares = dict.fromkeys(names, 0.0)
    for (op, _), share in zip(cases, same.mean(1), strict=True):
        assert share > 0.01, op  # either sign
        shares[op] += share
    np.testing.assert_allclose(list(shares.values()), 1 / 14, atol=0.05)


def test_autoaugment_leaves_as_many_images_alone_as_published():
    batch = np.broadcast_to(photograph(), (512, HEIGHT, WIDTH, 3))
    out = np.asarray(augment(KEY, batch, Augment(policy="cifar10")))
    # Color at level 0 changes nothing either.
    off = [[1 - p * (name != "Color" or level > 0) for name, p, level in row] for row in AUTOAUGMENT["cifar10"]]
    alone = (out == batch).all((1, 2, 3)).mean()
    assert alone == pytest.approx(np.prod(off, axis=1).mean(), abs=0.05)


@pytest.mark.parametrize("fill, mode, padding, down", [("mirror", "symmetric", 0.125, 3), ("black", "constant", 4, 4)])
def test_flip_and_crop_by_hand(fill, mode, padding, down):
    batch = np.broadcast_to(photograph(), (256, HEIGHT, WIDTH, 3))
    out = np.asarray(augment(KEY, batch, Augment(flip=True, crop_padding=padding, fill=fill)))
    across = 4
    pads = ((down, down), (across, across), (0, 0))
    views = np.stack(
        [
            padded[top : top + HEIGHT, left : left + WIDTH]
            for padded in (np.pad(photograph(), pads, mode), np.pad(photograph()[:, ::-1], pads, mode))
            for top in range(2 * down + 1)
            for left in range(2 * across + 1)
        ]
    )
    same = (views[:, None] == out[None]).all((2, 3, 4))
    np.testing.assert_array_equal(same.sum(0), 1)
    chosen = np.unravel_index(same.argmax(0), (2, 2 * down + 1, 2 * across + 1))
    assert chosen[0].mean() == pytest.approx(0.5, abs=0.1)
    for places, number in zip(chosen[1:], (2 * down + 1, 2 * across + 1), strict=True):
        np.testing.assert_allclose(np.bincount(places, minlength=number) / 256, 1 / number, atol=0.07)


@pytest.mark.parametrize(
    "spec, views",
    [
        (Augment(vertical_flip=True), [(0, False), (2, True)]),
        (Augment(quarter_turns=True), [(turns, False) for turns in range(4)]),
        (
            Augment(flip=True, vertical_flip=True, quarter_turns=True),
            [(turns, m) for turns in range(4) for m in (0, 1)],
        ),
    ],
    ids=["vertical", "turns", "all"],
)
def test_images_without_an_upright_side(spec, views):
    image = photograph()[:, :HEIGHT]
    out = np.asarray(augment(KEY, np.broadcast_to(image, (512, *image.shape)), spec))
    wanted = np.stack([np.rot90(image[:, ::-1] if mirrored else image, turns) for turns, mirrored in views])
    same = (wanted[:, None] == out[None]).all((2, 3, 4))
    np.testing.assert_array_equal(same.sum(0), 1)
    np.testing.assert_allclose(same.mean(1), 1 / len(views), atol=0.07)


def test_turns_change_no_other_draws_and_need_a_square():
    image = photograph()[:, :HEIGHT]
    batch, crop = np.broadcast_to(image, (16, *image.shape)), Augment(crop_padding=4)
    plain, turned = (np.asarray(augment(KEY, batch, replace(crop, quarter_turns=turns))) for turns in (False, True))
    upright = (turned == plain).all((1, 2, 3))
    assert 0 < upright.sum() < 16
    with pytest.raises(ValueError, match="images of 24 x 32 cannot make quarter turns"):
        augment(KEY, np.broadcast_to(photograph(), (2, HEIGHT, WIDTH, 3)), Augment(quarter_turns=True))


def test_resample_is_bilinear_and_mirrored():
    image = photograph().astype(np.float32)
    angle, zoom = 0.4, np.array([0.9, 1.3])
    linear = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * zoom
    start = np.array([3.0, -5.0])
    ours = jax.jit(resample)(image, np.column_stack([linear, start]).astype(np.float32))
    # scipy counts from the first pixel's centre, rows first.
    offset = (start + linear @ [0.5, 0.5] - 0.5)[::-1]
    for channel in range(3):
        wanted = affine_transform(image[..., channel], linear[::-1, ::-1], offset, order=1, mode="reflect")
        np.testing.assert_allclose(ours[..., channel], wanted, atol=0.01)


def test_resized_crop_rotation_and_zoom_are_within_their_ranges():
    """On an image of its own coordinates, each result shows where it comes from."""
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    batch = np.broadcast_to(np.stack([x, y, 0 * x], axis=-1).astype(np.float32), (256, HEIGHT, WIDTH, 3))
    mid_y, mid_x = HEIGHT // 2, WIDTH // 2

    def slopes(spec: Augment) -> np.ndarray:
        """d(x, y) / d(x, y) around the centre, away from the mirrored border."""
        out = np.asarray(augment(KEY, batch, spec))[..., :2]
        across = (out[:, mid_y, mid_x + 4] - out[:, mid_y, mid_x - 4]) / 8
        down = (out[:, mid_y + 4, mid_x] - out[:, mid_y - 4, mid_x]) / 8
        return np.stack([across, down], axis=-1)

    crop = slopes(Augment(resized_crop=(0.3, 0.8)))
    width, height = crop[:, 0, 0] * WIDTH, crop[:, 1, 1] * HEIGHT
    assert np.abs(crop[:, 0, 1]).max() < 1e-4
    area, aspect = width * height / (WIDTH * HEIGHT), width / height
    assert 0.299 < area.min() < 0.35
    assert 0.75 < area.max() < 0.801
    assert 0.749 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.334

    turned = slopes(Augment(rotation=0.1, zoom=0.2))
    scale, angle = np.linalg.norm(turned, axis=1), np.arctan2(turned[:, 1, 0], turned[:, 0, 0]) / (2 * np.pi)
    for value, low, high in ((scale[:, 0], 0.8, 1.2), (scale[:, 1], 0.8, 1.2), (angle, -0.1, 0.1)):
        margin = (high - low) / 10
        assert low - 1e-3 < value.min() < low + margin
        assert high - margin < value.max() < high + 1e-3


def test_resized_crop_is_scale_and_translate():
    batch = np.stack([photograph(seed=i) for i in range(256)]).astype(np.float32)
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    batch[1] = np.stack([x, y, x], axis=-1)
    where = np.asarray(augment(KEY, np.broadcast_to(batch[1], batch.shape), Augment(resized_crop=(0.3, 0.8))))
    out = augment(KEY, batch, Augment(resized_crop=(0.3, 0.8)))
    for i in (0, 2, 3):
        start, step = where[i, 8, 8, :2], where[i, 9, 9, :2] - where[i, 8, 8, :2]
        scale = 1 / step[::-1]
        corner = (start - 8.5 * step)[::-1]
        wanted = jax.image.scale_and_translate(
            batch[i], batch[i].shape, (0, 1), scale, -corner * scale, method="linear", antialias=False
        )
        np.testing.assert_allclose(out[i], wanted, atol=0.05)


@pytest.mark.parametrize("channels", [1, 3])
def test_colour_changes_brightness_contrast_and_saturation(channels):
    flat = np.full((64, HEIGHT, WIDTH, channels), 100, np.uint8)
    brightness = np.asarray(augment(KEY, flat, Augment(colour=0.3))).mean((1, 2, 3))
    assert 69 <= brightness.min() < 80
    assert 120 < brightness.max() <= 130
    batch = np.broadcast_to(photograph(channels), (64, HEIGHT, WIDTH, channels))
    out = np.asarray(augment(KEY, batch, Augment(colour=0.3)), np.float32)
    contrast = out.mean(-1).std((1, 2)) / brightness
    assert contrast.max() / contrast.min() > 1.4
    if channels == 3:
        saturation = (out.max(-1) - out.min(-1)).mean((1, 2)) / out.mean(-1).std((1, 2))
        assert saturation.max() / saturation.min() > 1.4


@pytest.mark.parametrize("channels", [1, 3])
def test_erasing(channels):
    spec = Augment(erasing=0.4)
    images = np.ones((512, HEIGHT, WIDTH, channels), np.float32)
    out = np.asarray(jax.jit(partial(erase, spec=spec))(KEY, images))
    holes = (out == 0).all(-1)
    np.testing.assert_array_equal(holes, (out == 0).any(-1))
    hit = holes.any((1, 2))
    assert hit.mean() == pytest.approx(0.4, abs=0.06)
    height, width = holes.any(2).sum(1)[hit], holes.any(1).sum(1)[hit]
    np.testing.assert_array_equal(height * width, holes.sum((1, 2))[hit])  # a full rectangle
    area = height * width / (HEIGHT * WIDTH)
    assert 0.01 < area.min() < 0.06  # sides are whole pixels
    assert 0.34 < area.max() < 0.42
    big = area > 0.1
    assert 0.27 < (height / width)[big].min() < 0.5
    assert 2.0 < (height / width)[big].max() < 3.7
    for border in (holes[:, 0], holes[:, -1], holes[:, :, 0], holes[:, :, -1]):
        assert 0.01 < border.any(1).mean() < 0.2  # it reaches every side


def mixed(spec: Augment, batches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    images = np.random.default_rng(0).uniform(1, 2, (4, HEIGHT, WIDTH, 1)).astype(np.float32)
    run = jax.jit(jax.vmap(lambda key: mix(key, jnp.asarray(images), jnp.eye(4), spec)))
    return images, *map(np.asarray, run(jax.random.split(KEY, batches)))


def test_mixup_and_cutmix():
    images, out, targets = mixed(Augment(mixup=0.2, cutmix=0.3), 256)
    partners = images[[2, 3, 0, 1]]
    keep = targets[:, 0, 0]
    np.testing.assert_allclose(
        targets, keep[:, None, None] * np.eye(4) + (1 - keep)[:, None, None] * np.eye(4)[[2, 3, 0, 1]], atol=1e-6
    )
    own, other = (out == images).all(-1), (out == partners).all(-1)
    nothing = own.all((1, 2, 3))
    cut = (own | other).all((1, 2, 3)) & ~nothing
    blended = ~nothing & ~cut
    assert nothing.mean() == pytest.approx(0.5, abs=0.08)
    assert cut.mean() == pytest.approx(0.3, abs=0.08)
    assert blended.mean() == pytest.approx(0.2, abs=0.08)

    np.testing.assert_array_equal(keep[nothing], 1)
    weight = keep[blended][:, None, None, None, None]
    np.testing.assert_allclose(out[blended], weight * images + (1 - weight) * partners, atol=1e-5)
    assert keep[blended].std() == pytest.approx(12**-0.5, abs=0.08)  # uniform
    np.testing.assert_allclose(keep[cut], own[cut].mean((2, 3))[:, 0], atol=1e-6)  # the real share of the area
    assert (other[cut].any(3).sum(2) * other[cut].any(2).sum(2) == other[cut].sum((2, 3))).all()  # a rectangle


def test_alpha():
    _, _, targets = mixed(Augment(mixup=1.0, alpha=0.2), 128)
    assert targets[:, 0, 0].std() == pytest.approx((4 * (2 * 0.2 + 1)) ** -0.5, abs=0.06)


def normalise(images: jax.Array) -> jax.Array:
    return (images.astype(jnp.float32) / 255 - 0.5) / 0.25


PAPER = Augment(flip=True, crop_padding=4, policy="cifar10", erasing=0.25, mixup=0.25, cutmix=0.25, label_smoothing=0.1)
batch_fn = jax.jit(augment_batch, static_argnames=("num_classes", "spec", "normalise"))


def test_all_off_is_the_identity():
    images = np.stack([photograph(seed=i) for i in range(4)])
    labels = np.arange(4, dtype=np.int32)
    assert augment(KEY, images, Augment()).dtype == jnp.uint8
    np.testing.assert_array_equal(augment(KEY, images, Augment()), images)
    x, targets = batch_fn(KEY, images, labels, num_classes=5, spec=Augment(), normalise=normalise)
    np.testing.assert_array_equal(x, jax.jit(normalise)(images))
    np.testing.assert_array_equal(targets, np.eye(5)[:4])


def test_the_whole_pipeline():
    """One compilation serves all keys; the result depends on the image and its position only."""
    key = jax.random.key(0, impl="threefry2x32")  # whose vmap over keys is exact
    images = np.broadcast_to(photograph(), (8, HEIGHT, WIDTH, 3))
    labels = np.arange(8, dtype=np.int32) % 5
    run = partial(batch_fn, images=images, labels=labels, num_classes=5, spec=PAPER, normalise=normalise)
    before = batch_fn._cache_size()
    x, targets = run(key)
    again, _ = run(key)
    others, _ = run(jax.random.key(1, impl="threefry2x32"))
    assert batch_fn._cache_size() == before + 1
    assert x.dtype == targets.dtype == jnp.float32
    assert np.isfinite(x).all()
    np.testing.assert_array_equal(x, again)
    assert (np.asarray(x) != others).any()
    np.testing.assert_allclose(targets.sum(1), 1, atol=1e-6)
    assert targets.min() == pytest.approx(0.1 / 5)

    pixels = Augment(flip=True, crop_padding=4, policy="cifar10")
    alone = np.asarray(augment(key, images, pixels))
    assert len(np.unique(alone, axis=0)) == 8
    company = np.concatenate([images[:3], np.stack([photograph(seed=i) for i in range(5)])])
    np.testing.assert_array_equal(augment(key, company, pixels)[:3], alone[:3])


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.test_augment import PAPER, batch_fn, normalise, photograph

assert len(jax.devices()) == 8
images, labels = np.stack([photograph(seed=i) for i in range(16)]), np.arange(16, dtype=np.int32) % 5
split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
for seed in range(6):
    x, y = (
        batch_fn(jax.random.key(seed), *inputs, num_classes=5, spec=PAPER, normalise=normalise)
        for inputs in ((images, labels), jax.device_put((images, labels), split))
    )
    assert len(y[0].sharding.device_set) == 8
    np.testing.assert_allclose(x[0], y[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(x[1], y[1], rtol=0, atol=1e-6)
"""


def test_devices_do_not_change_the_result():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", SHARDED],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(crop_padding=-1), "crop_padding=-1 must be from 0 to 32"),
        (dict(rotation=20.0), "rotation=20.0 must be from 0 to 0.5: it is a fraction of a full turn"),
        (dict(zoom=1.0), "zoom=1.0 must be at least 0 and below 1"),
        (dict(resized_crop=(0.8, 0.2)), "resized_crop=(0.8, 0.2) must be two fractions of the area"),
        (dict(policy="trivial"), "policy='trivial' is unknown: choose one of none, randaugment, cifar10"),
        (dict(magnitude=30), "magnitude=30 must be from 0 to 10"),
        (dict(fill="white"), "fill='white' is unknown: choose one of mirror, black"),
        (dict(num_ops=0), "num_ops=0 must be at least 1"),
        (dict(colour=1.5), "colour=1.5 must be from 0 to 1"),
        (dict(erasing=float("nan")), "erasing=nan must be from 0 to 1"),
        (dict(mixup=0.8, cutmix=0.5), "mixup + cutmix = 1.3 must be at most 1"),
        (dict(alpha=0.0), "alpha=0.0 must be above 0"),
        (dict(label_smoothing=1.0), "label_smoothing=1.0 must be at least 0 and below 1"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Augment(**fields)
