"""How good a trained model is, on any labelled images."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from smallvit import plots
from smallvit.data import HeldOut, Split, held_out, load_data, load_held_out
from smallvit.data.embedded import NAME
from smallvit.data.known import KNOWN
from smallvit.files import read_json, write_json
from smallvit.report import per_class
from smallvit.saved import Saved, from_pretrained
from smallvit.scores import Scores, score, split_logits
from smallvit.train.config import TrainConfig
from smallvit.train.loop import data_digest
from smallvit.train.run import CONFIG, PLAN
from smallvit.train.step import make_predict


@dataclass(frozen=True)
class Evaluation:
    model: str
    data: str
    part: str  # test or val; or train, which is all there is of what is not split
    classes: tuple[str, ...]
    split: Split
    scores: Scores
    images_per_second: float
    batch_size: int
    device: str
    notes: tuple[str, ...]

    @property
    def per_class(self) -> list[dict[str, str | int | float | None]]:
        """Recall, precision and number of images, the lowest recall first."""
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
        """Three pictures, and evaluation.json, which comes last."""
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
        write_json(folder / "evaluation.json", self.to_json())


def evaluate_model(
    run: str | Path, data: str | Path | None = None, *, data_dir: str | Path | None = None, batch_size: int = 256
) -> Evaluation:
    """Scores a run or model folder on the test images of `data`, or without it on those of the run's own data.

    Args:
        run: A run folder, or its model/.
        data: Anything that `load_data` takes: its test images, or else its validation images, or all images of a
            folder or file that is not split. Class names must be the model's, in any order.
        data_dir: Where the files of known sets are.
        batch_size: Images of a step; the result does not depend on it.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    saved = from_pretrained(run)
    config = run_config(run)
    if data is None or (config is not None and _same(data, config.data)):
        images = own_images(run, saved)
    else:
        images = load_held_out(data, saved.classes, saved.preprocess, data_dir=data_dir)

    batch_size = min(batch_size, len(images.split))
    predict = jax.jit(make_predict(saved.model, saved.preprocess))
    variables = jax.device_put(saved.variables)
    predict(variables, images.split.images[:batch_size]).block_until_ready()  # the compilation is not to be timed
    begun = time.monotonic()
    logits = split_logits(lambda batch: predict(variables, batch), images.split, batch_size)
    seconds = time.monotonic() - begun
    return Evaluation(
        saved.spec.name,
        images.name,
        images.part,
        saved.classes,
        images.split,
        score(logits, images.split.labels),
        len(images.split) / seconds,
        batch_size,
        jax.devices()[0].device_kind,
        images.notes,
    )


def own_images(run: str | Path, saved: Saved) -> HeldOut:
    """The images that a run has not trained on, of the data that it has; a ValueError if they cannot be found."""
    config = run_config(run)
    if config is None:
        raise ValueError(f"{run} does not say what it was trained on: give the data to evaluate it on")
    try:
        data = load_data(
            config.data,
            image_size=saved.preprocess.size,
            fit=saved.preprocess.fit,
            seed=config.split_seed,
            data_dir=config.run.data_dir,
            cache_dir=config.run.cache_dir or config.run.runs / ".cache",
        )
    except ValueError as error:
        raise ValueError(f"the data that {run} was trained on cannot be had ({error}): give other data") from None
    plan = _run_folder(Path(run)) / PLAN
    found = held_out(data, saved.classes, saved.preprocess)
    if plan.exists() and read_json(plan)["data"] != data_digest(data):
        line = "warning: the data has changed since the training, so these images may have been trained on"
        return HeldOut(found.name, found.part, found.split, (*found.notes, line))
    return found


def run_config(run: str | Path) -> TrainConfig | None:
    """What a run was asked for; None where only the model is left of it."""
    path = _run_folder(Path(run)) / CONFIG
    stored = read_json(path) if path.exists() else {}
    return TrainConfig.from_json(stored["config"]) if "config" in stored else None


def _run_folder(path: Path) -> Path:
    return path.parent if path.name == "model" and (path.parent / CONFIG).exists() else path


def _same(source: str | Path, other: str | None) -> bool:
    source, other = str(source), other or NAME
    names = {NAME, *KNOWN}
    if source in names or other in names:
        return source == other
    return Path(source).expanduser().resolve() == Path(other).expanduser().resolve()
