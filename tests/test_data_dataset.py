"""The parts of a data set, its automatic splits, and the data set in the package."""

import json
from dataclasses import replace
from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit.data import Preprocess, load_data
from smallvit.data.splits import choose_size, mean_and_std, stratified


def test_normalise_is_the_same_in_numpy_and_jitted():
    preprocess = Preprocess((4, 5), 3, "crop", (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), np.uint8)
    wanted = (images / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.2, 0.3, 0.4])
    for result in (preprocess.normalise(images), jax.jit(preprocess.normalise)(jnp.asarray(images))):
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, wanted, atol=1e-5)
    np.testing.assert_allclose(preprocess.normalise(images[0]), wanted[0], atol=1e-5)


def test_preprocess_survives_json():
    preprocess = Preprocess((4, 5), 1, "pad", (0.5,), (0.2,))
    assert Preprocess.from_json(json.loads(json.dumps(preprocess.to_json()))) == preprocess
    with pytest.raises(ValueError, match="fields size, channels"):
        Preprocess.from_json({"size": [4, 5]})


def test_statistics_are_those_of_numpy():
    images = np.random.default_rng(0).integers(0, 256, (1030, 3, 2, 3), np.uint8)
    mean, std = mean_and_std(images)
    np.testing.assert_allclose(mean, (images / 255).mean((0, 1, 2)))
    np.testing.assert_allclose(std, (images / 255).std((0, 1, 2)))
    assert mean_and_std(np.full((2, 3, 3, 1), 255, np.uint8)) == ((1.0,), (1 / 255,))


@pytest.mark.parametrize("counts", [(2, 2), (3, 40), (10, 20, 31), (5, 100)])
def test_split_is_stratified_seeded_disjoint_and_covering(counts: tuple[int, ...]):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))
    classes = [str(label) for label in range(len(counts))]
    contents = range(len(labels))
    parts = stratified(labels, classes, (0.1, 0.1), 0, contents)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    for label, count in enumerate(counts):
        train, val, test = (int((labels[part] == label).sum()) for part in parts)
        assert val == max(1, round(0.1 * count))
        assert test == (round(0.1 * count) if count > 2 else 0)
        assert train >= 1
    again, other = (stratified(labels, classes, (0.1, 0.1), seed, contents) for seed in (0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert len(labels) < 10 or any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_equal_images_stay_together(seed: int):
    rng = np.random.default_rng(seed)
    labels, contents = rng.integers(0, 3, 300), rng.integers(0, 150, 300)  # also in two classes
    parts = stratified(labels, "abc", (0.1, 0.1), seed, contents.tolist())
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(300))
    train, val, test = (set(contents[part].tolist()) for part in parts)
    assert not (train & val) | (train & test) | (val & test)
    assert all(set(labels[part].tolist()) == {0, 1, 2} for part in parts)
    assert 15 <= len(parts[1]) <= 60


def test_a_class_of_equal_images_is_split_all_the_same():
    train, val = stratified(np.array([0, 0, 0, 1, 1]), "ab", (0.1,), 0, [7, 7, 7, 7, 8])
    assert (len(train), len(val)) == (3, 2)


@pytest.mark.parametrize(
    "sizes, short, size",
    [
        ([(28, 28)], 28, (28, 28)),
        ([(64, 48)], 48, (64, 48)),
        ([(128, 128)], 128, (96, 96)),
        ([(20, 20), (24, 24)], 22, (32, 32)),
        ([(70, 300), (80, 80)], 75, (64, 64)),
    ],
)
def test_size_that_suits_the_images(sizes: list[tuple[int, int]], short: int, size: tuple[int, int]):
    assert choose_size(sizes, np.array([short])) == size


def test_embedded_set():
    data = load_data()
    assert data.name == "fashion-mnist-10k"
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (9000, 1000, 2000)
    for split, count in ((data.train, 900), (data.val, 100), (data.test, 200)):
        assert split.images.shape[1:] == (28, 28, 1)
        assert np.bincount(split.labels).tolist() == [count] * 10
    assert len({*data.train.names, *data.val.names, *data.test.names}) == 12_000
    assert data.preprocess.mean == pytest.approx((0.286,), abs=0.005)
    assert data.preprocess.std == pytest.approx((0.353,), abs=0.005)
    assert data.notes == (
        "9,000 train, 1,000 val, 2,000 test: train and test as given, "
        "10 % of each class of train held out for validation (seed 0)",
    )
    # Trousers are two legs, bags are wide: the labels belong to the images.
    means = [data.train.images[data.train.labels == label].mean(axis=(0, 3)) for label in range(10)]
    assert means[1][20, 14] < means[1][20, 11]
    assert means[8][14, 2] > 3 * means[1][14, 2]
    assert "Zalando" in (files("smallvit.data") / "FASHION_MNIST_LICENSE").read_text()


def test_embedded_set_at_another_size_and_seed():
    data, other = load_data("fashion-mnist-10k", image_size=(16, 20)), load_data(image_size=16, seed=1)
    assert data.train.images.shape == (9000, 16, 20, 1)
    assert data.preprocess.size == (16, 20)
    assert other.val.names != data.val.names


@pytest.mark.parametrize(
    ("classes", "why"),
    [
        ("0123456789", "the classes look like digits or letters"),
        (("turn left", "turn right", "stop"), "some classes differ in left and right"),
        (("Left_hand", "Right_hand"), "some classes differ in left and right"),
        ("abc", ""),
        (("left over", "cleft", "bright"), ""),
        (("cat", "dog"), ""),
    ],
)
def test_classes_that_may_depend_on_left_and_right(classes, why):
    assert replace(load_data(), classes=tuple(classes)).sided == why
