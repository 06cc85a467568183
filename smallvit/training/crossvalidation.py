"""Cross-validation: one run per fold, the joint out-of-fold predictions, and likely label errors.

A label is doubtful if a model that was not trained on it predicts another class and gives the label a low probability,
its self-confidence in the terms of confident learning (https://arxiv.org/abs/1911.00068). docs/training.md shows what
this finds.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int, Int64

from smallvit import plots
from smallvit.common.errors import Stopped
from smallvit.common.files import read_json, write_bytes, write_json
from smallvit.common.output import lasting_output
from smallvit.common.text import as_csv
from smallvit.data.embedded import NAME
from smallvit.evaluation import Evaluation, evaluate, evaluate_images, out_of_fold
from smallvit.runs.folder import CACHE, CONFIG, FOLDS, RESULT, fold_folder, fold_folders, new_name
from smallvit.runs.saved import load_ensemble
from smallvit.runs.scores import with_interval
from smallvit.runs.source import given_test
from smallvit.training.callbacks import Callback
from smallvit.training.cluster import join
from smallvit.training.config import TrainConfig
from smallvit.training.loop import train
from smallvit.training.own import Own
from smallvit.training.progress import Reporter

PREDICTIONS, ERRORS = "out-of-fold.csv", "label-errors.csv"


@lasting_output()
def train_folds(
    config: TrainConfig,
    callbacks: Iterable[Callback] = (),
    own: Own = Own(),  # noqa: B008, it is frozen
) -> dict[str, Any]:
    """Does the same as `smallvit train --folds`; returns the content of folds.json and the folder as `folder`."""
    join(config.machine)
    if jax.process_count() > 1:
        raise ValueError("folds are trained in one process: start a single one, or leave out folds")
    log, callbacks = Reporter(), list(callbacks)
    if config.resume is None:
        folder = _new_folder(config)
        runs = [fold_folder(folder, number) for number in range(1, (config.folds or 0) + 1)]
    else:
        folder, runs = config.resume, fold_folders(config.resume)
        if (folder / FOLDS).exists():
            raise ValueError(f"{folder} is finished: its results are in {folder / FOLDS}")
        if config.from_scratch:
            raise ValueError(f"from_scratch is for a single fold: give it with --resume, such as {runs[0]}")
        own.check(_first_config(folder).own, folder)
    for number, run in enumerate(runs, 1):
        if (run / RESULT).exists():
            continue
        log(f"fold {number} of {len(runs)}")
        try:
            train(_config_of(config, folder, number), callbacks, own)
        except Stopped as error:
            raise type(error)(str(error).replace(str(run), str(folder))) from error
    result = write_results(folder, runs, log)
    return {"folder": str(folder), **result}


def _new_folder(config: TrainConfig) -> Path:
    """Its name only; the first fold creates it, so that a user's mistake leaves no folder behind."""
    data = NAME if config.data is None else Path(config.data).expanduser().resolve().name
    default = f"{data.removesuffix('.npz')}-{config.folds}-folds"
    return config.run.runs / new_name(config.run.runs, config.run.name, default)


def _first_config(folder: Path) -> TrainConfig:
    return TrainConfig.from_json(read_json(fold_folder(folder, 1) / CONFIG)["config"])


def _config_of(config: TrainConfig, folder: Path, number: int) -> TrainConfig:
    """The configuration of a fold. Model, size and augmentation chosen by the first fold hold for all."""
    run = fold_folder(folder, number)
    if (run / CONFIG).exists():
        return TrainConfig(resume=run, machine=config.machine)
    if number > 1:
        first = _first_config(folder)
        machine = config.machine.resume(first.machine)
        return replace(first, fold=number, machine=machine, run=replace(first.run, runs=folder, name=run.name))
    minutes = config.minutes and config.minutes / (config.folds or 1)
    cache = config.run.cache_dir or config.run.runs / CACHE
    return replace(
        config, fold=1, minutes=minutes, run=replace(config.run, runs=folder, name=run.name, cache_dir=cache)
    )


def write_results(folder: Path, runs: Sequence[Path], log: Reporter) -> dict[str, Any]:
    """Writes the predictions for all images, likely label errors, two pictures and, last, folds.json."""
    folds = [evaluate(run) for run in runs]
    together = out_of_fold(folds)
    probabilities, labels = together.scores.probabilities, together.split.labels
    numbers = np.repeat(np.arange(1, len(folds) + 1), [len(fold.split) for fold in folds])
    doubtful = rank_label_errors(probabilities, labels)
    _write_rows(folder / PREDICTIONS, together, numbers, np.arange(len(labels)))
    _write_rows(folder / ERRORS, together, numbers, doubtful)
    draw_label_errors(folder / "label-errors.png", together, doubtful)
    top1 = [fold.scores.top1 for fold in folds]
    plots.save(plots.folds(top1, [fold.scores.interval for fold in folds], together.scores.top1), folder / "folds.png")
    saved = load_ensemble(folder)
    test = given_test(runs[0], saved)
    ensemble = None if test is None else evaluate_images(saved, test)
    result = {
        "folds": [_scores(fold) for fold in folds],
        "mean": round(statistics.mean(top1), 3),
        "standard_deviation": round(statistics.stdev(top1), 3),
        "out_of_fold": _scores(together),
        "ensemble_test": ensemble and _scores(ensemble),
        "label_errors": len(doubtful),
        "minutes": round(sum(read_json(run / RESULT)["minutes"] for run in runs), 3),
    }
    write_json(folder / FOLDS, result)

    for note in together.notes:
        log(note)
    for number, fold in enumerate(folds, 1):
        log(f"fold {number}: {with_interval(fold.scores.top1, fold.scores.interval)} of {len(fold.split):,} images")
    log(f"mean {result['mean']:.2f} %, standard deviation {result['standard_deviation']:.2f}")
    log(f"out of fold: {with_interval(together.scores.top1, together.scores.interval)} of {len(labels):,} images")
    if together.warning:
        log(together.warning)
    if ensemble is not None:
        accuracy = with_interval(ensemble.scores.top1, ensemble.scores.interval)
        log(f"the ensemble on the {len(ensemble.split):,} test images of the data: {accuracy}")
    log(f"{len(doubtful):,} images with a label that was not predicted, most doubtful first, are in {folder / ERRORS}")
    log(f"the results are in {folder / FOLDS}; `smallvit predict {folder}` uses the ensemble")
    return result


def rank_label_errors(
    probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]
) -> Int64[np.ndarray, " w"]:
    """The images whose predicted class is not their label, most likely label errors first."""
    wrong = np.flatnonzero(probabilities.argmax(axis=1) != labels)
    return wrong[np.argsort(probabilities[wrong, labels[wrong]], kind="stable")]


def _write_rows(path: Path, evaluation: Evaluation, folds: Int[np.ndarray, " n"], rows: Int[np.ndarray, " w"]) -> None:
    probabilities, labels = evaluation.scores.probabilities, evaluation.split.labels
    lines: list[list[Any]] = [["file", "label", "predicted_class", "probability", "label_probability", "fold"]]
    for row in map(int, rows):
        label, predicted = int(labels[row]), int(probabilities[row].argmax())
        classes = evaluation.classes[label], evaluation.classes[predicted]
        chances = (f"{probabilities[row, number]:.6f}" for number in (predicted, label))
        lines.append([evaluation.file(row)[0], *classes, *chances, int(folds[row])])
    write_bytes(path, as_csv(lines).encode(errors="surrogateescape"))  # file names may be any bytes


def draw_label_errors(path: Path, evaluation: Evaluation, doubtful: Int[np.ndarray, " w"]) -> None:
    split, probabilities = evaluation.split, evaluation.scores.probabilities
    predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    classes = evaluation.classes
    figure = plots.mistakes(split.images, split.labels, predicted, confidence, classes, split.names, doubtful)
    plots.save(figure, path)


def _scores(evaluation: Evaluation) -> dict[str, Any]:
    scores = evaluation.scores
    return {
        "top1": round(scores.top1, 3),
        "interval": [round(bound, 3) for bound in scores.interval],
        "images": len(evaluation.split),
        "loss": round(scores.loss, 5),
        "ece": round(scores.ece, 3),
    }
