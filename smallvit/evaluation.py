"""Scores of a trained model on labelled images."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from smallvit import plots
from smallvit.common import text
from smallvit.common.files import write_bytes, write_json
from smallvit.data import HeldOut, Split, load_held_out
from smallvit.runs.folder import fold_folders
from smallvit.runs.prediction import make_predict
from smallvit.runs.saved import Saved, load_ensemble
from smallvit.runs.scores import WHICH, Scores, averaged, per_class, score, split_logits, too_few
from smallvit.runs.source import given_test, own_images, source_of

MISTAKES = "mistakes.csv"
OPTIMISTIC = "the temperature was fitted to these validation images, so the calibration error after it is optimistic"
FLIPPED = "with test-time flips: the mean of the logits of each image and its mirror image"


class Mistake(NamedTuple):
    file: str  # path of the file, or the name of an image that is not a file
    true_class: str
    predicted_class: str
    probability: float  # of the predicted class
    is_file: bool


@dataclass(frozen=True)
class Evaluation:
    model: str
    data: str
    part: str  # test or val; train: all images of data without a split; folds: each image by the model of its fold
    classes: tuple[str, ...]
    split: Split
    logits: Float[np.ndarray, "n k"]
    temperature: float  # applied to the scores, but not to the logits
    images_per_second: float
    batch_size: int
    device: str
    notes: tuple[str, ...]
    root: Path | None = None  # the folder that the image names are relative to, if they are files

    @cached_property
    def scores(self) -> Scores:
        return score(self.logits / np.float32(self.temperature), self.split.labels)

    @cached_property
    def uncalibrated(self) -> Scores:
        """The scores before temperature scaling."""
        return score(self.logits, self.split.labels) if self.temperature != 1 else self.scores

    @property
    def warning(self) -> str | None:
        """A warning if there are too few images to know the accuracy."""
        return too_few(self.scores, WHICH[self.part])

    @property
    def mistakes(self) -> list[Mistake]:
        """The misclassified images, most confident first."""
        true, predicted, confidence = self.split.labels, *self._answers
        rows = []
        for i in map(int, plots.worst_mistakes(true, predicted, confidence, most=None)):
            file, is_file = self.file(i)
            classes = self.classes[true[i]], self.classes[predicted[i]]
            rows.append(Mistake(file, *classes, float(confidence[i]), is_file))
        return rows

    def file(self, row: int) -> tuple[str, bool]:
        """The path of an image, or its name if it is not a file; and whether it is a file."""
        path = None if self.root is None else self.root / self.split.names[row]
        is_file = path is not None and path.is_file()
        return (str(path) if is_file else self.split.names[row]), is_file

    @property
    def per_class(self) -> list[dict[str, str | int | float | None]]:
        """Recall, precision and number of images per class, lowest recall first."""
        return per_class(self.scores.confusion, self.classes)

    def to_json(self) -> dict[str, Any]:
        scores = self.scores
        return {
            "model": self.model,
            "data": self.data,
            "part": self.part,
            "images": len(self.split),
            "top1": round(scores.top1, 3),
            "top1_interval": [round(bound, 3) for bound in scores.interval],
            "top5": round(scores.top5, 3),
            "loss": round(scores.loss, 5),
            "ece": round(scores.ece, 3),
            "temperature": self.temperature,
            "uncalibrated": {"loss": round(self.uncalibrated.loss, 5), "ece": round(self.uncalibrated.ece, 3)},
            "images_per_second": round(self.images_per_second, 1),
            "batch_size": self.batch_size,
            "device": self.device,
            "per_class": self.per_class,
            "classes": list(self.classes),
            "confusion": scores.confusion.tolist(),
            "notes": [*self.notes, *([self.warning] if self.warning else [])],
        }

    @property
    def _answers(self) -> tuple[np.ndarray, np.ndarray]:
        return self.logits.argmax(axis=1), self.scores.probabilities.max(axis=1)

    def save(self, folder: Path) -> None:
        """Writes three pictures, mistakes.csv and, last, evaluation.json."""
        self.draw(folder)
        write_json(folder / "evaluation.json", self.to_json())

    def draw(self, folder: Path) -> None:
        """Writes the pictures and mistakes.csv."""
        true, predicted, confidence = self.split.labels, *self._answers
        before = self.uncalibrated.probabilities.max(axis=1) if self.temperature != 1 else None
        plots.save(plots.confusion(self.scores.confusion, self.classes), folder / "confusion.png")
        plots.save(plots.reliability(confidence, predicted == true, before=before), folder / "reliability.png")
        split = self.split
        figure = plots.mistakes(split.images, true, predicted, confidence, self.classes, split.names)
        plots.save(figure, folder / "worst-mistakes.png")
        write_bytes(folder / MISTAKES, as_csv(self.mistakes).encode(errors="surrogateescape"))


def as_csv(mistakes: Sequence[Mistake]) -> str:
    """One line per mistake: file, true_class, predicted_class, probability."""
    return text.as_csv([Mistake._fields[:4], *([*row[:3], f"{row.probability:.6f}"] for row in mistakes)])


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    batch_size: int = 256,
    flip: bool = False,
) -> Evaluation:
    """Scores a trained model on the test images of `data`, by default those of the run's data.

    Args:
        run: A run folder, its model/, or the folder of a cross-validation. On its own data, a cross-validation is
            scored as an ensemble on the test images of the source or, if there are none, each image by the model of
            its fold.
        data: Any source of `load_data`. Uses its test images, or else its validation images, or all images of a folder
            or file without a split. Class names must be the model's, in any order.
        out: Folder for evaluation.json, mistakes.csv and the pictures.
        data_dir: Folder of known data sets.
        batch_size: Images per step; does not change the scores.
        flip: Test-time flips: average the logits of each image and its mirror image.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    folds = fold_folders(run)
    saved, source = load_ensemble(run), source_of(folds[0] if folds else run)
    if data is None or (source is not None and source.is_same(data)):
        images, data = given_test(folds[0], saved) if folds else own_images(run, saved), source and source.data
        if images is not None and images.part == "val" and saved.temperature != 1:
            images = replace(images, notes=(*images.notes, OPTIMISTIC))
    else:
        images = load_held_out(data, saved.classes, saved.preprocess, data_dir=data_dir)
    if images is None:
        evaluation = out_of_fold([evaluate(fold, batch_size=batch_size, flip=flip) for fold in folds])
    else:
        evaluation = evaluate_images(saved, images, batch_size, root=root_of(data), flip=flip)
    if out is not None:
        evaluation.save(Path(out))
    return evaluation


def evaluate_images(
    saved: Saved, images: HeldOut, batch_size: int = 256, *, root: Path | None = None, flip: bool = False
) -> Evaluation:
    """Scores a model on loaded images; `root` is the folder that their names are relative to, if they are files."""
    batch_size, seconds, logits = min(batch_size, len(images.split)), 0.0, []
    for member in saved.members:
        predict = jax.jit(make_predict(member.model, member.preprocess, flip=flip))
        variables, normalisation = jax.device_put((member.variables, member.preprocess.normalisation))
        call = partial(predict, variables, normalisation=normalisation)
        call(images.split.images[:batch_size]).block_until_ready()  # excludes compilation from the timing
        start = time.monotonic()
        logits.append(split_logits(call, images.split, batch_size))
        seconds += time.monotonic() - start
    if flip:
        images = replace(images, notes=(*images.notes, FLIPPED))
    if saved.others:
        temperatures = [np.float32(member.temperature) for member in saved.members]
        images = replace(images, notes=(*images.notes, f"the mean of the probabilities of {len(logits)} models"))
        logits = [averaged([member / t for member, t in zip(logits, temperatures, strict=True)])]
    return Evaluation(
        saved.spec.name,
        images.name,
        images.part,
        saved.classes,
        images.split,
        logits[0],
        1.0 if saved.others else saved.temperature,
        len(images.split) / seconds,
        batch_size,
        jax.devices()[0].device_kind,
        images.notes,
        root,
    )


def out_of_fold(folds: Sequence[Evaluation]) -> Evaluation:
    """Joins the folds' test images, each with the calibrated logits of the model that was not trained on it."""
    first, *others = folds
    split = Split(
        np.concatenate([fold.split.images for fold in folds]),
        np.concatenate([fold.split.labels for fold in folds]),
        [name for fold in folds for name in fold.split.names],
    )
    shared = [note for note in first.notes if all(note in fold.notes for fold in others)]
    warnings = [note for fold in folds for note in fold.notes if note.startswith("warning")]
    rule = f"each image is scored by one of {len(folds)} models, the one that was not trained on its fold"
    return replace(
        first,
        part="folds",
        split=split,
        logits=np.concatenate([fold.logits / np.float32(fold.temperature) for fold in folds]),
        temperature=1.0,
        images_per_second=len(split) / sum(len(fold.split) / fold.images_per_second for fold in folds),
        notes=tuple(dict.fromkeys([*shared, *warnings, rule])),
    )


def root_of(data: str | Path | None) -> Path | None:
    """The folder that a source's image names are relative to, if they are files; None is the packaged data set."""
    if data is None:
        return None
    path = Path(data).expanduser()
    return path if path.is_dir() else path.parent
