"""Augmentation: the operations against Pillow, the draws against their probabilities."""


import jax
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from smallvit.augment import augment_images
from smallvit.augment.ops import OPS, apply_op

HEIGHT, WIDTH = 24, 32
apply_ops = jax.jit(jax.vmap(apply_op))
augment = jax.jit(augment_images, static_argnames="spec")


def photograph(channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth shapes with some noise, neither dark nor bright all over, as photographs are."""
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


def test_flat_and_two_level_images_as_in_pillow():
    flat, two = np.full((HEIGHT, WIDTH, 3), 77, np.uint8), photograph() // 128 * 128
    cases: list[tuple[str, float]] = [("AutoContrast", 0), ("Equalize", 0)] * len(CASES)
    for image in (flat, two):
        for (op, value), result in zip(cases[:2], ours(image, cases[: len(CASES)])[:2], strict=True):
            np.testing.assert_array_equal(result, np.asarray(pillow(to_pillow(image), op, value)), err_msg=op)
