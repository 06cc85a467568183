"""How good a model is: the scores of its logits."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from smallvit.data import Split, eval_batches


def split_logits(
    predict: Callable[[np.ndarray], np.ndarray], split: Split, batch_size: int
) -> Float[np.ndarray, "n k"]:
    """The logits of every image of a split, each predicted once, in batches of one size."""
    parts = [np.asarray(predict(split.images[rows]))[mask] for rows, mask in eval_batches(len(split), batch_size)]
    return np.concatenate(parts)


@dataclass(frozen=True)
class Scores:
    top1: float  # these three in percent
    top5: float
    ece: float
    loss: float
    confusion: Int[np.ndarray, "k k"]  # rows are the truth, columns the prediction
    probabilities: Float[np.ndarray, "n k"]

    @property
    def recall(self) -> Float[np.ndarray, "k"]:
        return _share(self.confusion.diagonal(), self.confusion.sum(axis=1))

    @property
    def precision(self) -> Float[np.ndarray, "k"]:
        return _share(self.confusion.diagonal(), self.confusion.sum(axis=0))


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


def calibration_error(confidence: Float[np.ndarray, "n"], correct: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error (https://arxiv.org/abs/1706.04599): how far confidence is from accuracy, by bins."""
    which = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gap = np.bincount(which, weights=confidence - correct, minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
