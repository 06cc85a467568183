"""The end of a run: evaluation on the test images, pictures and a report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smallvit import plots
from smallvit.augment import augment_images
from smallvit.common.files import read_json, write_json
from smallvit.common.text import duration
from smallvit.data import Dataset, HeldOut
from smallvit.evaluation import OPTIMISTIC, Evaluation, evaluate_images, root_of
from smallvit.explanation import saliency
from smallvit.report import Link, write_report
from smallvit.runs.calibration import UNCALIBRATED, calibrate, why_not
from smallvit.runs.folder import CONFIG, MODEL, REPORT, RESULT
from smallvit.runs.saved import Saved, from_pretrained, save_calibration
from smallvit.runs.scores import WHICH, with_interval
from smallvit.training.config import TrainConfig, flat
from smallvit.training.own import Augmentation
from smallvit.training.progress import Reporter

SHOWN = 16  # images in the picture of the augmentation
EXPLAINED = 8
PICTURES = {
    "curves": "curves.png",
    "confusion": "confusion.png",
    "mistakes": "worst-mistakes.png",
    "attention": "attention.png",
    "augmented": "augmented.png",
    "reliability": "reliability.png",
}
LISTED = 30  # mistakes in the report; mistakes.csv has all


def finish(
    folder: Path,
    config: TrainConfig,
    data: Dataset,
    rows: list[dict[str, Any]],
    kept: int,
    parameters: int,
    clock: Callable[[], float],
    log: Reporter,
    own: Augmentation | None = None,
) -> dict[str, Any]:
    """Scores the model of row `kept` on the test images and writes the report and, last, result.json."""
    saved = replace(from_pretrained(folder), calibration=UNCALIBRATED)
    best, root = rows[kept], root_of(config.data)
    validation = evaluate_images(saved, HeldOut(data.name, "val", data.val, data.notes), root=root)
    missing = "the validation images were trained on" if config.all_images else why_not(len(data.val))
    if not config.all_images:
        saved = replace(saved, calibration=calibrate(validation.logits, data.val.labels))
    save_calibration(folder, saved.calibration)
    if data.test:
        evaluation = evaluate_images(saved, HeldOut(data.name, "test", data.test, data.notes), root=root)
    else:
        evaluation = replace(validation, temperature=saved.temperature)
        if saved.temperature != 1:
            evaluation = replace(evaluation, notes=(*evaluation.notes, OPTIMISTIC))
    scores = evaluation.scores
    accuracy = f"{WHICH[evaluation.part]} accuracy {with_interval(scores.top1, scores.interval)}"
    log(f"{accuracy}, with the model of epoch {best['epoch']:.1f}")
    if evaluation.warning:
        log(evaluation.warning)
    if missing:
        evaluation = replace(evaluation, notes=(*evaluation.notes, f"probabilities are not calibrated: {missing}"))
        log(evaluation.notes[-1])

    evaluation.draw(folder)
    pictures(folder, config, saved, data, evaluation, rows, kept, log, own)
    last = rows[-1]
    result = {
        "test_top1": round(scores.top1, 3) if data.test else None,
        "test_interval": _rounded(scores.interval) if data.test else None,
        "val_top1": best["val_top1"],
        "val_interval": None if config.all_images else _rounded(validation.scores.interval),
        "test_loss": round(evaluation.uncalibrated.loss, 5) if data.test else None,
        "val_loss": best["val_loss"],
        "minutes": round(clock() / 60, 3),
        "epochs": last["epoch"],
        "kept_epoch": best["epoch"],
        "steps": last["step"],
        "images_per_second": last["images_per_second"],
        "parameters": parameters,
    }
    report(folder, config, data, result, evaluation, rows)
    write_json(folder / RESULT, result)
    log(f"{duration(clock())} in total; the report is {folder / REPORT}, the model {folder / MODEL}")
    return result


def pictures(
    folder: Path,
    config: TrainConfig,
    saved: Saved,
    data: Dataset,
    evaluation: Evaluation,
    rows: list[dict[str, Any]],
    kept: int,
    log: Reporter,
    own: Augmentation | None = None,
) -> None:
    split, probabilities = evaluation.split, evaluation.scores.probabilities
    predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    draw = np.random.default_rng(config.seed)
    plots.save(plots.curves(rows, kept), folder / "curves.png")

    before = data.to_augment[np.sort(draw.choice(len(data.train), min(SHOWN, len(data.train)), replace=False))]
    augment = own or partial(augment_images, spec=config.recipe_for(data).augment, size=data.preprocess.size)
    after = jax.jit(augment)(jax.random.key(config.seed), jnp.asarray(before))
    plots.save(plots.augmented(before, np.asarray(after).astype(before.dtype)), folder / "augmented.png")

    chosen = np.sort(draw.choice(len(split), min(EXPLAINED, len(split)), replace=False))
    images = split.images[chosen]
    try:
        maps = saliency(saved.model, saved.variables, saved.preprocess.normalise(images))
    except ValueError as error:
        log(f"no attention.png: {error}")
        return
    titles = [
        f"{saved.classes[predicted[i]]} {confidence[i]:.0%} (true: {saved.classes[split.labels[i]]})" for i in chosen
    ]
    plots.save(plots.attention(images, maps, titles), folder / "attention.png")


def report(
    folder: Path,
    config: TrainConfig,
    data: Dataset,
    result: dict[str, Any],
    evaluation: Evaluation,
    rows: list[dict[str, Any]],
) -> None:
    stored, which = read_json(folder / CONFIG), WHICH[evaluation.part]
    settings = {name: _in_words(value) for name, value in flat(stored["config"]).items()}
    scores, calibration = evaluation.scores, f"{evaluation.scores.ece:.1f} %"
    before = f"{evaluation.uncalibrated.ece:.1f} % before temperature {evaluation.temperature:.3g}"
    summary: dict[str, str | tuple[str, str]] = {
        "test top-1" if data.test else "no test images": _card(scores.top1, scores.interval) if data.test else "-",
        "validation top-1": (
            ("-", "trained on") if config.all_images else _card(result["val_top1"], result["val_interval"])
        ),
        "calibration error": calibration if evaluation.temperature == 1 else (calibration, before),
        "minutes": f"{result['minutes']:.1f}",
        "epochs": f"{result['epochs']:.1f}",
        "images per second": f"{result['images_per_second']:,.0f}",
        "parameters": f"{result['parameters']:,}",
    }
    write_report(
        folder,
        title=f"{config.model} on {data.name}",
        summary=summary,
        command=stored["command"] or "",
        history=rows,
        figures={name: Path(file) for name, file in PICTURES.items() if (folder / file).exists()},
        classes=evaluation.per_class,
        mistakes=[
            {
                "file": Link(mistake.file, Path(mistake.file).absolute().as_uri()) if mistake.is_file else mistake.file,
                "true class": mistake.true_class,
                "predicted class": mistake.predicted_class,
                "probability": f"{mistake.probability:.1%}",
            }
            for mistake in evaluation.mistakes[:LISTED]
        ],
        details={"Configuration": settings, "Versions": stored["versions"]},
        notes=[
            *([evaluation.warning] if evaluation.warning else []),
            *evaluation.notes,
            f"Confusion, classes, mistakes and calibration are from the {which} images.",
        ],
    )


def _card(top1: float, interval: Sequence[float]) -> tuple[str, str]:
    return f"{top1:.2f} %", f"95 % interval {interval[0]:.1f} to {interval[1]:.1f}"


def _rounded(interval: Sequence[float]) -> list[float]:
    return [round(bound, 3) for bound in interval]


def _in_words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
