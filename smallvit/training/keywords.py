"""`smallvit.train` and `smallvit.compare`: the options of the commands as keywords."""

import inspect
from pathlib import Path
from typing import Any, get_type_hints

from smallvit.common.env import use_device
from smallvit.training import comparison, loop
from smallvit.training.config import (
    CompareConfig,
    MachineOptions,
    RecipeOptions,
    RunOptions,
    TrainConfig,
    from_options,
)


def train(data: str | Path | TrainConfig | None = None, **options: Any) -> dict[str, Any]:
    """Trains a model, as `smallvit train` does.

    Args:
        data: A folder of class folders, an .npz file, or a known data set; by default the embedded Fashion-MNIST
            subset. A `TrainConfig` holds all options at once.
        **options: The options of `smallvit train` with underscores, as in
            `train("photos", minutes=30, flip=False, batch_size=64, fields={"dim": 96})`. An unknown one is an error.

    Returns:
        What result.json holds, and the run folder as `folder`.
    """
    config = data if isinstance(data, TrainConfig) else from_options(TrainConfig, data, options)
    use_device(config.machine.device, alone=config.machine.coordinator is None)
    return loop.train(config)


def compare(data: str | Path | CompareConfig | None = None, **options: Any) -> list[dict[str, Any]]:
    """Trains several models with several seeds, as `smallvit compare` does.

    Args:
        data: As for `train`. A `CompareConfig` holds all options at once.
        **options: The options of `smallvit compare` with underscores, as in
            `compare("photos", models=["vit_small_data", "sl_vit_small_data"], seeds=3, epochs=20)`.

    Returns:
        The rows of the table, which is also written to the folder `out`.
    """
    config = data if isinstance(data, CompareConfig) else from_options(CompareConfig, data, options)
    use_device(config.machine.device, alone=config.machine.coordinator is None)
    return comparison.compare(config)


def _signature(function: Any, config: type, *groups: type) -> inspect.Signature:
    """What help() and notebooks show: every option by its name."""
    names = {name: hint for each in (config, *groups) for name, hint in get_type_hints(each).items()}
    hidden = {"data", "in_recipe", "machine", "run"}
    data, _ = inspect.signature(function).parameters.values()
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_default(name, config, *groups), annotation=hint
        )
        for name, hint in names.items()
        if name not in hidden
    ]
    return inspect.Signature([data, *options], return_annotation=inspect.signature(function).return_annotation)


def _default(name: str, *classes: type) -> Any:
    return next(vars(each)[name] for each in classes if name in vars(each))


train.__signature__ = _signature(train, TrainConfig, RecipeOptions, MachineOptions, RunOptions)
compare.__signature__ = _signature(compare, CompareConfig, RecipeOptions, MachineOptions)
