"""From images to classes with a trained model."""

from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, UInt8
from scipy.special import softmax

from smallvit.data.decode import Source, decode
from smallvit.saved import Saved, from_pretrained
from smallvit.train.step import make_predict


class Predictor:
    """A trained model that takes any number of images and compiles for few: 1, 4, 16, ... up to `largest`."""

    def __init__(self, model: Saved | str | Path, largest: int = 64) -> None:
        self.saved = model if isinstance(model, Saved) else from_pretrained(model)
        self.largest = largest
        self._predict = jax.jit(make_predict(self.saved.model, self.saved.preprocess))

    def decode(self, source: Source) -> UInt8[np.ndarray, "H W c"]:
        """A file or its bytes as the model wants it; a ValueError says what is wrong with it."""
        preprocess = self.saved.preprocess
        return decode(source, preprocess.size, preprocess.channels, preprocess.fit)

    def __call__(self, images: UInt8[np.ndarray, "n H W c"]) -> Float[np.ndarray, "n k"]:
        """The probability of each class."""
        logits = [self._logits(images[start : start + self.largest]) for start in range(0, len(images), self.largest)]
        return softmax(np.concatenate(logits), axis=-1)  # not jax's, which compiles for every number of images

    def warm_up(self) -> None:
        """Compiles every size, so that no image waits for it."""
        size, channels = self.saved.preprocess.size, self.saved.preprocess.channels
        for number in self._sizes():
            self(np.zeros((number, *size, channels), np.uint8))

    def _logits(self, images: UInt8[np.ndarray, "n H W c"]) -> Float[np.ndarray, "n k"]:
        size = next(size for size in self._sizes() if size >= len(images))
        padded = np.zeros((size, *images.shape[1:]), np.uint8)
        padded[: len(images)] = images
        return np.asarray(self._predict(self.saved.variables, padded))[: len(images)]

    def _sizes(self) -> list[int]:
        return [*(size for size in (1, 4, 16, 64, 256) if size < self.largest), self.largest]
