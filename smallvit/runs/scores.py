"""Scores of a model's logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from smallvit.data import Split, eval_batches

WHICH = {"test": "test", "val": "validation", "train": "labelled", "folds": "out-of-fold"}  # for messages about images


def split_logits(
    predict: Callable[[np.ndarray], np.ndarray], split: Split, batch_size: int
) -> Float[np.ndarray, "n k"]:
    """Returns the logits of every image of a split, each predicted once, in batches of one size."""
    parts = [np.asarray(predict(split.images[rows]))[mask] for rows, mask in eval_batches(len(split), batch_size)]
    return np.concatenate(parts)


@dataclass(frozen=True)
class Scores:
    top1: float  # top1, top5 and ece are in percent
    top5: float
    ece: float
    loss: float
    confusion: Int[np.ndarray, "k k"]  # rows are true classes, columns predicted ones
    probabilities: Float[np.ndarray, "n k"]

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of top1, in percent."""
        low, high = wilson(int(self.confusion.trace()), self.images)
        return 100 * low, 100 * high

    @property
    def error(self) -> float:
        """The standard error of top1, in percent."""
        share = (self.confusion.trace() + 1) / (self.confusion.sum() + 2)  # never 0 or 1
        return 100 * float(np.sqrt(share * (1 - share) / self.confusion.sum()))

    @property
    def mean_recall(self) -> float:
        """Mean recall over the classes that have images, in percent."""
        images = self.confusion.sum(axis=1)
        return 100 * float((np.diagonal(self.confusion)[images > 0] / images[images > 0]).mean())

    @property
    def recall_error(self) -> float:
        """The standard error of mean_recall, in percent: much larger than that of top1 if a class has few images."""
        images = self.confusion.sum(axis=1)
        right, images = np.diagonal(self.confusion)[images > 0], images[images > 0]
        shares = (right + 1) / (images + 2)
        return 100 * float(np.sqrt((shares * (1 - shares) / images).sum())) / len(images)


def wilson(right: int, number: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a proportion, which is also valid for few images and near 0 and 1."""
    if not number:
        return 0.0, 1.0
    z, share = 1.959964, right / number
    centre = share + z**2 / (2 * number)
    margin = z * (share * (1 - share) / number + z**2 / (4 * number**2)) ** 0.5
    scale = 1 + z**2 / number
    return max((centre - margin) / scale, 0.0), min((centre + margin) / scale, 1.0)


def with_interval(top1: float, interval: Sequence[float]) -> str:
    return f"{top1:.2f} % (95 % interval {interval[0]:.1f} to {interval[1]:.1f})"


def too_few(scores: Scores, which: str) -> str | None:
    """Returns a warning if the confidence interval of the accuracy is wider than 10 points."""
    low, high = scores.interval
    if scores.images >= 100 and high - low <= 10:
        return None
    images = f"only {scores.images:,} {which} image{'s' * (scores.images != 1)}"
    return f"warning: {images}: the true accuracy is somewhere between {low:.0f} and {high:.0f} %"


def softmax(logits: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
    """In numpy, since jax would compile it again for every number of images."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def averaged(logits: Sequence[Float[np.ndarray, "n k"]]) -> Float[np.ndarray, "n k"]:
    """Returns the logarithm of the mean of the models' probabilities."""
    logs = [member - np.logaddexp.reduce(member, axis=1, keepdims=True) for member in logits]
    return np.logaddexp.reduce(logs, axis=0) - np.log(np.float32(len(logs)))


def score_split(predict: Callable[[np.ndarray], np.ndarray], split: Split, batch_size: int) -> Scores:
    """Scores the predictions for every image of a split."""
    return score(split_logits(predict, split, batch_size), split.labels)


def score(logits: Float[np.ndarray, "n k"], labels: Int[np.ndarray, "n"]) -> Scores:
    logits = logits.astype(np.float64)
    classes = logits.shape[1]
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    probabilities = np.exp(log_probabilities)
    predicted = logits.argmax(axis=1)
    correct = predicted == labels
    best5 = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (labels, predicted), 1)
    return Scores(
        top1=100 * float(correct.mean()),
        top5=100 * float((best5 == labels[:, None]).any(axis=1).mean()),
        ece=100 * calibration_error(probabilities.max(axis=1), correct),
        loss=float(-log_probabilities[np.arange(len(labels)), labels].mean()),
        confusion=confusion,
        probabilities=probabilities.astype(np.float32),
    )


def calibration_error(confidence: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"], bins: int = 15) -> float:
    """ECE (https://arxiv.org/abs/1706.04599): mean of |accuracy - confidence| over bins, weighted by image count."""
    _, accuracy, sure, count = calibration_bins(confidence, correct, bins)
    return float((count * np.abs(accuracy - sure)).sum() / max(count.sum(), 1))


def calibration_bins(
    confidence: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"], bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns for each bin its centre, accuracy, mean confidence and number of images."""
    which = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)  # (lower, upper], as in the paper
    count = np.bincount(which, minlength=bins)
    some = np.maximum(count, 1)
    accuracy = np.bincount(which, correct, minlength=bins) / some
    sure = np.bincount(which, confidence, minlength=bins) / some
    return (np.arange(bins) + 0.5) / bins, accuracy, sure, count


def per_class(matrix: Integer[np.ndarray, "k k"], classes: Sequence[str]) -> list[dict[str, str | int | float | None]]:
    """Returns precision, recall and number of images per class; lowest recall first, classes without images last.

    The rows of `matrix` are true classes, the columns predicted ones. A score that is undefined is None.
    """
    right, true, predicted = np.diagonal(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
    rows: list[dict[str, str | int | float | None]] = [
        {
            "class": name,
            "recall": float(right[i] / true[i]) if true[i] else None,
            "precision": float(right[i] / predicted[i]) if predicted[i] else None,
            "images": int(true[i]),
        }
        for i, name in enumerate(classes)
    ]
    return sorted(rows, key=lambda row: 2.0 if row["recall"] is None else float(row["recall"]))
