"""Labelled images to evaluate a model on, with the model's class numbers and preprocessing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, UInt
from PIL import Image

from smallvit.common.files import user_cache
from smallvit.data.arrays import read_npz, resized
from smallvit.data.dataset import Dataset, Preprocess, Split
from smallvit.data.folder import load_test_folder, unknown_classes
from smallvit.data.load import find_source, load_data


@dataclass(frozen=True)
class HeldOut:
    name: str
    part: str  # test or val; train if the source is not split
    split: Split
    notes: tuple[str, ...]


def load_held_out(
    source: str | Path, classes: Sequence[str], preprocess: Preprocess, *, data_dir: str | Path | None = None
) -> HeldOut:
    """Loads the test images of any source of `load_data`, or else its validation images, or else all images.

    Classes are matched by name. A class may have any number of images, since nothing is trained.
    """
    kind, path = find_source(source)
    if kind == "folder":
        part, split, notes = load_test_folder(path, classes, preprocess, user_cache() / "decoded")
        return HeldOut(path.resolve().name, part, split, tuple(notes))
    if kind == "npz":
        names, given = read_npz(path)
        part = next(part for part in ("test", "val", "train") if part in given)
        images, labels = given[part]
        images = _alike(resized(images, preprocess.size, preprocess.fit), preprocess, str(path))
        labels = _renumbered(labels, names, classes, str(path))
        split = Split(images, labels, [f"{part}[{i}]" for i in range(len(labels))])
        return HeldOut(path.stem, part, split, ())
    data = load_data(source, image_size=preprocess.size, fit=preprocess.fit, data_dir=data_dir)
    return held_out(data, classes, preprocess)


def held_out(data: Dataset, classes: Sequence[str], preprocess: Preprocess) -> HeldOut:
    """Selects the same from a data set that is already loaded at the model's image size."""
    part, split = ("val", data.val) if data.test is None else ("test", data.test)
    images = _alike(split.images, preprocess, data.name)
    labels = _renumbered(split.labels, data.classes, classes, data.name)
    return HeldOut(data.name, part, Split(images, labels, split.names), data.notes)


def _renumbered(
    labels: Int32[np.ndarray, "n"], names: Sequence[str], classes: Sequence[str], where: str
) -> Int32[np.ndarray, "n"]:
    numbers = {name: number for number, name in enumerate(classes)}
    if unknown := [name for i in np.unique(labels) if (name := names[int(i)]) not in numbers]:
        raise unknown_classes(where, unknown, classes)
    return np.array([numbers.get(name, -1) for name in names], np.int32)[labels]


def _alike(images: UInt[np.ndarray, "n H W _"], preprocess: Preprocess, where: str) -> UInt[np.ndarray, "n H W c"]:
    """Converts images to the model's number of channels and depth."""
    channels, wanted = images.shape[3], preprocess.channels
    if images.dtype == np.uint8 and preprocess.depth == 16:
        images = images.astype(np.uint16) * 257
    elif images.dtype == np.uint16 and preprocess.depth == 8:
        images = np.round(images / 257).astype(np.uint8)
    if channels == wanted:
        return images
    if (channels, wanted) == (1, 3):
        return np.repeat(images, 3, axis=3)
    if (channels, wanted, preprocess.depth) != (3, 1, 8):
        raise ValueError(f"{where} has images of {channels} channels, the model takes {wanted}")
    return np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in images])[..., None]
