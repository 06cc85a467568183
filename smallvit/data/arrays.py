"""Images that are in memory already, and `.npz` files of them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8
from PIL import Image

from smallvit.data.dataset import Dataset, Fit, Preprocess, Split
from smallvit.data.decode import fit_image
from smallvit.data.splits import choose_size, mean_and_std, split_rest


class Labelled(NamedTuple):
    images: UInt8[np.ndarray, "n H W c"]
    labels: Int32[np.ndarray, "n"]


def from_arrays(
    name: str,
    classes: Sequence[str],
    given: Mapping[str, Labelled],
    *,
    image_size: tuple[int, int] | None,
    fit: Fit,
    seed: int,
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Dataset:
    """A data set of the splits that are `given`, train at least; the others are taken from train."""
    rows, note = split_rest({part: labels for part, (_, labels) in given.items()}, classes, seed)
    splits = {}
    for part, (source, indices) in rows.items():
        images, labels = given[source]
        if indices is not None:
            images, labels = images[indices], labels[indices]
        names = [f"{source}[{i}]" for i in (range(len(labels)) if indices is None else indices)]
        splits[part] = Split(images, labels, names)

    train = splits["train"].images
    size = image_size or choose_size({train.shape[1:3]}, np.full(1, min(train.shape[1:3])))
    splits = {part: Split(_resized(s.images, size, fit), s.labels, s.names) for part, s in splits.items()}
    mean, std = mean_std or mean_and_std(splits["train"].images)
    preprocess = Preprocess(size, train.shape[3], fit, mean, std)
    return Dataset(name, tuple(classes), splits["train"], splits["val"], splits.get("test"), preprocess, (note,))


def _resized(images: UInt8[np.ndarray, "n H W c"], size: tuple[int, int], fit: Fit) -> UInt8[np.ndarray, "n h w c"]:
    if images.shape[1:3] == size:
        return images
    grey = images.shape[3] == 1
    resized = np.empty((len(images), *size, images.shape[3]), np.uint8)

    def resize(i: int) -> None:
        resized[i] = fit_image(Image.fromarray(images[i, :, :, 0] if grey else images[i]), size, fit)

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(resize, range(len(images))):
            pass
    return resized
