"""From images to classes with a trained model."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt8

from smallvit.data import Preprocess
from smallvit.data.decoding import Source, decode
from smallvit.layers import Classifier
from smallvit.runs.saved import Saved, from_pretrained


def make_predict(
    model: Classifier, preprocess: Preprocess
) -> Callable[[PyTree, UInt8[Array, "b H W c"]], Float[Array, "b k"]]:
    def predict(variables: PyTree, images: Array) -> Array:
        logits = model.apply(variables, jnp.asarray(preprocess.normalise(images), model.dtype))
        return jnp.asarray(logits, jnp.float32)

    return predict


class Predictor:
    """A trained model that takes any number of images and compiles for few: 1, 4, 16, ... up to `largest`."""

    def __init__(self, model: Saved | str | Path, largest: int = 64) -> None:
        self.saved = model if isinstance(model, Saved) else from_pretrained(model)
        self.largest = largest
        self._predict = jax.jit(make_predict(self.saved.model, self.saved.preprocess))

    def decode(self, source: str | Source) -> UInt8[np.ndarray, "H W c"]:
        """A file or its bytes as the model wants it; a ValueError says what is wrong with it."""
        preprocess = self.saved.preprocess
        source = Path(source) if isinstance(source, str) else source
        return decode(source, preprocess.size, preprocess.channels, preprocess.fit)

    def __call__(self, images: UInt8[np.ndarray, "n H W c"]) -> Float[np.ndarray, "n k"]:
        """The probability of each class."""
        logits = [self._logits(images[start : start + self.largest]) for start in range(0, len(images), self.largest)]
        return softmax(np.concatenate(logits))

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


def softmax(logits: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
    """In numpy: jax's would be compiled again for every number of images."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Prediction:
    file: str
    classes: tuple[str, ...]  # the most probable first
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Unreadable:
    file: str
    reason: str  # one line, with the file's name


def predict_files(
    model: Predictor | Saved | str | Path, files: Sequence[Path | io.BytesIO], top: int = 3
) -> Iterator[Prediction | Unreadable]:
    """The `top` classes of each file, in order; what cannot be read is said and left out.

    Files are read as they are needed: a folder may hold more images than memory does. Bytes go by the name "-".
    """
    if top < 1:
        raise ValueError(f"top={top} must be at least 1")
    predictor = model if isinstance(model, Predictor) else Predictor(model)
    return _predict_files(predictor, files, top)


def _predict_files(
    predictor: Predictor, files: Sequence[Path | io.BytesIO], top: int
) -> Iterator[Prediction | Unreadable]:
    def read(file: Path | io.BytesIO) -> UInt8[np.ndarray, "H W c"] | Unreadable:
        try:
            return predictor.decode(file)
        except ValueError as error:
            return Unreadable(_name(file), str(error))

    classes = predictor.saved.classes
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files), predictor.largest):
            part = files[start : start + predictor.largest]
            images = list(pool.map(read, part))
            sound = [image for image in images if not isinstance(image, Unreadable)]
            rows = iter(predictor(np.stack(sound)) if sound else ())
            for file, image in zip(part, images, strict=True):
                if isinstance(image, Unreadable):
                    yield image
                    continue
                names, probabilities = zip(*top_classes(next(rows), classes, top), strict=True)
                yield Prediction(_name(file), names, probabilities)


def top_classes(
    probabilities: Float[np.ndarray, " k"], classes: Sequence[str], top: int
) -> tuple[tuple[str, float], ...]:
    """The most probable classes with their probabilities, the most probable first."""
    best = np.argsort(-probabilities, kind="stable")[:top]
    return tuple((classes[int(i)], float(probabilities[i])) for i in best)


def as_csv(predictions: Sequence[Prediction]) -> str:
    """A line an image: file, class, probability, class_2, probability_2 and so on."""
    top = max((len(each.classes) for each in predictions), default=1)
    numbers = ["", *(f"_{i}" for i in range(2, top + 1))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", *(f"{word}{number}" for number in numbers for word in ("class", "probability"))])
    for each in predictions:
        pairs = zip(each.classes, each.probabilities, strict=True)
        writer.writerow([each.file, *(value for name, p in pairs for value in (name, f"{p:.6f}"))])
    return text.getvalue()


def as_json(predictions: Sequence[Prediction]) -> str:
    rows = [
        {
            "file": each.file,
            "predictions": [
                {"class": name, "probability": round(p, 6)}
                for name, p in zip(each.classes, each.probabilities, strict=True)
            ],
        }
        for each in predictions
    ]
    return json.dumps(rows, indent=2) + "\n"


def _name(file: Path | io.BytesIO) -> str:
    return str(file) if isinstance(file, Path) else "-"
