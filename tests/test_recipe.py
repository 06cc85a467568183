"""Recipes, their options, and the configuration of a run."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import tyro

from smallvit.augment import Augment
from smallvit.training import RECIPES, MachineOptions, Recipe, RecipeOptions, RunOptions, TrainConfig
from smallvit.training.mesh import make_mesh
from smallvit.training.plan import rate_at
from tests.small import labelled, plan


def test_the_papers_recipe():
    paper = RECIPES["paper"]
    rates = [paper.learning_rate * rate_at(paper, progress) for progress in (0.0, 0.1, 1.0)]
    np.testing.assert_allclose(rates, [1e-6, 3e-3, 1e-6], rtol=1e-3)
    assert (paper.passes, paper.epochs, paper.batch_size, paper.weight_decay) == (3, 100, 128, 0.05)
    mixing = dict(mixup=0.25, cutmix=0.25, label_smoothing=0.1)
    assert paper.augment == Augment(flip=True, crop_padding=4, policy="imagenet", erasing=0.25, fill="black", **mixing)


def test_the_papers_recipe_has_the_policy_of_the_data():
    data, config = labelled(np.arange(3)), TrainConfig(recipe="paper")
    for policy in ("cifar10", "svhn", "imagenet"):
        assert config.recipe_for(replace(data, policy=policy)).augment.policy == policy
    said = TrainConfig(recipe="paper", in_recipe=RecipeOptions(policy="none"))
    assert said.recipe_for(replace(data, policy="svhn")).augment.policy == "none"
    assert TrainConfig().recipe_for(replace(data, policy="svhn")).augment.policy == "none"


def test_kerass_recipe_decays_as_its_card():
    keras = RECIPES["keras"]
    np.testing.assert_allclose([plan(50).pace(keras, step).decay for step in range(50)], 1e-4, rtol=1e-6)
    assert keras.decay_all


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TrainConfig(minutes=1.0, epochs=1.0), "both minutes and epochs"),
        (lambda: TrainConfig(minutes=0.0), "minutes=0.0 must be positive"),
        (lambda: TrainConfig(epochs=-1.0), "epochs=-1.0 must be positive"),
        (lambda: TrainConfig(fields=("dim",)), "field 'dim' must have the form NAME=VALUE"),
        (lambda: TrainConfig(machine=MachineOptions(accumulate=0)), "accumulate=0 must be at least 1"),
        (lambda: TrainConfig(in_recipe=RecipeOptions(learning_rate=0.0)), "learning_rate=0.0 must be positive"),
        (lambda: TrainConfig(in_recipe=RecipeOptions(ema=1.0)), "ema=1.0 must be at least 0 and below 1"),
        (lambda: TrainConfig(in_recipe=RecipeOptions(batch_size=7, repeats=2)), "divisible by repeats=2"),
        (lambda: make_mesh("data=2"), "mesh 'data=2' is for 2 devices, but there are 1"),
        (lambda: make_mesh("model=1"), "must look like data=4,fsdp=2"),
    ],
)
def test_bad_configurations(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configuration_survives_json():
    config = TrainConfig(
        "photos",
        fields=("dim=96", "spt=false"),
        image_size=(32, 64),
        minutes=2.5,
        drop_path=0.2,
        in_recipe=RecipeOptions(flip=False, batch_size=16, resized_crop=(0.5, 1.0)),
        run=RunOptions(cache_dir=Path("/tmp/x")),
    )
    again = TrainConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.full_recipe.batch_size == 16
    assert not again.full_recipe.augment.flip
    assert again.model_fields == {"dim": 96, "spt": False, "drop_path": 0.2}


@pytest.mark.parametrize("recipe", ["default", "finetune", "paper", "keras"])
def test_images_are_mirrored_where_the_data_allows(recipe):
    photos, digits = labelled(np.arange(3)), replace(labelled(np.arange(3)), mirrors=False)
    config = TrainConfig(recipe=recipe)
    assert config.recipe_for(photos) == RECIPES[recipe]
    assert config.recipe_for(digits).augment == replace(RECIPES[recipe].augment, flip=False)
    said = replace(config, in_recipe=RecipeOptions(flip=True, batch_size=9))
    assert said.recipe_for(digits) == replace(RECIPES[recipe], batch_size=9)


def test_every_augmentation_has_an_option_of_its_name():
    known = {each.name for each in fields(Recipe)} | {each.name for each in fields(Augment)}
    options = {each.name for each in fields(RecipeOptions)}
    assert {each.name for each in fields(Augment)} <= options <= known
    args = "--magnitude 7 --num-ops 3 --crop-padding 0.1 --scale 0.5 1 --color-jitter 0.4 --rotation 0.1 --zoom 0.2"
    config = tyro.cli(
        tyro.conf.OmitArgPrefixes[TrainConfig], args=[*args.split(), "--alpha", "0.8", "--drop-path", "0.1"]
    )
    assert config.full_recipe.augment == replace(
        RECIPES["default"].augment,
        **dict(magnitude=7, num_ops=3, crop_padding=0.1, resized_crop=(0.5, 1.0), colour=0.4, rotation=0.1, zoom=0.2),
        alpha=0.8,
    )
    assert config.model_fields == {"drop_path": 0.1}
