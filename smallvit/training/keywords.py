"""`smallvit.train` and `smallvit.compare`: the options of the commands as keywords."""

import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from smallvit.common.env import use_device
from smallvit.common.words import did_you_mean
from smallvit.runs.folder import fold_folders
from smallvit.training import comparison, crossvalidation, loop
from smallvit.training.callbacks import Callback
from smallvit.training.config import CompareConfig, TrainConfig
from smallvit.training.options import SHORT, MachineOptions, RecipeOptions, RunOptions
from smallvit.training.own import Augmentation, Loss, Optimiser, Own

Config = TypeVar("Config", TrainConfig, CompareConfig)


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


def from_options(cls: type[Config], data: str | Path | None, options: Mapping[str, Any]) -> Config:
    """A configuration from options by their command-line names, as in batch_size=64 or flip=False."""
    groups = {"": cls, "in_recipe": RecipeOptions, "machine": MachineOptions, "run": RunOptions}
    groups = {group: kind for group, kind in groups.items() if not group or group in get_type_hints(cls)}
    homes = {name: (group, hint) for group, kind in groups.items() for name, hint in get_type_hints(kind).items()}
    for hidden in ("own", "fold"):
        homes.pop(hidden, None)
    given: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for name, value in {"data": data, **options}.items():
        name = SHORT.get(name, name)
        if name not in homes:
            functions = ("callbacks", "loss", "optimiser", "augment") if cls is TrainConfig else ()
            known = [*(option for option in homes if option not in groups), *functions]
            raise ValueError(f"unknown option {name!r}{did_you_mean(name, known) or '.'} Options: {', '.join(known)}")
        group, hint = homes[name]
        given[group][name] = _fitted(value, (tuple,) if get_origin(hint) is tuple else get_args(hint) or (hint,))
    top = given.pop("")
    return cls(**{group: groups[group](**values) for group, values in given.items()} | top)


def _fitted(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Converts the value to the option's type: paths from text, floats from integers, tuples from lists and dicts."""
    if float in kinds and type(value) is int:
        return float(value)
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if isinstance(value, Mapping):
        return tuple(f"{name}={json.dumps(item)}" for name, item in value.items())
    if kinds == (tuple,) and isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return ",".join(value) if str in kinds else tuple(value)
    return str(value) if str in kinds and isinstance(value, Path) else value


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
