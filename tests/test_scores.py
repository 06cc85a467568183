"""Scores, by hand."""

import numpy as np

from smallvit.data import Split
from smallvit.runs.scores import calibration_error, per_class, score, split_logits

LOGITS = np.log(np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.25, 0.5, 0.25]], np.float32))
LABELS = np.array([0, 1, 2, 1], np.int32)


def test_scores():
    scores = score(LOGITS, LABELS)
    assert scores.top1 == 75
    assert scores.top5 == 100
    np.testing.assert_allclose(scores.loss, -np.log([0.7, 0.3, 0.7, 0.5]).mean(), rtol=1e-6)
    np.testing.assert_array_equal(scores.confusion, [[1, 0, 0], [1, 1, 0], [0, 0, 1]])
    rows = {row["class"]: row for row in per_class(scores.confusion, "abc")}
    assert [rows[name]["recall"] for name in "abc"] == [1, 0.5, 1]
    assert [rows[name]["precision"] for name in "abc"] == [0.5, 1, 1]
    np.testing.assert_allclose(scores.probabilities, np.exp(LOGITS), rtol=1e-6)


def test_a_class_without_images_has_no_recall():
    scores = score(LOGITS[:1], LABELS[:1])
    assert {row["class"]: row["recall"] for row in per_class(scores.confusion, "abc")} == {"a": 1, "b": None, "c": None}


def test_calibration_error():
    confidence = np.array([0.95, 0.95, 0.55, 0.55])
    correct = np.array([True, False, True, True])
    np.testing.assert_allclose(calibration_error(confidence, correct, bins=10), 0.5 * 0.45 + 0.5 * 0.45, rtol=1e-6)


def test_every_image_is_predicted_once():
    images = np.arange(7, dtype=np.uint8).reshape(7, 1, 1, 1)
    split = Split(images, np.zeros(7, np.int32), [str(i) for i in range(7)])
    sizes = []

    def predict(batch: np.ndarray) -> np.ndarray:
        sizes.append(len(batch))
        return batch.reshape(-1, 1).astype(np.float32)

    np.testing.assert_array_equal(split_logits(predict, split, 3)[:, 0], np.arange(7))
    assert sizes == [3, 3, 3]
