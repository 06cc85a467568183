"""Predictions, as values and as text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt

from smallvit.common import text

UNSURE = "unsure"
Images = str | Path | Sequence[str | Path] | UInt[np.ndarray, "n H W c"]  # accepted by `predict`


@dataclass(frozen=True)
class Prediction:
    file: str
    classes: tuple[str, ...]  # the most probable first
    probabilities: tuple[float, ...]
    decision: str | None = None  # with a threshold: the most probable class, or "unsure"


@dataclass(frozen=True)
class Unreadable:
    file: str
    reason: str  # one line, with the file's name


def top_classes(
    probabilities: Float[np.ndarray, " k"], classes: Sequence[str], top: int
) -> tuple[tuple[str, float], ...]:
    """Returns the `top` most probable classes with their probabilities, highest first."""
    best = np.argsort(-probabilities, kind="stable")[:top]
    return tuple((classes[int(i)], float(probabilities[i])) for i in best)


def answer(
    name: str, probabilities: Float[np.ndarray, " k"], classes: Sequence[str], top: int, threshold: float | None
) -> Prediction:
    """Returns the `top` classes of one image and, with a threshold, the decision."""
    names, best = zip(*top_classes(probabilities, classes, top), strict=True)
    decision = None if threshold is None else names[0] if best[0] >= threshold else UNSURE
    return Prediction(name, names, best, decision)


def check_threshold(threshold: float | None, precision: float | None = None) -> None:
    """Raises a ValueError if the threshold is not a probability, or both threshold and precision are given."""
    if threshold is not None and precision is not None:
        raise ValueError("threshold and precision both choose the threshold: give one of them")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold:g} must be between 0 and 1")


def as_csv(predictions: Sequence[Prediction]) -> str:
    """Returns one line per image: file, the decision if there is one, class, probability, class_2, ..."""
    top = max((len(prediction.classes) for prediction in predictions), default=1)
    numbers = ["", *(f"_{i}" for i in range(2, top + 1))]
    decided = any(prediction.decision is not None for prediction in predictions)
    titles = (f"{word}{number}" for number in numbers for word in ("class", "probability"))
    rows: list[list[str | None]] = [["file", *["decision"] * decided, *titles]]
    for prediction in predictions:
        pairs = zip(prediction.classes, prediction.probabilities, strict=True)
        answers = (value for name, p in pairs for value in (name, f"{p:.6f}"))
        rows.append([prediction.file, *[prediction.decision] * decided, *answers])
    return text.as_csv(rows)


def as_json(predictions: Sequence[Prediction]) -> str:
    rows = [
        {
            "file": prediction.file,
            **({} if prediction.decision is None else {"decision": prediction.decision}),
            "predictions": [
                {"class": name, "probability": round(p, 6)}
                for name, p in zip(prediction.classes, prediction.probabilities, strict=True)
            ],
        }
        for prediction in predictions
    ]
    return json.dumps(rows, indent=2) + "\n"
