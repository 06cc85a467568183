"""Training from scratch: config, recipes, optimiser, step, loop, checkpoints, run folder."""

from smallvit.training.config import MachineOptions, RecipeOptions, RunOptions, TrainConfig
from smallvit.training.loop import Stopped, train
from smallvit.training.recipe import RECIPES, Recipe

__all__ = ["RECIPES", "MachineOptions", "Recipe", "RecipeOptions", "RunOptions", "Stopped", "TrainConfig", "train"]
