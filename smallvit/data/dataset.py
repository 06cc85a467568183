"""The common form of every source: images, labels and class names in three splits, and the preprocessing."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Array, Float32, Int32, Shaped, UInt

from smallvit.data.decoding import Fit

Policy = Literal["cifar10", "svhn", "imagenet"]
SMALLEST, LARGEST = 1e-6, 1e6  # of mean and std: others are 0 or infinite in float32, or turn logits into NaN


@dataclass(frozen=True)
class Split:
    images: UInt[np.ndarray, "n H W c"]  # uint8, or uint16 for a depth of 16; maybe memory-mapped: never copy it whole
    labels: Int32[np.ndarray, "n"]
    names: Sequence[str]  # origin of each image: a path below the folder, or an index such as "train[17]"

    def __len__(self) -> int:
        return len(self.labels)


class Normalisation(NamedTuple):
    """Mean and std per channel, of pixels in [0, 1]; an argument of compiled programs, not a constant in them."""

    mean: Float32[Array, " c"] | Float32[np.ndarray, " c"]
    std: Float32[Array, " c"] | Float32[np.ndarray, " c"]


@dataclass(frozen=True)
class Preprocess:
    """The steps from an image file to the model's input. Stored with the model, so that prediction uses the same."""

    size: tuple[int, int]  # height, width
    channels: int  # 1 if all images are grey, else 3; other numbers for stacks and arrays
    fit: Fit
    mean: tuple[float, ...]  # of pixels in [0, 1], per channel
    std: tuple[float, ...]
    depth: int = 8  # bits per channel: 8 or 16

    @property
    def top(self) -> int:
        """The highest pixel value."""
        return 2**self.depth - 1

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        return np.uint8 if self.depth == 8 else np.uint16

    @property
    def photographic(self) -> bool:
        """Whether colour augmentations for photographs apply to these images."""
        return self.depth == 8 and self.channels in (1, 3)

    @property
    def normalisation(self) -> Normalisation:
        return Normalisation(np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32))

    def normalise(
        self, images: Shaped[Array | np.ndarray, "*b H W c"], by: Normalisation | None = None
    ) -> Float32[Array | np.ndarray, "*b H W c"]:
        """Scales pixels to [0, 1] and normalises them, with its own mean and std or with those given in `by`."""
        # With the rank of the images: jax may be configured to refuse rank promotion.
        shape = (1,) * (images.ndim - 1) + (self.channels,)
        mean, std = (values.reshape(shape) for values in by or self.normalisation)
        return (images.astype(np.float32) / self.top - mean) / std

    def to_json(self) -> dict[str, Any]:
        stored = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        if self.depth == 8:
            del stored["depth"]  # as in models saved before the field existed
        return stored

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Preprocess":
        names = [field.name for field in fields(cls)]
        if sorted({**stored, "depth": 8}) != sorted(names):
            raise ValueError(f"stored preprocessing must have the fields {', '.join(names)}, not {', '.join(stored)}")
        size, channels, fit, mean, std, depth = ({"depth": 8, **stored}[name] for name in names)
        if not (_is_list(size, int, 2) and all(1 <= side <= 4096 for side in size)):
            raise ValueError(f"size={size!r:.60} must be height and width, from 1 to 4096")
        if not (_is_list([channels], int, 1) and 1 <= channels <= 64):
            raise ValueError(f"channels={channels!r:.60} must be a number from 1 to 64")
        if fit not in get_args(Fit):
            raise ValueError(f"fit={fit!r:.60} must be one of {', '.join(get_args(Fit))}")
        for name, values in (("mean", mean), ("std", std)):
            if not (_is_list(values, int | float, channels) and all(abs(value) <= LARGEST for value in values)):
                raise ValueError(
                    f"{name}={values!r:.60} must be one number of at most {LARGEST:g} per channel ({channels})"
                )
        if min(std) < SMALLEST:
            raise ValueError(f"std={std!r:.60} must be above 0, at least {SMALLEST:g}")
        if depth not in (8, 16):
            raise ValueError(f"depth={depth!r:.60} must be 8 or 16")
        return cls((size[0], size[1]), channels, fit, tuple(map(float, mean)), tuple(map(float, std)), depth)


def _is_list(values: Any, kind: Any, number: int) -> bool:
    """Whether `values` is a list of `number` values of this type; booleans are not numbers."""
    right = isinstance(values, list | tuple) and len(values) == number
    return right and all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


FEWEST_SIGNS = 5  # classes named by a single character, to be taken for digits or letters


@dataclass(frozen=True)
class Dataset:
    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    test: Split | None
    preprocess: Preprocess
    notes: tuple[str, ...]  # messages for the user: how the data was split, what was skipped, duplicates across splits
    policy: Policy = "imagenet"  # AutoAugment policy found on similar images
    mirrors: bool = True  # whether a mirrored image keeps its class; digits and signs do not
    given_test: Split | None = None  # the test split of the source, if `test` is a fold of the other images
    # Images of train, then of val, which --all-images trains on, with a reserve for random resized crops; maybe
    # memory-mapped.
    larger: UInt[np.ndarray, "m h w c"] | None = None

    @property
    def to_augment(self) -> UInt[np.ndarray, "n h w c"]:
        """The training images as augmentation takes them: larger than the model's if there is a reserve."""
        return self.train.images if self.larger is None else self.larger[: len(self.train)]

    @property
    def photographic(self) -> bool:
        return self.preprocess.photographic

    @property
    def sided(self) -> str:
        """Why left and right may matter, judged by the names of the classes; empty if nothing says so."""
        names = [name.casefold() for name in self.classes]
        if len(names) >= FEWEST_SIGNS and all(len(name) == 1 for name in names):
            return "the classes look like digits or letters"
        swapped = {"left": "right", "right": "left"}
        for name in names:
            words = re.split("(left|right)", name)
            if len(words) > 1 and "".join(swapped.get(word, word) for word in words) in names:
                return "some classes differ in left and right"
        return ""

    @property
    def names(self) -> list[Sequence[str]]:
        """The image names of each split."""
        splits = self.train, self.val, self.test, self.given_test
        return [() if split is None else split.names for split in splits]

    def with_validation_in_training(self) -> "Dataset":
        if self.test is None:
            raise ValueError(
                f"{self.name} has no test images: --all-images holds out only these, so leave the option out"
            )
        parts = self.train, self.val
        train = Split(
            np.concatenate([part.images for part in parts]),
            np.concatenate([part.labels for part in parts]),
            [name for part in parts for name in part.names],
        )
        note = f"also training on the {len(self.val):,} validation images: only the test images are held out"
        return replace(self, train=train, notes=(*self.notes, note))

    def normalised(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "Dataset":
        """The same images with another normalisation; one with three channels turns grey images into RGB."""
        channels = self.preprocess.channels
        if not len(mean) == len(std) in (channels, 3):
            raise ValueError(
                f"mean {mean} and std {std} must have {channels} numbers each: the images of {self.name} are "
                f"{'grey' if channels == 1 else 'coloured'}"
            )
        preprocess = replace(self.preprocess, channels=len(mean), mean=tuple(mean), std=tuple(std))
        parts, larger = {part: getattr(self, part) for part in ("train", "val", "test", "given_test")}, self.larger
        if len(mean) != channels:
            parts = {part: split and replace(split, images=_coloured(split.images)) for part, split in parts.items()}
            larger = None if larger is None else _coloured(larger)
        return replace(self, preprocess=preprocess, larger=larger, **parts)


def _coloured(images: UInt[np.ndarray, "n H W 1"]) -> UInt[np.ndarray, "n H W 3"]:
    return np.broadcast_to(images, (*images.shape[:3], 3))  # a view, since the images may be memory-mapped


class Scanned(NamedTuple):
    """A data set whose images are not decoded yet, and the function that decodes them.

    `blank` has the number and shape of the images, the classes and the labels: enough to choose a model and to compile
    it while the images are decoded. Its images are zeros, with mean 0 and std 1. Files that turn out to be broken are
    missing from the decoded data set.
    """

    blank: Dataset
    decode: Callable[[], Dataset]
