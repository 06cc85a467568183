"""Data sets from arrays in memory and `.npz` files."""

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt

from smallvit.data.dataset import Dataset, Fit, Preprocess, Split
from smallvit.data.decoding import MAX_FRAMES, fit_pixels
from smallvit.data.listing import first_few
from smallvit.data.medmnist import CLASSES, SIDED, medmnist_name
from smallvit.data.near import near_notes
from smallvit.data.splits import GIVEN_TEST, Fold, choose_size, mean_and_std, split_rest


class Labelled(NamedTuple):
    images: UInt[np.ndarray, "n H W c"]
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
    fold: Fold | None = None,
) -> Dataset:
    """Makes a data set from the `given` splits, at least train; missing splits are taken from train."""
    numbered = {part: [f"{part}[{i}]" for i in range(len(split.labels))] for part, split in given.items()}
    if fold is not None and "val" in given:  # the folds are made of both
        both = given["train"], given["val"]
        joined = Labelled(np.concatenate([s.images for s in both]), np.concatenate([s.labels for s in both]))
        given = {"train": joined} | {part: split for part, split in given.items() if part == "test"}
        numbered["train"] += numbered["val"]
    contents = (hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in given["train"].images)
    rows, note = split_rest({part: labels for part, (_, labels) in given.items()}, classes, seed, contents, fold=fold)
    splits = {}
    for part, (source, indices) in rows.items():
        images, labels = given[source]
        if indices is not None:
            images, labels = images[indices], labels[indices]
        names = numbered[source] if indices is None else [numbered[source][i] for i in indices]
        splits[part] = Split(images, labels, names)

    train = splits["train"].images
    size = image_size or choose_size({train.shape[1:3]}, np.full(1, min(train.shape[1:3])))
    splits = {part: Split(resized(s.images, size, fit), s.labels, s.names) for part, s in splits.items()}
    mean, std = mean_std or mean_and_std(splits["train"].images)
    preprocess = Preprocess(size, train.shape[3], fit, mean, std, 8 * train.dtype.itemsize)
    return Dataset(
        name,
        tuple(classes),
        splits["train"],
        splits["val"],
        splits.get("test"),
        preprocess,
        (note,),
        given_test=splits.get(GIVEN_TEST),
    )


def load_npz(
    path: Path, *, image_size: tuple[int, int] | None, fit: Fit, seed: int, fold: Fold | None = None
) -> Dataset:
    classes, given = read_npz(path)
    data = from_arrays(path.stem, classes, given, image_size=image_size, fit=fit, seed=seed, fold=fold)
    parts = {"train": data.train, "val": data.val, "test": data.test, GIVEN_TEST: data.given_test}
    splits = {part: split for part, split in parts.items() if split is not None}
    untrained = [name for label, name in enumerate(classes) if label not in data.train.labels]
    missing = [f"warning: train has no images of {first_few(untrained)}"] if untrained else []
    return replace(data, notes=(*data.notes, *missing, *near_notes(splits)), mirrors=medmnist_name(path) not in SIDED)


def read_npz(path: Path) -> tuple[list[str], dict[str, Labelled]]:
    """Reads `images` and `labels`, or `train_images`, `train_labels` and so on; and `classes` if it is there."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"cannot read {path} as an .npz file: it was not written by numpy.savez, or is incomplete")
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files if name in _NAMES}
            present = ", ".join(stored.files) or "nothing"
    except Exception as error:  # damaged, or pickled objects
        raise ValueError(f"cannot read {path} as an .npz file: {' '.join(str(error).split())}") from None

    prefixes = {"train": "train_", "val": "val_", "test": "test_"} if "train_images" in arrays else {"train": ""}
    given = {}
    for part, prefix in prefixes.items():
        images, labels = f"{prefix}images", f"{prefix}labels"
        if part != "train" and images not in arrays and labels not in arrays:
            continue
        for name in (images, labels):
            if name not in arrays:
                raise ValueError(f"{path} has no array {name!r}: it has {present}")
        given[part] = Labelled(
            _checked_images(arrays[images], f"{path}: {images}"), _checked_labels(arrays[labels], f"{path}: {labels}")
        )
        if len(arrays[images]) != len(arrays[labels]):
            raise ValueError(f"{path} has {len(arrays[images])} {images} but {len(arrays[labels])} {labels}")
        if given[part].images.shape[1:] != given["train"].images.shape[1:]:
            shapes = " and ".join(str(split.images.shape[1:]) for split in (given["train"], given[part]))
            raise ValueError(f"{path}: the images of train and {part} differ in shape: {shapes}")
        if (kind := given[part].images.dtype) != (first := given["train"].images.dtype):
            raise ValueError(f"{path}: the images of train are {first}, those of {part} {kind}")

    highest = max(int(labels.max()) for _, labels in given.values())
    known = CLASSES.get(medmnist_name(path) or "", ())
    if "classes" not in arrays and len(known) == highest + 1:
        arrays["classes"] = np.array(known)
    return _checked_classes(arrays.get("classes"), highest, sum(len(s.labels) for s in given.values()), path), given


_NAMES = {f"{part}{kind}" for part in ("", "train_", "val_", "test_") for kind in ("images", "labels")} | {"classes"}


def _checked_images(images: np.ndarray, where: str) -> UInt[np.ndarray, "n H W c"]:
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or 0 in images.shape:
        raise ValueError(f"{where} have shape {images.shape}, not (n, H, W) or (n, H, W, c)")
    _, height, width, channels = images.shape
    if channels not in (1, 3) and (channels > MAX_FRAMES or height < min(width, channels)):
        hint = ": channels come last, use transpose(0, 2, 3, 1)" if height < min(width, channels) else ""
        raise ValueError(f"{where} have shape {images.shape}, not (n, H, W, c) with c up to {MAX_FRAMES}{hint}")
    if images.dtype.kind == "f":
        low, high = images.min(), images.max()
        if not (low >= 0 and high <= 1):  # false for NaN, too
            raise ValueError(f"{where} are {images.dtype} from {low} to {high}: floats must be in [0, 1]")
        images = np.round(images * 255).astype(np.uint8)
    if images.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"{where} are {images.dtype}: they must be uint8, uint16, or floats in [0, 1]")
    return images.astype(images.dtype.newbyteorder("="), copy=False)


def _checked_labels(labels: np.ndarray, where: str) -> Int32[np.ndarray, "n"]:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(f"{where} have shape {labels.shape}, not (n,): one class number per image")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{where} are {labels.dtype}: they must be integers, class numbers from 0")
    if len(labels) and (labels.min() < 0 or labels.max() > np.iinfo(np.int32).max):
        raise ValueError(f"{where} go from {labels.min()} to {labels.max()}: they must be class numbers from 0")
    return labels.astype(np.int32)


def _checked_classes(classes: np.ndarray | None, highest: int, n: int, path: Path) -> list[str]:
    if classes is None:
        if highest >= n:  # probably not a class number, and too many classes to name
            raise ValueError(f"{path} has {n} images but the label {highest}: labels must be class numbers from 0")
        names = [str(label) for label in range(highest + 1)]
    elif classes.ndim != 1 or classes.dtype.kind not in "US":
        raise ValueError(f"{path}: classes must be a list of names, not {classes.dtype} of shape {classes.shape}")
    else:
        names = [name.decode() if isinstance(name, bytes) else str(name) for name in classes.tolist()]
    if len(names) < 2:
        raise ValueError(f"{path} has fewer than 2 classes")
    if len(set(names)) != len(names):
        raise ValueError(f"{path} has {len(set(names))} different names for {len(names)} classes: each needs its own")
    if highest >= len(names):
        raise ValueError(f"{path} has the label {highest} but only {len(names)} classes: labels start at 0")
    return names


def resized(images: UInt[np.ndarray, "n H W c"], size: tuple[int, int], fit: Fit) -> UInt[np.ndarray, "n h w c"]:
    if images.shape[1:3] == size:
        return images
    # No threads: measured on images of 28 pixels, they are slower, since each has too little work.
    resized = np.empty((len(images), *size, images.shape[3]), images.dtype)
    for i, image in enumerate(images):
        resized[i] = fit_pixels(image, size, fit)
    return resized
