"""Calibration of a model's confidence, measured on the validation images and stored with the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from smallvit.runs.scores import softmax, wilson

FEWEST = 50  # validation images needed to fit a temperature
COLDEST, HOTTEST = 0.2, 5.0
LOWEST, HIGHEST = 1e-3, 1e3  # accepted from a file
GRID = (*(i / 100 for i in range(99)), *(i / 1000 for i in range(990, 1000)))


class Choice(NamedTuple):
    """A threshold on the confidence, and its effect on the validation images."""

    threshold: float
    images: int
    kept: int  # images at or above the threshold
    right: int  # correct among those
    precision: float  # requested

    @property
    def supported(self) -> bool:
        """Whether the precision is reached with 95 % confidence, not just as observed."""
        return wilson(self.right, self.kept)[0] >= self.precision

    def describe(self) -> str:
        low, high = (100 * share for share in wilson(self.right, self.kept))
        what = f"threshold {self.threshold:g}: {self.kept:,} of {self.images:,} validation images are kept"
        line = f"{what}, {self.right / self.kept:.1%} of them correct (95 % interval {low:.1f} to {high:.1f})"
        if self.supported:
            return line
        few = f"so few images cannot confirm a precision of {self.precision:g}"
        return f"{line}; {few}, it may be as low as {low:.1f} %"


@dataclass(frozen=True)
class Calibration:
    """The temperature, and for each threshold the number of validation images kept, and of correct ones among them."""

    temperature: float = 1.0
    images: int = 0
    thresholds: tuple[tuple[float, int, int], ...] = ()

    def choose(self, precision: float) -> Choice:
        """Returns the lowest threshold with this precision: by its lower 95 % bound, or else as observed."""
        if not 0 < precision < 1:
            raise ValueError(f"precision={precision:g} must be between 0 and 1, such as 0.99")
        if not self.images:
            raise ValueError("the model has no stored validation scores to choose a threshold with: give a threshold")
        choices = [Choice(at, self.images, kept, right, precision) for at, kept, right in self.thresholds if kept]
        observed = [choice for choice in choices if choice.right >= precision * choice.kept]
        if not observed:
            best = max(choices, key=lambda choice: (choice.right / choice.kept, choice.kept))
            reached = f"the highest is {best.right / best.kept:.3f}, at threshold {best.threshold:g}"
            raise ValueError(f"no threshold gives a precision of {precision:g} on the validation images: {reached}")
        return next((choice for choice in observed if choice.supported), observed[0])

    def to_json(self) -> dict[str, Any]:
        if not self.images:
            return {}
        validation = {"images": self.images, "thresholds": [list(row) for row in self.thresholds]}
        return {"temperature": self.temperature, "validation": validation}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Calibration":
        """Reads the content of config.json; models of older versions have no calibration."""
        temperature, validation = stored.get("temperature", 1.0), stored.get("validation", {})
        if not (isinstance(temperature, int | float) and LOWEST <= temperature <= HIGHEST):
            raise ValueError(
                f"temperature={temperature!r:.60} must be a positive number from {LOWEST:g} to {HIGHEST:g}"
            )
        try:
            images = int(validation.get("images", 0))
            rows = tuple((float(at), int(kept), int(right)) for at, kept, right in validation.get("thresholds", ()))
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise ValueError("validation must have images, and thresholds with two counts of images each") from None
        if not all(0 <= at <= 1 and 0 <= right <= kept <= images for at, kept, right in rows):
            raise ValueError(f"validation has a threshold whose counts do not fit {images} images")
        return cls(float(temperature), images, rows)


UNCALIBRATED = Calibration()


def calibrate(logits: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> Calibration:
    """Fits a temperature and counts images by threshold, from the logits of validation images."""
    temperature = round(fit_temperature(logits, labels), 4)
    confidence = softmax(logits / temperature).max(axis=1)
    right = logits.argmax(axis=1) == labels
    rows: list[tuple[float, int, int]] = []
    for threshold in GRID:
        kept = confidence >= threshold
        row = (threshold, int(kept.sum()), int(right[kept].sum()))
        if not rows or row[1] != rows[-1][1]:  # else it keeps the same images
            rows.append(row)
    return Calibration(temperature, len(labels), tuple(rows))


def why_not(images: int) -> str | None:
    """The reason why so few validation images do not calibrate a model, if they do not."""
    return f"there are {images} validation images, a temperature needs {FEWEST}" if images < FEWEST else None


def fit_temperature(logits: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> float:
    """Fits the temperature (https://arxiv.org/abs/1706.04599) with the lowest loss; 1 for fewer than 50 images.

    As in Platt scaling, one of n + 2 labels is assumed to be wrong: a few images that are all correct do not prove
    certainty.
    """
    number, classes = logits.shape
    if why_not(number):
        return 1.0
    logits = logits.astype(np.float64)
    labelled = logits[np.arange(number), labels]
    others = (logits.sum(axis=1) - labelled) / max(classes - 1, 1)
    target = labelled + (others - labelled) / (number + 2)
    low, high = 1 / HOTTEST, 1 / COLDEST  # bounds of 1 / temperature, in which the loss is convex
    for _ in range(24):
        middle = (low * high) ** 0.5
        slope = ((softmax(logits * middle) * logits).sum(axis=1) - target).mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return 1 / (low * high) ** 0.5
