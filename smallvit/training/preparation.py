"""From a configuration to what is trained: the data, the model and its compiled programs."""

from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from smallvit import kernels
from smallvit.common.text import duration
from smallvit.data import Dataset, Scanned, scan_data
from smallvit.runs.folder import CACHE
from smallvit.runs.saved import Spec, abstract_model
from smallvit.training.choice import choose
from smallvit.training.config import TrainConfig
from smallvit.training.fitting import fitting_size
from smallvit.training.mesh import make_mesh
from smallvit.training.own import Own
from smallvit.training.progress import Reporter
from smallvit.training.start import Start, read_start
from smallvit.training.trainer import Trainer


class Prepared(NamedTuple):
    config: TrainConfig  # with everything that was left open
    data: Dataset
    spec: Spec
    trainer: Trainer
    given: dict[str, np.ndarray] | None  # initial weights, unless they are random


def prepare(config: TrainConfig, own: Own, report: Reporter, *, new: bool) -> Prepared:
    """Reads the data, chooses what a new run leaves open, and compiles while the images are decoded."""
    start, lines = None, []
    if new and config.init is not None:
        start = read_start(config.init)
        config, lines = start.settle(config)
    scanned = scan(config)
    for line in (*scanned.blank.notes, *lines):
        report(line)
    if new:
        if config.model is not None and config.image_size is None:
            config, scanned = fit_size(config, scanned, report)
        config, reason = choose(config, scanned.blank)
        if reason:
            report(reason)
    blank = scanned.blank
    spec = Spec(config.model or "", len(blank.classes), blank.preprocess.size, config.model_fields)
    trainer = _trainer(config, blank, spec, own, report)
    if jax.default_backend() == "cpu" and kernels.status().instruction_set is None:
        report(f"{kernels.status()}: with them, the default model trains about twice as fast")
    given = None if start is None else starting_weights(start, spec, blank, report)
    compiled = trainer.compile()
    data = scanned.decode()
    if data.names != blank.names:
        report("some files turned out to be broken when they were decoded; without them:")
    for line in data.notes:
        if line not in blank.notes:
            report(line)
    if not trainer.takes(data):
        trainer = _trainer(config, data, spec, own, report)
        compiled = trainer.compile()
    trainer.data = data
    report(f"compiled in {duration(compiled())}")
    return Prepared(config, data, spec, trainer, given)


def scan(config: TrainConfig) -> Scanned:
    own = any(name.startswith("augment=") for name in config.own)  # it replaces the crops
    blank, decode = scan_data(
        config.data,
        image_size=config.image_size,
        fit=config.fit,
        seed=config.split_seed,
        data_dir=config.run.data_dir,
        cache_dir=config.run.cache_dir or config.run.runs / CACHE,
        labels=config.labels,
        group=config.group,
        fold=(config.fold, config.folds) if config.fold and config.folds else None,
        reserve=1.0 if own else config.full_recipe.augment.reserve,
    )
    return Scanned(_as_asked(config, blank), lambda: _as_asked(config, decode()))


def _as_asked(config: TrainConfig, data: Dataset) -> Dataset:
    if config.all_images:
        data = data.with_validation_in_training()
    if config.mean is None or config.std is None:
        return data
    if config.init is not None and len(config.mean) < data.preprocess.channels:
        raise ValueError(
            f"{config.init} was trained on grey images, those of {data.name} are coloured: start from other weights"
        )
    return data.normalised(config.mean, config.std)


def starting_weights(start: Start, spec: Spec, data: Dataset, report: Reporter) -> dict[str, np.ndarray]:
    preprocess = data.preprocess
    arrays, line = start.arrays(spec.create(), (*preprocess.size, preprocess.channels), data.classes)
    report(line)
    return arrays


def fit_size(config: TrainConfig, scanned: Scanned, report: Reporter) -> tuple[TrainConfig, Scanned]:
    """Resizes the images if the model does not support their size."""
    data = scanned.blank
    height, width = data.preprocess.size

    def try_out(size: tuple[int, int]) -> None:
        spec = Spec(config.model or "", len(data.classes), size, config.model_fields)
        abstract_model(spec, replace(data.preprocess, size=size))

    size = fitting_size(try_out, (height, width))
    if size == (height, width):
        return config, scanned
    report(
        f"{config.model} does not take images of {height} x {width}: they are resized to {size[0]} x {size[1]} "
        "(--image-size sets another size)"
    )
    config = replace(config, image_size=size)
    return config, scan(config)


def _trainer(config: TrainConfig, data: Dataset, spec: Spec, own: Own, report: Reporter) -> Trainer:
    recipe, mesh = config.recipe_for(data), make_mesh(config.machine.mesh)
    if not data.mirrors and not recipe.augment.flip:
        report(f"images are not flipped: left and right matter in {data.name} (--flip enables it)")
    if recipe.augment.flip and config.in_recipe.flip is None and data.sided:
        report(f"hint: images are flipped in training, but {data.sided}: --no-flip turns it off")
    if data.larger is not None:
        high, wide = data.larger.shape[1:3]
        report(f"training images are kept at {high} x {wide} for random resized crops")
    parts = mesh.size * config.machine.accumulate * recipe.repeats
    batch_size = recipe.batch_size
    if batch_size > len(data.train):
        batch_size = max(len(data.train) // parts, 1) * parts
        report(f"batches of {batch_size}: there are only {len(data.train)} images to train on")
    if batch_size % parts:
        raise ValueError(
            f"batch size {batch_size} must be divisible by {mesh.size} devices x accumulate="
            f"{config.machine.accumulate}: try {max(batch_size // parts, 1) * parts}"
        )
    machine = config.machine
    trainer = Trainer(
        spec.create(),
        recipe,
        data,
        mesh,
        batch_size,
        config.seed,
        accumulate=machine.accumulate,
        remat=machine.remat,
        own=own,
    )
    height, width = data.preprocess.size
    report(
        f"{spec.name}: {trainer.parameters:,} parameters, images {height} x {width} x {data.preprocess.channels}, "
        f"batches of {batch_size}, recipe {config.recipe_name}, {mesh.size} x {jax.default_backend()}"
    )
    return trainer
