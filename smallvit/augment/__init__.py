"""Augmentation as a function of a key and a batch, to be called inside jit."""

from typing import TYPE_CHECKING

from smallvit.common.lazy import lazy

if TYPE_CHECKING:
    from smallvit.augment.batch import augment_batch, augment_images, erase, mix
    from smallvit.augment.spec import Augment

__all__ = ["Augment", "augment_batch", "augment_images", "erase", "mix"]
__getattr__, __dir__ = lazy(__name__, __file__)
