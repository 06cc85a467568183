"""The choice of model, augmentation and weight decay if the user gives none, by the images and the epochs that fit."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from smallvit import kernels
from smallvit.count import multiply_adds
from smallvit.data import Dataset
from smallvit.ops import multiply
from smallvit.runs.checks import check_fields
from smallvit.runs.saved import Spec, abstract_model
from smallvit.training.cluster import broadcast_choice
from smallvit.training.config import DEFAULT_MINUTES, TrainConfig
from smallvit.training.recipe import RECIPES, Recipe
from smallvit.training.resizing import FROM, mean_cost

# From small to large, each with the minimum number of images that it sees in the time: epochs x images of the data set.
# The evidence is in docs/results.md. Here and below, epochs are on whole images: in the same time, progressive resizing
# has one and a half times as many.
MODELS = {"hybrid_vit_small": 0.0, "hybrid_vit_base": 200_000.0}
FEW = 1000  # images in the data set: with fewer, the smallest model is the best one
# Augmentation: the more often an image is seen, the stronger it must be.
MIXED: dict[str, Any] = dict(cutmix=0.3, mixup=0.2)
MIXED_FROM = 15.0  # epochs
STRONG: dict[str, Any] = dict(cutmix=0.4, mixup=0.3, policy="randaugment", erasing=0.1)
STRONG_FROM, STRONG_FROM_LARGE = 90.0, 50.0  # epochs; a larger model learns more from them
MANY = 10_000  # images: with more, STRONG was too strong for the small model

FORGETTING = 4.0  # epochs: weight decay is at most so strong that what was learned fades within this time

PROGRESSIVE = 0.65  # fraction of the steps on smaller images, with these models

OVERHEAD = 30.0  # seconds to read the images, to compile and to write the report


def choose(config: TrainConfig, data: Dataset) -> tuple[TrainConfig, str]:
    """Returns the completed configuration, and a line with the choice and its reason, empty if nothing was chosen."""
    if config.fields:  # an invalid value would fail somewhere inside
        for name in [config.model] if config.model else MODELS:
            abstract_model(Spec(name, len(data.classes), data.preprocess.size, config.model_fields), data.preprocess)
            check_fields(name, json.loads(json.dumps(config.model_fields)))
    if config.model is not None and config.recipe_name != "default":
        return config, ""
    epochs = epochs_of(config)
    speed = None if epochs else float(broadcast_choice(lambda: repr(relative_speed() * products_per_second())))
    seconds = 60 * (config.minutes or DEFAULT_MINUTES)

    def fit(name: str) -> float:
        """Estimates the epochs of a model in the given time, on whole images."""
        if speed is None:
            return (epochs or 0.0) * mean_cost(progressive)
        spec = Spec(name, len(data.classes), data.preprocess.size, config.model_fields)
        cost = 3 * multiply_adds(spec.create(), data.preprocess.size, data.preprocess.channels)
        return max(seconds - OVERHEAD, seconds / 2) * speed / cost / len(data.train)

    progressive = choose_progressive(config, data)
    model = config.model or choose_model({name: fit(name) for name in MODELS}, len(data.train))
    fitting = fit(model)
    number = f"{fitting / mean_cost(progressive):.3g}"
    about = f"about {number} {'epoch' if number == '1' else 'epochs'} of {len(data.train):,} images" + (
        "" if epochs else f" in {seconds / 60:g} min"
    )
    if config.recipe_name != "default":
        return replace(config, model=model), f"{about}: {model}"
    added = choose_augmentation(model, fitting, len(data.train))
    if not data.photographic:
        added = {name: value for name, value in added.items() if name != "policy"}
    open_ones = {name: value for name, value in added.items() if getattr(config.in_recipe, name) is None}
    for name, other in (("mixup", "cutmix"), ("cutmix", "mixup")):
        if name in open_ones and other not in open_ones:  # each is a fraction of the batches: one takes what is left
            open_ones[name] = min(open_ones[name], 1 - getattr(config.in_recipe, other))
    if config.in_recipe.weight_decay is None:
        open_ones["weight_decay"] = choose_decay(config.full_recipe, len(data.train))
    config = replace(config, model=model, in_recipe=replace(config.in_recipe, progressive=progressive, **open_ones))
    recipe = config.recipe_for(data)
    smaller = f"{progressive:.0%} of the steps on smaller images, " if progressive else ""
    chosen = f"{smaller}weight decay {recipe.weight_decay:g}, augmentation {recipe.augment.describe()}"
    return config, f"{about}: {model}, {chosen}"


def epochs_of(config: TrainConfig) -> float | None:
    """Returns the epochs set by the user or the recipe; None if the time decides."""
    return config.epochs or (RECIPES[config.recipe_name].epochs if config.minutes is None else None)


def choose_model(epochs: Mapping[str, float], images: int) -> str:
    """Returns the largest model with enough time, given the number of epochs that fit for each."""
    enough = [name for name, fewest in MODELS.items() if epochs[name] * images >= fewest]
    return enough[0] if images < FEW else enough[-1]


def choose_augmentation(model: str, epochs: float, images: int) -> dict[str, Any]:
    """Returns what is added to the recipe's augmentation; models that are not in MODELS are treated as small ones."""
    large = model == [*MODELS][-1]
    if (large and epochs >= STRONG_FROM_LARGE) or (images < MANY and epochs >= STRONG_FROM):
        return STRONG
    return MIXED if epochs >= MIXED_FROM else {}


def choose_decay(recipe: Recipe, images: int) -> float:
    """The weight decay of `default`, or less if there are many images.

    A step subtracts weight decay x learning rate, 0.004 at most, so that a user's own rate does not change it.
    """
    default = RECIPES["default"]
    per_step = min(default.weight_decay * default.learning_rate, recipe.batch_size / (FORGETTING * images))
    return float(f"{per_step / recipe.learning_rate:.2g}")


def choose_progressive(config: TrainConfig, data: Dataset) -> float:
    """Progressive resizing as given, or for the models above, where it was measured, with the recipe `default`."""
    if config.in_recipe.progressive is not None:
        return config.in_recipe.progressive
    ours = config.model is None or config.model in MODELS
    return PROGRESSIVE if ours and config.recipe_name == "default" and min(data.preprocess.size) >= FROM else 0.0


def relative_speed() -> float:
    """The speed of a training step of HybridViT relative to that of a matrix product, in multiply-adds.

    With the native kernels, whole runs of `hybrid_vit_small` on two cores had 0.71 and 0.72. Without them, a step is
    about 0.45 times as fast.
    """
    return 0.72 if kernels.usable() else 0.32


def products_per_second(seconds: float = 0.5) -> float:
    """Measures the multiply-adds per second of this machine in a matrix product of typical size."""
    x, y = jnp.ones((2048, 256), jnp.float32), jnp.ones((256, 256), jnp.float32)
    run = jax.jit(lambda x, y: multiply(x, y))
    run(x, y).block_until_ready()
    begun, runs = time.monotonic(), 0
    while time.monotonic() < begun + seconds:
        run(x, y).block_until_ready()
        runs += 1
    return runs * x.size * y.shape[1] / (time.monotonic() - begun)
