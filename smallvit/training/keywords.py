"""`smallvit.train` and `smallvit.compare`: the options of the commands as keywords."""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

from smallvit.common.env import use_device
from smallvit.runs.folder import fold_folders
from smallvit.training import comparison, crossvalidation, loop
from smallvit.training.callbacks import Callback
from smallvit.training.config import (
    CompareConfig,
    MachineOptions,
    RecipeOptions,
    RunOptions,
    TrainConfig,
    from_options,
)
from smallvit.training.own import Augmentation, Loss, Optimiser, Own


def train(
    data: str | Path | TrainConfig | None = None,
    *,
    callbacks: Iterable[Callback] = (),
    loss: Loss | None = None,
    optimiser: Optimiser | None = None,
    augment: Augmentation | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains a model, like `smallvit train`.

    Args:
        data: A folder of class folders, an .npz file, or a known data set. Defaults to the embedded Fashion-MNIST
            subset. A `TrainConfig` holds all options at once.
        callbacks: Observe the run, or end it: see `Callback`.
        loss: A function from logits and targets (probabilities), both images x classes, to the loss per image.
        optimiser: A function from the peak learning rate to an optax transformation, such as `optax.lion`.
        augment: A function from a key and a batch of uint8 images to a batch, instead of the recipe's flips, crops and
            policies. `loss`, `optimiser` and `augment` are traced by jax, and must be given again to resume a run.
        **options: The options of `smallvit train` with underscores, as in
            `train("photos", minutes=30, flip=False, batch_size=64, fields={"dim": 96})`. Unknown options are errors.

    Returns:
        The content of result.json, and the run folder as `folder`; with `folds`, the content of folds.json.
    """
    config = data if isinstance(data, TrainConfig) else from_options(TrainConfig, data, options)
    use_device(config.machine.device, alone=config.machine.coordinator is None)
    own = Own(loss, optimiser, augment)
    if config.folds is not None or (config.resume is not None and fold_folders(config.resume)):
        return crossvalidation.train_folds(config, callbacks, own)
    return loop.train(config, callbacks, own)


def compare(data: str | Path | CompareConfig | None = None, **options: Any) -> list[dict[str, Any]]:
    """Trains several models with several seeds, like `smallvit compare`.

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
    """The signature with every option by name, for help() and notebooks."""
    names = {name: hint for cls in (config, *groups) for name, hint in get_type_hints(cls).items()}
    hidden = {"data", "own", "fold", "in_recipe", "machine", "run"}
    *first, _ = inspect.signature(function).parameters.values()
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_default(name, config, *groups), annotation=hint
        )
        for name, hint in names.items()
        if name not in hidden
    ]
    return inspect.Signature([*first, *options], return_annotation=inspect.signature(function).return_annotation)


def _default(name: str, *classes: type) -> Any:
    return next(vars(cls)[name] for cls in classes if name in vars(cls))


train.__signature__ = _signature(train, TrainConfig, RecipeOptions, MachineOptions, RunOptions)
compare.__signature__ = _signature(compare, CompareConfig, RecipeOptions, MachineOptions)
