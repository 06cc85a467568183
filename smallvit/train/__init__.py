"""Training from scratch: config, recipes, optimiser, step, loop, checkpoints, run folder."""

from smallvit.train.config import MachineOptions, RecipeOptions, RunOptions, TrainConfig
from smallvit.train.loop import Stopped, train
from smallvit.train.recipe import RECIPES, Recipe

__all__ = ["RECIPES", "MachineOptions", "Recipe", "RecipeOptions", "RunOptions", "Stopped", "TrainConfig", "train"]
