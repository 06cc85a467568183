"""Training: configuration, recipes, optimiser, step, loop, checkpoints, run folder."""

from typing import TYPE_CHECKING

from smallvit.common.lazy import lazy

if TYPE_CHECKING:
    from smallvit.common.errors import Stopped
    from smallvit.training.config import CompareConfig, TrainConfig
    from smallvit.training.keywords import compare, train
    from smallvit.training.options import MachineOptions, RecipeOptions, RunOptions
    from smallvit.training.recipe import RECIPES, Recipe

__all__ = [
    "RECIPES",
    "CompareConfig",
    "MachineOptions",
    "Recipe",
    "RecipeOptions",
    "RunOptions",
    "Stopped",
    "TrainConfig",
    "compare",
    "train",
]
__getattr__, __dir__ = lazy(__name__, __file__)
