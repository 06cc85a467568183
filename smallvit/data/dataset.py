"""What every source becomes: images, labels and class names in three splits, and how a file becomes an image."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Array, Float32, Int32, Shaped, UInt

from smallvit.data.decoding import Fit

Policy = Literal["cifar10", "svhn", "imagenet"]


@dataclass(frozen=True)
class Split:
    images: UInt[
        np.ndarray, "n H W c"
    ]  # uint8, or uint16 for a depth of 16; in memory or memory-mapped: index it, never copy it whole
    labels: Int32[np.ndarray, "n"]
    names: Sequence[str]  # where each image came from: a path below the folder, or an index such as "train[17]"

    def __len__(self) -> int:
        return len(self.labels)


class Normalisation(NamedTuple):
    """Of pixels in [0, 1], by channel: an argument of compiled programs, which serve other images of the same shape."""

    mean: Float32[Array, " c"] | Float32[np.ndarray, " c"]
    std: Float32[Array, " c"] | Float32[np.ndarray, " c"]


@dataclass(frozen=True)
class Preprocess:
    """From a file to what the model sees. It is stored with the model, so that prediction does the same."""

    size: tuple[int, int]  # height, width
    channels: int  # 1 if every image is grey, else 3; others for stacks and arrays
    fit: Fit
    mean: tuple[float, ...]  # of pixels in [0, 1], one for each channel
    std: tuple[float, ...]
    depth: int = 8  # bits of a pixel's channel: 8 or 16

    @property
    def top(self) -> int:
        """The highest value of a pixel."""
        return 2**self.depth - 1

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        return np.uint8 if self.depth == 8 else np.uint16

    @property
    def photographic(self) -> bool:
        """Whether what is done to the colours of photographs can be done to these images."""
        return self.depth == 8 and self.channels in (1, 3)

    @property
    def normalisation(self) -> Normalisation:
        return Normalisation(np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32))

    def normalise(
        self, images: Shaped[Array | np.ndarray, "*b H W c"], by: Normalisation | None = None
    ) -> Float32[Array | np.ndarray, "*b H W c"]:
        """With mean and std, or `by` what a compiled program is given in their place."""
        # Of the images' own rank, since jax may be told to refuse to add axes.
        shape = (1,) * (images.ndim - 1) + (self.channels,)
        mean, std = (each.reshape(shape) for each in by or self.normalisation)
        return (images.astype(np.float32) / self.top - mean) / std

    def to_json(self) -> dict[str, Any]:
        stored = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        if self.depth == 8:
            del stored["depth"]  # as in models from before there was another
        return stored

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Preprocess":
        names = [field.name for field in fields(cls)]
        if sorted({**stored, "depth": 8}) != sorted(names):
            raise ValueError(f"a stored preprocessing has the fields {', '.join(names)}, not {', '.join(stored)}")
        size, channels, fit, mean, std, depth = ({"depth": 8, **stored}[name] for name in names)
        if not (_is_list(size, int, 2) and all(1 <= side <= 4096 for side in size)):
            raise ValueError(f"size={size!r:.60} must be height and width, from 1 to 4096")
        if not (_is_list([channels], int, 1) and 1 <= channels <= 64):
            raise ValueError(f"channels={channels!r:.60} must be a number from 1 to 64")
        if fit not in get_args(Fit):
            raise ValueError(f"fit={fit!r:.60} must be one of {', '.join(get_args(Fit))}")
        for name, values in (("mean", mean), ("std", std)):
            if not (_is_list(values, int | float, channels) and all(abs(value) < math.inf for value in values)):
                raise ValueError(f"{name}={values!r:.60} must be a finite number for each channel ({channels})")
        if min(std) <= 0:
            raise ValueError(f"std={std!r:.60} must be above 0")
        if depth not in (8, 16):
            raise ValueError(f"depth={depth!r:.60} must be 8 or 16")
        return cls((size[0], size[1]), channels, fit, tuple(map(float, mean)), tuple(map(float, std)), depth)


def _is_list(values: Any, kind: Any, number: int) -> bool:
    """Whether it is a list of so many values of a kind; True is no number."""
    right = isinstance(values, list | tuple) and len(values) == number
    return right and all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


@dataclass(frozen=True)
class Dataset:
    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    test: Split | None
    preprocess: Preprocess
    notes: tuple[str, ...]  # lines for the user: how it was split, what was skipped, duplicates across splits
    policy: Policy = "imagenet"  # of AutoAugment, the one that was found on images like these
    mirrors: bool = True  # whether an image and its mirror image are of the same class; digits and signs are not
    given_test: Split | None = None  # that the data came with, where `test` is a fold of the other images

    @property
    def photographic(self) -> bool:
        return self.preprocess.photographic

    @property
    def names(self) -> list[Sequence[str]]:
        """Of the images of each split."""
        splits = self.train, self.val, self.test, self.given_test
        return [() if split is None else split.names for split in splits]

    def with_validation_in_training(self) -> "Dataset":
        if self.test is None:
            raise ValueError(
                f"{self.name} has no test images, which alone are held out with --all-images: leave that out"
            )
        parts = self.train, self.val
        train = Split(
            np.concatenate([part.images for part in parts]),
            np.concatenate([part.labels for part in parts]),
            [name for part in parts for name in part.names],
        )
        note = f"the {len(self.val):,} images of validation are trained on too: only the test images are held out"
        return replace(self, train=train, notes=(*self.notes, note))

    def normalised(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "Dataset":
        """The same images with another normalisation; one for three channels makes grey images coloured ones."""
        channels = self.preprocess.channels
        if not len(mean) == len(std) in (channels, 3):
            raise ValueError(
                f"mean {mean} and std {std} must have {channels} numbers each: the images of {self.name} are "
                f"{'grey' if channels == 1 else 'coloured'}"
            )
        preprocess = replace(self.preprocess, channels=len(mean), mean=tuple(mean), std=tuple(std))
        parts = {part: getattr(self, part) for part in ("train", "val", "test", "given_test")}
        if len(mean) != channels:
            # A view: they may be memory-mapped.
            parts = {
                part: split and replace(split, images=np.broadcast_to(split.images, (*split.images.shape[:3], 3)))
                for part, split in parts.items()
            }
        return replace(self, preprocess=preprocess, **parts)


class Scanned(NamedTuple):
    """A data set before its images are decoded, which may take long, and what decodes them.

    Its images are blank, of mean 0 and std 1, but their number and shape, classes and labels are known: enough to
    choose a model and to compile it. Where a file turns out to be broken, there are fewer images in the end.
    """

    blank: Dataset
    decode: Callable[[], Dataset]
