"""Augmentation as a function of a key and a batch, to be called inside jit."""

from smallvit.augment.batch import augment_batch, augment_images, erase, mix
from smallvit.augment.spec import Augment

__all__ = ["Augment", "augment_batch", "augment_images", "erase", "mix"]
