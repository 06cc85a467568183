"""`.npz` files: their content, and one line for each mistake."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smallvit.data import load_data

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 8, 6, 3), np.uint8)
LABELS = np.arange(40) % 4


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path / "set.npz", **arrays)
    return path / "set.npz"


def test_images_and_labels(tmp_path: Path):
    data = load_data(saved(tmp_path, images=IMAGES, labels=LABELS, other=np.zeros(3)))
    assert data.name == "set"
    assert data.classes == ("0", "1", "2", "3")
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (32, 4, 4)
    assert data.preprocess.size == (8, 6)
    for split in (data.train, data.val, data.test):
        for image, label, name in zip(split.images, split.labels, split.names, strict=True):
            row = int(name.removeprefix("train[").removesuffix("]"))
            np.testing.assert_array_equal(image, IMAGES[row])
            assert label == LABELS[row]


def test_grey_floats_and_names(tmp_path: Path):
    grey = IMAGES[..., 0]
    path = saved(tmp_path, images=grey / 255, labels=LABELS[:, None].astype(np.uint8), classes=np.array(list("abcd")))
    data = load_data(str(path))
    assert data.classes == ("a", "b", "c", "d")
    rows = [int(name[6:-1]) for name in data.train.names]
    np.testing.assert_array_equal(data.train.images[..., 0], grey[rows])


def test_given_splits(tmp_path: Path):
    arrays = {f"{part}_images": IMAGES for part in ("train", "val", "test")}
    arrays |= {f"{part}_labels": LABELS for part in ("train", "val", "test")}
    data = load_data(saved(tmp_path, **arrays))
    assert data.notes[0] == "40 train, 40 val, 40 test: train, val and test as given"
    assert data.val.names[3] == "val[3]"


def test_classes_without_training_images_are_named(tmp_path: Path):
    arrays = dict(train_images=IMAGES, train_labels=2 * LABELS, val_images=IMAGES, val_labels=LABELS)
    assert "warning: train has no images of 1, 3, 5" in load_data(saved(tmp_path, **arrays)).notes


def test_another_size(tmp_path: Path):
    data = load_data(saved(tmp_path, images=IMAGES, labels=LABELS), image_size=4, fit="pad")
    assert data.train.images.shape == (32, 4, 4, 3)
    large = saved(tmp_path, images=np.repeat(np.repeat(IMAGES, 16, axis=1), 16, axis=2), labels=LABELS)
    assert load_data(large).preprocess.size == (96, 96)


SPLIT = dict(train_images=IMAGES, train_labels=LABELS)
BAD = {
    "no labels": (dict(images=IMAGES, x=LABELS), r"has no array 'labels': it has images, x$"),
    "nothing": ({}, r"has no array 'images': it has nothing"),
    "half a split": (dict(**SPLIT, val_images=IMAGES), r"has no array 'val_labels'"),
    "flat": (dict(images=IMAGES.reshape(40, -1), labels=LABELS), r"images have shape \(40, 144\), not \(n, H, W\)"),
    "channels first": (dict(images=IMAGES.transpose(0, 3, 1, 2), labels=LABELS), r"use transpose\(0, 2, 3, 1\)"),
    "no images": (dict(images=IMAGES[:0], labels=LABELS[:0]), r"have shape \(0, 8, 6, 3\)"),
    "integers": (
        dict(images=IMAGES.astype(int), labels=LABELS),
        r"are int64: they must be uint8, uint16, or floats in \[0, 1\]",
    ),
    "floats to 255": (dict(images=IMAGES / 1.0, labels=LABELS), r"from 0.0 to 255.0: floats must be in \[0, 1\]"),
    "NaN": (dict(images=IMAGES * np.nan, labels=LABELS), r"from nan to nan: floats must be in \[0, 1\]"),
    "length": (dict(images=IMAGES, labels=LABELS[:-1]), r"has 40 images but 39 labels"),
    "one hot": (dict(images=IMAGES, labels=np.eye(4, dtype=int)[LABELS]), r"labels have shape \(40, 4\), not \(n,\)"),
    "float labels": (dict(images=IMAGES, labels=LABELS / 1.0), r"labels are float64: they must be integers"),
    "negative": (dict(images=IMAGES, labels=LABELS - 1), r"go from -1 to 2: they must be class numbers from 0"),
    "too high": (dict(images=IMAGES, labels=LABELS, classes=["a", "b", "c"]), r"the label 3 but only 3 classes"),
    "far too high": (dict(images=IMAGES, labels=LABELS * 10**8), r"40 images but the label 300000000"),
    "gap": (dict(images=IMAGES, labels=LABELS * 2), r"class '1' has 0 images to train and validate on"),
    "one class": (dict(images=IMAGES, labels=0 * LABELS), "has fewer than 2 classes"),
    "same names": (dict(images=IMAGES, labels=LABELS, classes=list("abca")), r"3 different names for 4 classes"),
    "numbered names": (dict(images=IMAGES, labels=LABELS, classes=np.arange(4)), r"classes must be a list of names"),
    "pickle": (dict(images=IMAGES, labels=np.array([{}, None], object)), r"cannot read .*set\.npz as an \.npz file"),
    "shapes": (dict(**SPLIT, val_images=IMAGES[:, :4], val_labels=LABELS), r"train and val differ in shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_one_line(tmp_path: Path, case: str):
    arrays, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        load_data(saved(tmp_path, **arrays))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\3\4 torn"])
def test_bad_bytes_are_one_line(tmp_path: Path, content: bytes):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read .*bad\.npz"):
        load_data(tmp_path / "bad.npz")
    np.save(tmp_path / "lone.npy", IMAGES)
    (tmp_path / "lone.npy").rename(tmp_path / "lone.npz")
    with pytest.raises(ValueError, match=r"cannot read .*lone\.npz"):
        load_data(tmp_path / "lone.npz")


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"image_size=0 must be at least 1"):
        load_data(image_size=0)


@pytest.mark.usefixtures("as_a_user")
def test_bad_fit():
    with pytest.raises(ValueError, match=r"fit='stretch' must be 'crop' or 'pad'"):
        load_data(fit="stretch")  # type: ignore[arg-type]


def test_medmnist(tmp_path: Path):
    """Like its files: labels in a column, three splits, numbers without names."""
    rng = np.random.default_rng(0)
    for name, number, first, mirrors in (
        ("pneumoniamnist", 2, "normal", True),
        ("organsmnist_64", 11, "bladder", False),
        ("pathmnist_224", 9, "adipose", True),
        ("retinamnist", 5, "0", True),
        ("pneumoniamnist-mine", 2, "0", True),
        ("bloodmnist", 3, "0", True),  # another set under that name
    ):
        labels = (np.arange(33) % number).astype(np.uint8)[:, None]
        images = {f"{part}_images": rng.integers(0, 256, (33, 10, 10), np.uint8) for part in ("train", "val", "test")}
        np.savez(tmp_path / f"{name}.npz", **images, train_labels=labels, val_labels=labels, test_labels=labels)
        data = load_data(tmp_path / f"{name}.npz")
        assert (len(data.classes), data.classes[0], data.mirrors) == (number, first, mirrors)
        assert data.train.images.shape == (33, 10, 10, 1)
