"""What every source becomes: images, labels and class names in three splits, and how a file becomes an image."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Float32, Int32, Shaped, UInt

Fit = Literal["crop", "pad"]
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

    def normalise(self, images: Shaped[Array | np.ndarray, "*b H W c"]) -> Float32[Array | np.ndarray, "*b H W c"]:
        # Of the images' own rank, since jax may be told to refuse to add axes.
        shape = (1,) * (images.ndim - 1) + (self.channels,)
        mean = np.asarray(self.mean, np.float32).reshape(shape)
        std = np.asarray(self.std, np.float32).reshape(shape)
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
        height, width = stored["size"]
        return cls(
            (int(height), int(width)),
            int(stored["channels"]),
            stored["fit"],
            tuple(map(float, stored["mean"])),
            tuple(map(float, stored["std"])),
            int(stored.get("depth", 8)),
        )


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
