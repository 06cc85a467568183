"""The end of a run: the score on the test images, pictures, a report."""

from collections.abc import Callable
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
from smallvit.evaluation import Evaluation, evaluate_images
from smallvit.explanation import saliency
from smallvit.report import write_report
from smallvit.runs.folder import CONFIG, MODEL, REPORT, RESULT
from smallvit.runs.saved import Saved, from_pretrained
from smallvit.runs.scores import Scores, per_class
from smallvit.training.config import TrainConfig
from smallvit.training.own import Augmentation
from smallvit.training.progress import Reporter

SHOWN = 16  # images in the pictures of a batch
EXPLAINED = 8


def finish(
    folder: Path,
    config: TrainConfig,
    data: Dataset,
    rows: list[dict[str, Any]],
    kept: int,
    parameters: int,
    clock: Callable[[], float],
    say: Reporter,
    own: Augmentation | None = None,
) -> dict[str, Any]:
    """Scores the kept model, that of row `kept`, on the test images and writes the report; result.json comes last."""
    saved = from_pretrained(folder)
    best = rows[kept]
    split = data.test or data.val
    which, part = ("test", "test") if data.test else ("validation", "val")
    evaluation = evaluate_images(saved, HeldOut(data.name, part, split, data.notes))
    scores = evaluation.scores
    say(f"{which} accuracy {scores.top1:.2f} %, with the model of epoch {best['epoch']:.1f}")

    evaluation.draw(folder)
    pictures(folder, config, saved, data, evaluation, rows, kept, own)
    last = rows[-1]
    result = {
        "test_top1": round(scores.top1, 3) if data.test else None,
        "val_top1": best["val_top1"],
        "test_loss": round(scores.loss, 5) if data.test else None,
        "val_loss": best["val_loss"],
        "minutes": round(clock() / 60, 3),
        "epochs": last["epoch"],
        "kept_epoch": best["epoch"],
        "steps": last["step"],
        "images_per_second": last["images_per_second"],
        "parameters": parameters,
    }
    report(folder, config, data, result, scores, which, rows)
    write_json(folder / RESULT, result)
    say(f"{duration(clock())} in total; the report is {folder / REPORT}, the model {folder / MODEL}")
    return result


def pictures(
    folder: Path,
    config: TrainConfig,
    saved: Saved,
    data: Dataset,
    evaluation: Evaluation,
    rows: list[dict[str, Any]],
    kept: int,
    own: Augmentation | None = None,
) -> None:
    split, probabilities = evaluation.split, evaluation.scores.probabilities
    predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    draw = np.random.default_rng(config.seed)
    plots.save(plots.curves(rows, kept), folder / "curves.png")

    before = data.train.images[np.sort(draw.choice(len(data.train), min(SHOWN, len(data.train)), replace=False))]
    augment = own or partial(augment_images, spec=config.recipe_for(data).augment)
    after = jax.jit(augment)(jax.random.key(config.seed), jnp.asarray(before))
    plots.save(plots.augmented(before, np.asarray(after).astype(np.uint8)), folder / "augmented.png")

    chosen = np.sort(draw.choice(len(split), min(EXPLAINED, len(split)), replace=False))
    images = split.images[chosen]
    maps = saliency(saved.model, saved.variables, saved.preprocess.normalise(images))
    titles = [
        f"{saved.classes[predicted[i]]} {confidence[i]:.0%} (true: {saved.classes[split.labels[i]]})" for i in chosen
    ]
    plots.save(plots.attention(images, maps, titles), folder / "attention.png")


def report(
    folder: Path,
    config: TrainConfig,
    data: Dataset,
    result: dict[str, Any],
    scores: Scores,
    which: str,
    rows: list[dict[str, Any]],
) -> None:
    stored = read_json(folder / CONFIG)
    summary = {
        "test top-1" if data.test else "no test images": f"{scores.top1:.2f} %" if data.test else "-",
        "validation top-1": f"{result['val_top1']:.2f} %",
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
        figures={
            "curves": Path("curves.png"),
            "confusion": Path("confusion.png"),
            "mistakes": Path("worst-mistakes.png"),
            "attention": Path("attention.png"),
            "augmented": Path("augmented.png"),
            "reliability": Path("reliability.png"),
        },
        classes=per_class(scores.confusion, data.classes),
        details={"Configuration": flat(stored["config"]), "Versions": stored["versions"]},
        notes=[*data.notes, f"Confusion, classes and mistakes are from the {which} images."],
    )


def flat(config: dict[str, Any]) -> dict[str, str]:
    pairs = {}
    for name, value in config.items():
        if isinstance(value, dict):
            pairs |= flat(value)
        elif value is not None:
            pairs[name] = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return pairs
