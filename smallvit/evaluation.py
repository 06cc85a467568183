"""Scores of a trained model on labelled images."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from smallvit import plots
from smallvit.common.files import write_json
from smallvit.data import HeldOut, Split, load_held_out
from smallvit.runs.prediction import make_predict
from smallvit.runs.saved import Saved, from_pretrained
from smallvit.runs.scores import Scores, per_class, score_split
from smallvit.runs.source import own_images, source_of


@dataclass(frozen=True)
class Evaluation:
    model: str
    data: str
    part: str  # test or val; or train: all images of data without a split
    classes: tuple[str, ...]
    split: Split
    scores: Scores
    images_per_second: float
    batch_size: int
    device: str
    notes: tuple[str, ...]

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
            "top5": round(scores.top5, 3),
            "loss": round(scores.loss, 5),
            "ece": round(scores.ece, 3),
            "images_per_second": round(self.images_per_second, 1),
            "batch_size": self.batch_size,
            "device": self.device,
            "per_class": self.per_class,
            "classes": list(self.classes),
            "confusion": scores.confusion.tolist(),
            "notes": list(self.notes),
        }

    def save(self, folder: Path) -> None:
        """Writes three pictures and, last, evaluation.json."""
        self.draw(folder)
        write_json(folder / "evaluation.json", self.to_json())

    def draw(self, folder: Path) -> None:
        probabilities = self.scores.probabilities
        predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
        true = self.split.labels
        plots.save(plots.confusion(self.scores.confusion, self.classes), folder / "confusion.png")
        plots.save(plots.reliability(confidence, predicted == true), folder / "reliability.png")
        wrong = plots.worst_mistakes(true, predicted, confidence)
        figure = plots.mistakes(
            self.split.images[wrong], true[wrong], predicted[wrong], confidence[wrong], self.classes
        )
        plots.save(figure, folder / "worst-mistakes.png")


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    batch_size: int = 256,
) -> Evaluation:
    """Scores a trained model on the test images of `data`, by default those of the run's own data.

    Args:
        run: A run folder or its model/.
        data: Anything that `load_data` takes: its test images, or else its validation images, or all images of a
            folder or file without a split. Class names must be the model's, in any order.
        out: Folder to write evaluation.json and the pictures to.
        data_dir: Folder of known data sets.
        batch_size: Images per step; the scores do not depend on it.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    saved, source = from_pretrained(run), source_of(run)
    if data is None or (source is not None and source.is_same(data)):
        images = own_images(run, saved)
    else:
        images = load_held_out(data, saved.classes, saved.preprocess, data_dir=data_dir)
    evaluation = evaluate_images(saved, images, batch_size)
    if out is not None:
        evaluation.save(Path(out))
    return evaluation


def evaluate_images(saved: Saved, images: HeldOut, batch_size: int = 256) -> Evaluation:
    """Scores a model on images that are already loaded."""
    batch_size = min(batch_size, len(images.split))
    predict = jax.jit(make_predict(saved.model, saved.preprocess))
    variables = jax.device_put(saved.variables)
    predict(variables, images.split.images[:batch_size]).block_until_ready()  # do not time the compilation
    begun = time.monotonic()
    scores = score_split(lambda batch: predict(variables, batch), images.split, batch_size)
    seconds = time.monotonic() - begun
    return Evaluation(
        saved.spec.name,
        images.name,
        images.part,
        saved.classes,
        images.split,
        scores,
        len(images.split) / seconds,
        batch_size,
        jax.devices()[0].device_kind,
        images.notes,
    )
