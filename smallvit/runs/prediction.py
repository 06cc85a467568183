"""Classifying images with a trained model."""

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt

from smallvit.data import Normalisation, Preprocess, find_images
from smallvit.data.decoding import FORMATS, Source, decode
from smallvit.layers import Classifier
from smallvit.runs.answers import Images, Prediction, Unreadable, answer, check_threshold
from smallvit.runs.saved import Saved, load_ensemble
from smallvit.runs.scores import averaged, softmax

CHUNK = 8  # files per task: waking a thread takes almost as long as decoding a small image
CONSTANT = 2**24  # bytes of weights that a program may hold


def make_predict(
    model: Classifier, preprocess: Preprocess, *, flip: bool = False
) -> Callable[[PyTree, UInt[Array, "b H W c"], Normalisation], Float[Array, "b k"]]:
    """Returns a function from decoded images to logits; `flip` averages over each image and its mirror image."""

    def predict(variables: PyTree, images: Array, normalisation: Normalisation) -> Array:
        x = jnp.asarray(preprocess.normalise(images, normalisation), model.dtype)
        logits = jnp.asarray(model.apply(variables, x), jnp.float32)
        return (logits + jnp.asarray(model.apply(variables, x[:, :, ::-1]), jnp.float32)) / 2 if flip else logits

    return predict


class Predictor:
    """Runs a trained model on any number of images, compiled for a few batch sizes: 1, 4, 16, ... up to `largest`.

    An ensemble, such as the models of all folds, returns the mean of the probabilities. With `flip`, logits are
    averaged over each image and its mirror image.
    """

    def __init__(self, model: Saved | str | Path, largest: int = 64, *, flip: bool = False) -> None:
        self.saved = model if isinstance(model, Saved) else load_ensemble(model)
        self.largest = largest
        self._members = [(_program(member, flip=flip), np.float32(member.temperature)) for member in self.saved.members]

    def decode(self, source: str | Source, formats: Sequence[str] = FORMATS) -> UInt[np.ndarray, "H W c"]:
        """Decodes an image file, or its bytes, at the model's size; raises a ValueError if it cannot be read."""
        preprocess = self.saved.preprocess
        source = Path(source) if isinstance(source, str) else source
        return decode(source, preprocess.size, preprocess.channels, preprocess.fit, formats, preprocess.depth)

    def __call__(self, images: UInt[np.ndarray, "n H W c"]) -> Float[np.ndarray, "n k"]:
        """Returns the calibrated probability of each class; the mean for an ensemble."""
        logits = [self._logits(images[start : start + size], size) for start, size in self._batches(len(images))]
        return softmax(np.concatenate(logits))

    def warm_up(self) -> None:
        """Compiles every batch size in advance."""
        preprocess = self.saved.preprocess
        for number in self._sizes():
            self(np.zeros((number, *preprocess.size, preprocess.channels), preprocess.dtype))

    def _batches(self, number: int) -> Iterator[tuple[int, int]]:
        """Yields the first row and the compiled size of each batch for so many images.

        An accelerator gets as few batches as possible. A CPU takes about as long for each image in a small batch as in
        a large one, so at most a quarter of a batch is padding: 30 images are two batches of 16, not one of 64.
        """
        sizes, start, filled = self._sizes(), 0, 0.75 if jax.default_backend() == "cpu" else 0.0
        while start < number:
            left = number - start
            above = next((size for size in sizes if size >= left), sizes[-1])
            size = above if left >= filled * above else max(size for size in sizes if size < above)
            yield start, size
            start += size

    def _logits(self, images: UInt[np.ndarray, "n H W c"], size: int) -> Float[np.ndarray, "n k"]:
        padded = images
        if len(images) < size:
            padded = np.zeros((size, *images.shape[1:]), images.dtype)
            padded[: len(images)] = images
        logits = [np.asarray(predict(padded))[: len(images)] / temperature for predict, temperature in self._members]
        return averaged(logits) if len(logits) > 1 else logits[0]

    def _sizes(self) -> list[int]:
        return [*(size for size in (1, 4, 16, 64, 256) if size < self.largest), self.largest]


def _program(saved: Saved, *, flip: bool) -> Callable[[UInt[np.ndarray, "b H W c"]], Float[Array, "b k"]]:
    """A compiled function from decoded images to logits."""
    predict = make_predict(saved.model, saved.preprocess, flip=flip)
    # Once: passing a hundred numpy arrays takes longer than running a small model.
    variables, normalisation = jax.device_put((saved.variables, saved.preprocess.normalisation))
    many = jax.jit(predict)
    # Constants need not be passed, and what depends on them alone is computed by the compiler. That is worth it for a
    # single image; a larger batch gains nothing, and this way shares its program with other runs of the same model.
    one = jax.jit(lambda images: predict(variables, images, normalisation))
    small = sum(leaf.nbytes for leaf in jax.tree.leaves(variables)) <= CONSTANT

    def run(images: UInt[np.ndarray, "b H W c"]) -> Float[Array, "b k"]:
        return one(images) if small and len(images) == 1 else many(variables, images, normalisation)

    return run


def predict(
    model: Predictor | Saved | str | Path, images: Images, top: int = 3, *, threshold: float | None = None
) -> list[Prediction]:
    """Returns the classes of images with their probabilities, as printed by `smallvit predict`.

    Args:
        model: A run folder, the folder of a cross-validation, or what `smallvit.load` returns.
        images: Files, folders with everything below them, or patterns such as "photos/*.jpg"; one or several. Or an
            array of images at the model's size, batch x height x width x channels.
        top: Number of classes per image.
        threshold: Add a decision: the most probable class, or "unsure" if its probability is below the threshold.

    A file that cannot be read raises a ValueError; `predict_files` skips such files instead.
    """
    predictor = model if isinstance(model, Predictor) else Predictor(model)
    if isinstance(images, np.ndarray):
        return _predict_array(predictor, images, top, threshold)
    files = find_images([images] if isinstance(images, str | Path) else images)
    predictions = []
    for found in predict_files(predictor, files, top, threshold=threshold):
        if isinstance(found, Unreadable):
            raise ValueError(found.reason)
        predictions.append(found)
    return predictions


def _predict_array(predictor: Predictor, images: np.ndarray, top: int, threshold: float | None) -> list[Prediction]:
    _check(top, threshold)
    preprocess = predictor.saved.preprocess
    shape = (*preprocess.size, preprocess.channels)
    if images.dtype != preprocess.dtype or images.shape[1:] != shape:
        wanted = f"{np.dtype(preprocess.dtype)} with shape (batch, {', '.join(map(str, shape))})"
        raise ValueError(f"images are {images.dtype} with shape {images.shape}: the model takes {wanted}")
    if not len(images):
        return []
    classes = predictor.saved.classes
    return [answer(f"image {i}", row, classes, top, threshold) for i, row in enumerate(predictor(images))]


def _check(top: int, threshold: float | None) -> None:
    if top < 1:
        raise ValueError(f"top={top} must be at least 1")
    check_threshold(threshold)


def predict_files(
    model: Predictor | Saved | str | Path,
    files: Sequence[Path | io.BytesIO],
    top: int = 3,
    *,
    threshold: float | None = None,
) -> Iterator[Prediction | Unreadable]:
    """Yields the `top` classes of each file, in order, or why it cannot be read; `threshold` is that of `predict`.

    Files are read as they are needed, so a folder may be larger than memory. Bytes are named "-".
    """
    _check(top, threshold)
    predictor = model if isinstance(model, Predictor) else Predictor(model)
    return _predict_files(predictor, files, top, threshold)


def _predict_files(
    predictor: Predictor, files: Sequence[Path | io.BytesIO], top: int, threshold: float | None
) -> Iterator[Prediction | Unreadable]:
    def read(files: Sequence[Path | io.BytesIO]) -> list[UInt[np.ndarray, "H W c"] | Unreadable]:
        return [_read(predictor, file) for file in files]

    classes, largest = predictor.saved.classes, predictor.largest
    with ThreadPoolExecutor() as pool:

        def begin(start: int) -> list[Future[list[UInt[np.ndarray, "H W c"] | Unreadable]]]:
            part = files[start : start + largest]
            return [pool.submit(read, part[first : first + CHUNK]) for first in range(0, len(part), CHUNK)]

        coming = begin(0)
        for start in range(0, len(files), largest):
            begun, coming = coming, begin(start + largest)  # read while the model works
            images = [image for task in begun for image in task.result()]
            sound = [image for image in images if not isinstance(image, Unreadable)]
            rows = iter(predictor(np.stack(sound)) if sound else ())
            for file, image in zip(files[start : start + largest], images, strict=True):
                if isinstance(image, Unreadable):
                    yield image
                    continue
                yield answer(_name(file), next(rows), classes, top, threshold)


def _read(predictor: Predictor, file: Path | io.BytesIO) -> UInt[np.ndarray, "H W c"] | Unreadable:
    try:
        return predictor.decode(file)
    except ValueError as error:
        return Unreadable(_name(file), str(error))


def _name(file: Path | io.BytesIO) -> str:
    return str(file) if isinstance(file, Path) else "-"
