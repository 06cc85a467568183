"""The configuration of augmentation."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

AutoAugment = Literal["cifar10", "svhn", "imagenet"]  # the data sets that the policies were found on
Policy = Literal["none", "randaugment", AutoAugment]
Fill = Literal["mirror", "black"]


@dataclass(frozen=True)
class Augment:
    """Augmentation settings, all off by default. Enabled ones are applied in the order of the fields.

    Resized crop, rotation and zoom are one bilinear resampling, mirrored at the border. It may start from images larger
    than the model's (`reserve`). Images are normalised before `erasing`.
    """

    flip: bool = False  # left to right, with probability 0.5
    vertical_flip: bool = False  # top to bottom, with probability 0.5
    quarter_turns: bool = False  # turns by 0, 90, 180 or 270 degrees, equally likely; for square images
    crop_padding: int | float = 0  # border in pixels, or below 1 as a fraction of the side; then a random crop
    resized_crop: tuple[float, float] | None = None  # range of the cropped area as a fraction; aspect ratio 3/4 to 4/3
    rotation: float = 0.0  # maximum, in full turns, in either direction
    zoom: float = 0.0  # height and width are each scaled by 1 - zoom to 1 + zoom
    policy: Policy = "none"  # AutoAugment (https://arxiv.org/abs/1805.09501) by data set, or RandAugment
    magnitude: int | float = 3  # of RandAugment (https://arxiv.org/abs/1909.13719), 0 to 10 as in timm
    num_ops: int = 2  # operations per image of RandAugment
    colour: float = 0.0  # brightness, contrast and saturation are each multiplied by 1 - colour to 1 + colour
    erasing: float = 0.0  # probability that a rectangle becomes the mean colour (https://arxiv.org/abs/1708.04896)
    mixup: float = 0.0  # fraction of batches with Mixup (https://arxiv.org/abs/1710.09412)
    cutmix: float = 0.0  # fraction of batches with CutMix (https://arxiv.org/abs/1905.04899)
    alpha: float = 1.0  # of the Beta distribution of Mixup and CutMix
    label_smoothing: float = 0.0  # fraction of the target that is spread over all classes
    fill: Fill = "mirror"  # beyond the border, for crops and policies; black is before normalisation

    def __post_init__(self) -> None:
        for name, high, meaning in (
            ("crop_padding", 32, "pixels, or below 1 a fraction of the side"),
            ("rotation", 0.5, "a fraction of a full turn"),
            ("colour", 1, "how far a factor may be from 1"),
            ("erasing", 1, "a probability"),
            ("mixup", 1, "a probability"),
            ("cutmix", 1, "a probability"),
            ("magnitude", 10, "the strength of RandAugment, 10 is the strongest"),
        ):
            value = getattr(self, name)
            if not 0 <= value <= high:
                raise ValueError(f"{name}={value} must be from 0 to {high}: it is {meaning}")
        for name in ("zoom", "label_smoothing"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be at least 0 and below 1; 0 turns it off")
        if self.resized_crop is not None and not 0 < self.resized_crop[0] <= self.resized_crop[1] <= 1:
            raise ValueError(
                f"resized_crop={self.resized_crop} must be two fractions of the area, above 0 and the smaller one "
                "first, such as (0.5, 1.0)"
            )
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy={self.policy!r} is unknown: choose one of {', '.join(get_args(Policy))}")
        if self.fill not in get_args(Fill):
            raise ValueError(f"fill={self.fill!r} is unknown: choose one of {', '.join(get_args(Fill))}")
        if self.num_ops < 1:
            raise ValueError(f"num_ops={self.num_ops} must be at least 1; policy='none' turns RandAugment off")
        if self.mixup + self.cutmix > 1:
            total = self.mixup + self.cutmix
            raise ValueError(
                f"mixup + cutmix = {total:g} must be at most 1: each is a fraction of the batches, lower one"
            )
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha} must be above 0; mixup=0 and cutmix=0 turn mixing off")

    @property
    def reserve(self) -> float:
        """How many times as high and wide as the model's input images should be, so that no crop has fewer pixels.

        At most 2: of larger images, bilinear interpolation would skip pixels.
        """
        return 1.0 if self.resized_crop is None else min(2.0, self.resized_crop[0] ** -0.5)

    def describe(self) -> str:
        """Names what is on, in the words of the command's options."""
        words = []
        for field in fields(self):
            if (value := getattr(self, field.name)) != field.default:
                shown = "" if value is True else f" {value:g}" if isinstance(value, float) else f" {value}"
                words.append(field.name.replace("_", "-") + shown)
        return ", ".join(words) or "none"
