"""The policies of AutoAugment (https://arxiv.org/abs/1805.09501) and the operations of RandAugment."""

import numpy as np
from jaxtyping import Float, Int

from smallvit.augment.ops import GEOMETRIC, OPS

# Two per row: (operation, probability, magnitude bin, or 0 if the operation has none).

CIFAR10 = (
    (("Invert", 0.1, 0), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, 0), ("Equalize", 0.9, 0)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Equalize", 0.6, 0), ("Equalize", 0.5, 0)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Equalize", 0.3, 0), ("AutoContrast", 0.4, 0)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, 0)),
    (("Equalize", 0.2, 0), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.2, 0), ("Equalize", 0.6, 0)),
    (("Color", 0.9, 9), ("Equalize", 0.6, 0)),
    (("AutoContrast", 0.8, 0), ("Solarize", 0.2, 8)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, 0)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, 0), ("Solarize", 0.8, 3)),
    (("Equalize", 0.8, 0), ("Invert", 0.1, 0)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, 0)),
)
SVHN = (
    (("ShearX", 0.9, 4), ("Invert", 0.2, 0)),
    (("ShearY", 0.9, 8), ("Invert", 0.7, 0)),
    (("Equalize", 0.6, 0), ("Solarize", 0.6, 6)),
    (("Invert", 0.9, 0), ("Equalize", 0.6, 0)),
    (("Equalize", 0.6, 0), ("Rotate", 0.9, 3)),
    (("ShearX", 0.9, 4), ("AutoContrast", 0.8, 0)),
    (("ShearY", 0.9, 8), ("Invert", 0.4, 0)),
    (("ShearY", 0.9, 5), ("Solarize", 0.2, 6)),
    (("Invert", 0.9, 0), ("AutoContrast", 0.8, 0)),
    (("Equalize", 0.6, 0), ("Rotate", 0.9, 3)),
    (("ShearX", 0.9, 4), ("Solarize", 0.3, 3)),
    (("ShearY", 0.8, 8), ("Invert", 0.7, 0)),
    (("Equalize", 0.9, 0), ("TranslateY", 0.6, 6)),
    (("Invert", 0.9, 0), ("Equalize", 0.6, 0)),
    (("Contrast", 0.3, 3), ("Rotate", 0.8, 4)),
    (("Invert", 0.8, 0), ("TranslateY", 0.0, 2)),
    (("ShearY", 0.7, 6), ("Solarize", 0.4, 8)),
    (("Invert", 0.6, 0), ("Rotate", 0.8, 4)),
    (("ShearY", 0.3, 7), ("TranslateX", 0.9, 3)),
    (("ShearX", 0.1, 6), ("Invert", 0.6, 0)),
    (("Solarize", 0.7, 2), ("TranslateY", 0.6, 7)),
    (("ShearY", 0.8, 4), ("Invert", 0.8, 0)),
    (("ShearX", 0.7, 9), ("TranslateY", 0.8, 3)),
    (("ShearY", 0.8, 5), ("AutoContrast", 0.7, 0)),
    (("ShearX", 0.7, 2), ("Invert", 0.1, 0)),
)
IMAGENET = (
    (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
    (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Equalize", 0.4, 0), ("Rotate", 0.8, 8)),
    (("Solarize", 0.6, 3), ("Equalize", 0.6, 0)),
    (("Posterize", 0.8, 5), ("Equalize", 1.0, 0)),
    (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
    (("Equalize", 0.6, 0), ("Posterize", 0.4, 6)),
    (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
    (("Rotate", 0.4, 9), ("Equalize", 0.6, 0)),
    (("Equalize", 0.0, 0), ("Equalize", 0.8, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
    (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
    (("Sharpness", 0.4, 7), ("Invert", 0.6, 0)),
    (("ShearX", 0.6, 5), ("Equalize", 1.0, 0)),
    (("Color", 0.4, 0), ("Equalize", 0.6, 0)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
)
AUTOAUGMENT = {"cifar10": CIFAR10, "svhn": SVHN, "imagenet": IMAGENET}
SIGNED = (*GEOMETRIC, "Brightness", "Color", "Contrast", "Sharpness")
Table = tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"], Float[np.ndarray, "n k 2"]]


def magnitude(op: str, level: int | float, highest: int, height: int, width: int) -> float:
    """The value of an operation at a level from 0 to `highest`, as in torchvision."""
    share = level / highest
    match op:
        case "ShearX" | "ShearY":
            return 0.3 * share
        case "TranslateX":
            return float(int(150 / 331 * width * share))
        case "TranslateY":
            return float(int(150 / 331 * height * share))
        case "Rotate":
            return 30 * share
        case "Brightness" | "Color" | "Contrast" | "Sharpness":
            return 0.9 * share
        case "Posterize":
            return 8.0 - round(4 * share)
        case "Solarize":
            return 255 * (1 - share)
    return 0.0


def policy_table(policy: str, level: int | float, height: int, width: int) -> Table:
    """The k operations of each of n choices, their probabilities, and their values for either sign."""
    if policy == "randaugment":
        highest, rows = 10, tuple(((op, 1.0, level),) for op in OPS if op != "Invert")
    else:
        highest, rows = 9, AUTOAUGMENT[policy]
    ops = np.array([[OPS.index(op) for op, _, _ in row] for row in rows], np.int32)
    probabilities = np.array([[probability for _, probability, _ in row] for row in rows], np.float32)
    values = np.array(
        [[magnitude(op, level, highest, height, width) for op, _, level in row] for row in rows], np.float32
    )
    signed = np.isin(ops, [OPS.index(op) for op in SIGNED])
    return ops, probabilities, np.stack([np.where(signed, -values, values), values], axis=-1)
