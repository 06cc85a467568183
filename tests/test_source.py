"""The digest of a run's data: it covers everything that training, validation and test use."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from smallvit.data import Dataset, Preprocess, Split
from smallvit.runs.source import data_digest


def split(n: int, seed: int) -> Split:
    images = np.random.default_rng(seed).integers(0, 256, (n, 4, 4, 3)).astype(np.uint8)
    return Split(images, (np.arange(n) % 2).astype(np.int32), [str(i) for i in range(n)])


DATA = Dataset(
    "a set",
    ("cats", "dogs"),
    split(200, 0),
    split(20, 1),
    split(30, 2),
    Preprocess((4, 4), 3, "crop", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
    (),
)


def one_pixel(split: Split | None, row: int) -> Split:
    assert split is not None
    images = split.images.copy()
    images[row, 1, 2, 0] ^= 1
    return replace(split, images=images)


def one_label(split: Split | None) -> Split:
    assert split is not None
    labels = split.labels.copy()
    labels[5] ^= 1
    return replace(split, labels=labels)


CHANGES: dict[str, Callable[[], Dataset]] = {
    "a training image": lambda: replace(DATA, train=one_pixel(DATA.train, 1)),
    "a validation image": lambda: replace(DATA, val=one_pixel(DATA.val, 7)),
    "a test image": lambda: replace(DATA, test=one_pixel(DATA.test, 29)),
    "a validation label": lambda: replace(DATA, val=one_label(DATA.val)),
    "a class name": lambda: replace(DATA, classes=("cats", "hounds")),
    "the mean": lambda: replace(DATA, preprocess=replace(DATA.preprocess, mean=(0.5, 0.5, 0.4))),
    "the std": lambda: replace(DATA, preprocess=replace(DATA.preprocess, std=(0.25, 0.25, 0.2))),
    "no test images": lambda: replace(DATA, test=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: str):
    assert data_digest(CHANGES[change]()) != data_digest(DATA)


def test_the_folder_s_name_and_what_was_said_do_not_count():
    assert data_digest(replace(DATA, name="moved", notes=("a line",))) == data_digest(DATA)
