"""Scores, by hand."""

import numpy as np
import pytest

from smallvit.data import Split
from smallvit.runs.calibration import GRID, Calibration, calibrate, fit_temperature
from smallvit.runs.scores import calibration_error, per_class, score, softmax, split_logits, too_few, wilson

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


def test_the_error_of_the_mean_recall_is_that_of_the_rare_class():
    labels = np.array([0] * 400 + [1] * 4)
    logits = np.zeros((404, 2), np.float32)
    logits[np.arange(404), np.where(np.arange(404) % 2, 1 - labels, labels)] = 1  # every other one is right
    scores = score(logits, labels)
    assert scores.mean_recall == 50
    assert scores.error == pytest.approx(50 / 404**0.5, rel=1e-3)
    assert scores.recall_error == pytest.approx((50**2 / 400 + 50**2 / 4) ** 0.5 / 2, rel=1e-3)


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


# Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3.
@pytest.mark.parametrize(
    ("right", "number", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(right: int, number: int, low: float, high: float):
    np.testing.assert_allclose(wilson(right, number), (low, high), atol=5e-5)
    np.testing.assert_allclose(wilson(number - right, number), (1 - high, 1 - low), atol=5e-5)


def test_no_image_says_nothing():
    assert wilson(0, 0) == (0, 1)


@pytest.mark.parametrize(
    ("right", "number", "line"),
    [
        (2, 2, "warning: only 2 test images: the true accuracy is somewhere between 34 and 100 %"),
        (1, 1, "warning: only 1 test image: the true accuracy is somewhere between 21 and 100 %"),
        (99, 99, "warning: only 99 test images: the true accuracy is somewhere between 96 and 100 %"),
        (100, 200, "warning: only 200 test images: the true accuracy is somewhere between 43 and 57 %"),
        (100, 100, None),
        (900, 1000, None),
    ],
)
def test_few_images_are_no_headline(right: int, number: int, line: str | None):
    logits = np.zeros((number, 2), np.float32)
    logits[:, 0] = 1
    assert too_few(score(logits, np.int32(np.arange(number) >= right)), "test") == line


def draws(number: int, temperature: float, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Logits off by a factor, with labels drawn from the probabilities at `temperature`."""
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 3, (number, classes))
    labels = [draw.choice(classes, p=row) for row in softmax(logits / temperature)]
    return logits.astype(np.float32), np.array(labels, np.int32)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_of_the_labels_is_found(temperature: float):
    logits, labels = draws(20_000, temperature)
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.05)
    calibrated = score(logits / np.float32(temperature), labels)
    assert calibrated.ece < 1.5
    assert calibrated.loss <= score(logits, labels).loss
    np.testing.assert_array_equal(calibrated.confusion, score(logits, labels).confusion)


def test_few_images_do_not_run_away_with_the_temperature():
    logits = np.tile(np.float32([2, 0, 0]), (60, 1))
    labels = np.zeros(60, np.int32)
    all_right = fit_temperature(logits, labels)
    assert 0.3 < all_right < 1  # 0.2 is the bound, and 0 would be the least loss
    confidence = softmax(logits / np.float32(all_right)).max()
    assert confidence == pytest.approx(1 - 1 / 62, abs=1e-3)
    assert fit_temperature(logits, labels + 1) == pytest.approx(5)  # all wrong
    assert fit_temperature(logits[:49], labels[:49]) == 1


def test_a_threshold_for_a_precision():
    logits, labels = draws(5000, 2.0)
    calibration = calibrate(logits, labels)
    confidence = softmax(logits / np.float32(calibration.temperature)).max(axis=1)
    right = logits.argmax(axis=1) == labels
    choice = calibration.choose(0.9)
    assert choice.supported
    kept = confidence >= choice.threshold
    assert (choice.images, choice.kept, choice.right) == (5000, kept.sum(), right[kept].sum())
    assert wilson(choice.right, choice.kept)[0] >= 0.9
    lower = confidence >= max(at for at in GRID if at < choice.threshold)
    assert wilson(int(right[lower].sum()), int(lower.sum()))[0] < 0.9  # so it is the lowest
    assert "of them correct (95 % interval" in choice.describe()
    assert "cannot confirm" not in choice.describe()
    stored = Calibration.from_json({"classes": [], **calibration.to_json()})
    assert stored == calibration


def test_what_so_few_images_cannot_confirm_is_said():
    calibration = Calibration(1.0, 60, ((0.0, 60, 50), (0.5, 40, 39), (0.9, 20, 20), (0.99, 0, 0)))
    choice = calibration.choose(0.99)
    assert (choice.threshold, choice.kept, choice.supported) == (0.9, 20, False)
    assert choice.describe().endswith("cannot confirm a precision of 0.99, it may be as low as 83.9 %")
    assert calibration.choose(0.7).threshold == 0  # 50 of 60, at least 0.72
    with pytest.raises(ValueError, match=r"0\.99 on the validation images: the highest is 0\.975, at threshold 0\.5"):
        Calibration(1.0, 60, ((0.0, 60, 50), (0.5, 40, 39))).choose(0.99)
    with pytest.raises(ValueError, match="no stored validation scores"):
        Calibration().choose(0.99)
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        calibration.choose(99.0)
