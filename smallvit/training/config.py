"""The configuration of a run or a comparison, and its form in config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args, runtime_checkable

import tyro

from smallvit.augment.spec import AutoAugment
from smallvit.catalogue import catalogue
from smallvit.common.arguments import Data, Fields, Float, Folder, Int, Sides, argument
from smallvit.training.options import MachineOptions, RecipeOptions, RunOptions, Tracked
from smallvit.training.recipe import RECIPES, Recipe

DEFAULT_MINUTES = 5.0
RecipeName = Annotated[
    Literal["default", "finetune", "paper", "keras"] | None,
    argument("default|finetune|paper|keras", "default, or finetune with --init"),
]


@runtime_checkable
class Traits(Protocol):
    """The properties of a `Dataset` that a recipe depends on; importing `Dataset` would import jax."""

    @property
    def mirrors(self) -> bool: ...
    @property
    def policy(self) -> AutoAugment: ...
    @property
    def photographic(self) -> bool: ...


@dataclass(frozen=True)
class TrainConfig:
    data: Data = None
    """A folder of class folders or with a table, an .npz file, or a known data set; defaults to the embedded
    Fashion-MNIST subset."""
    model: Annotated[str | None, argument("TEXT", "by data and time")] = None
    """A name from `smallvit models`; the prefix sl_ adds SPT and LSA."""
    fields: Fields = ()
    """Other fields of the model, as in dim=96 spt=false."""
    drop_path: Annotated[float | None, argument("FLOAT", "the model's")] = None
    """Drop path (stochastic depth): the probability that a block is skipped in training."""
    init: Annotated[str | None, argument("SOURCE", "random weights")] = None
    """Start from trained weights: a run or model folder, a file of weights, timm:NAME or hf:REPO."""
    recipe: RecipeName = None
    """Training recipe; `default` adds augmentation by the number of epochs that fit."""
    minutes: Annotated[float | None, argument("FLOAT", f"{DEFAULT_MINUTES:g}, or the epochs of the recipe")] = None
    """Time for the whole run."""
    epochs: Float = None
    """Number of epochs, instead of a time."""
    patience: Int = None
    """Stop early after this many evaluations in a row without a gain in validation accuracy beyond chance."""
    image_size: Annotated[int | tuple[int, int] | None, argument("INT [INT]", "by the data")] = None
    """Image size in pixels: one side, or height and width."""
    fit: Literal["crop", "pad"] = "crop"
    """How images of another aspect ratio are fitted: cropped to the centre, or padded with their mean colour."""
    mean: Annotated[tuple[float, ...] | None, argument("FLOAT ...", "that of the images, or of --init")] = None
    """Mean to subtract from pixels in 0 to 1, one number per channel."""
    std: Annotated[tuple[float, ...] | None, argument("FLOAT ...", "that of the images, or of --init")] = None
    """Standard deviation to divide them by, one number per channel."""
    seed: int = 0
    """Random seed of the training."""
    split_seed: int = 0
    """Random seed of the validation and test split, if the data has none."""
    labels: Annotated[Path | None, argument("CSV", "labels.csv in DATA, if there are no class folders")] = None
    """Table of the images in DATA: columns file and label, and optionally split and group."""
    group: Annotated[str | None, argument("COLUMN", "group")] = None
    """Column of the table whose groups, such as patients, are never in two splits."""
    all_images: bool = False
    """Also train on the validation images. Keeps the last weights; validation metrics then mean nothing."""
    folds: Int = None
    """Cross-validation: train this many models, each tested on its own part of the images, as an ensemble."""
    fold: Annotated[int | None, tyro.conf.Suppress] = None  # the fold that the run is tested on, from 1
    resume: Folder = None
    """Resume this run folder; the result is the same as if it had never stopped."""
    from_scratch: bool = False
    """With --resume: set the run's checkpoints aside and start again at step 0."""
    own: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()  # the user's functions, given from Python
    in_recipe: Annotated[RecipeOptions, tyro.conf.arg(name="recipe")] = field(default_factory=RecipeOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        if self.minutes is not None and self.epochs is not None:
            raise ValueError("both minutes and epochs are given: leave one out")
        for name, value in flat(asdict(self)).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}={value} must be a finite number")
        for name in ("minutes", "epochs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive")
        for name in ("seed", "split_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std belong together: give both, or none")
        if self.std is not None and min(self.std, default=0.0) <= 0:
            raise ValueError(f"std={self.std} must be positive")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience={self.patience} must be at least 1")
        if unknown := sorted({*self.run.track} - {*get_args(Tracked)}):
            raise ValueError(f"unknown tracker {unknown[0]!r}: choose from {', '.join(get_args(Tracked))}")
        if self.machine.accumulate < 1:
            raise ValueError(f"accumulate={self.machine.accumulate} must be at least 1")
        if self.recipe_name not in RECIPES:
            raise ValueError(f"unknown recipe {self.recipe!r}: choose from {', '.join(RECIPES)}")
        if self.init is None and self.in_recipe.freeze == "backbone":
            raise ValueError("freeze=backbone trains only the head, which needs trained weights: give them with --init")
        if self.folds is not None and self.folds < 2:
            raise ValueError(f"folds={self.folds} must be at least 2")
        if self.folds is not None and self.machine.num_processes not in (None, 1):
            raise ValueError("folds are trained in one process: leave out num_processes, or folds")
        if self.resume is not None:
            given = [option.name for option in fields(self) if getattr(self, option.name) != _default(option)]
            if others := sorted({*given} - {"resume", "from_scratch", "machine"}):
                raise ValueError(f"a resumed run keeps its settings: leave out {', '.join(others)}, or start a new run")
        elif self.from_scratch:
            raise ValueError("from_scratch sets the checkpoints of a run aside: give the run with --resume")
        if self.model is not None:
            check_model(self.model)
        _ = self.full_recipe, self.model_fields  # raises on bad values

    @property
    def recipe_name(self) -> str:
        return self.recipe or ("default" if self.init is None else "finetune")

    @property
    def full_recipe(self) -> Recipe:
        return self.in_recipe.apply(RECIPES[self.recipe_name])

    def recipe_for(self, data: Traits) -> Recipe:
        """The recipe for this data set, which determines flips and the AutoAugment policy unless they are given."""
        recipe = RECIPES[self.recipe_name]
        policy = data.policy if recipe.augment.policy in get_args(AutoAugment) else recipe.augment.policy
        augment = replace(recipe.augment, flip=recipe.augment.flip and data.mirrors, policy=policy)
        if not data.photographic:
            for name, off in (("policy", "none"), ("colour", 0.0)):
                if (given := getattr(self.in_recipe, name)) not in (None, off):
                    raise ValueError(f"{name}={given} needs 8-bit grey or colour images: leave it out for these")
            augment = replace(augment, policy="none", colour=0.0)
        return self.in_recipe.apply(replace(recipe, augment=augment))

    @property
    def model_fields(self) -> dict[str, Any]:
        given: dict[str, Any] = {} if self.drop_path is None else {"drop_path": self.drop_path}
        if self.machine.dtype != "float32":
            given["dtype"] = self.machine.dtype
        return dict(parse_field(text) for text in self.fields) | given

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self), default=str))

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "TrainConfig":
        paths = {name: Path(stored["run"][name]) for name in ("runs", "data_dir", "cache_dir") if stored["run"][name]}
        return cls(
            **{
                **_with_tuples(stored),
                "labels": Path(stored["labels"]) if stored.get("labels") else None,
                "resume": None,
                "from_scratch": False,
                "in_recipe": RecipeOptions(**_with_tuples(stored["in_recipe"])),
                "machine": MachineOptions(**stored["machine"]),
                "run": RunOptions(**{**_with_tuples(stored["run"]), **paths}),
            }
        )


@dataclass(frozen=True)
class CompareConfig:
    data: Data = None
    """As for `smallvit train`."""
    models: str = "vit_tiny_data,sl_vit_tiny_data"
    """Model names, separated by commas."""
    ablation: Literal["spt-lsa", "lsa", "shift"] | None = None
    """Train each model with and without SPT and LSA; with and without the parts of LSA; or with other shifts."""
    recipes: str = "default"
    """Recipes, separated by commas."""
    fields: Fields = ()
    """Other fields of all models, as in dim=96."""
    seeds: int = 3
    """Number of runs per model, each with its own seed."""
    minutes: Float = None
    """Time for each run."""
    epochs: Float = None
    """Number of epochs of each run, instead of a time."""
    image_size: Sides = None
    """As for `smallvit train`."""
    fit: Literal["crop", "pad"] = "crop"
    """As for `smallvit train`."""
    labels: Annotated[Path | None, argument("CSV")] = None
    """As for `smallvit train`."""
    group: Annotated[str | None, argument("COLUMN")] = None
    """As for `smallvit train`."""
    out: Path = Path("comparison")
    """Folder for the runs and the table; a comparison that was stopped resumes there."""
    data_dir: Folder = None
    """As for `smallvit train`."""
    in_recipe: Annotated[RecipeOptions, tyro.conf.arg(name="recipe")] = field(default_factory=RecipeOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds} must be at least 1")
        for name in self.models.split(","):
            check_model(name)
        if self.ablation == "shift" and self.image_size is None:
            raise ValueError("the ablation of the shift needs --image-size: its distances are fractions of a patch")


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Stored settings of all groups by name, without those that were not set."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        values |= flat(value) if isinstance(value, dict) else {name: value} if value not in (None, [], ()) else {}
    return values


def check_model(name: str) -> None:
    """Raises a ValueError if there is no such model; known ones are found without importing jax."""
    if not any(entry.name == name for entry in catalogue()):
        from smallvit.registry import preset

        preset(name)  # a model that the user registered, or an error


def _with_tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}


def _default(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def parse_field(text: str) -> tuple[str, Any]:
    """("dim", 96) from "dim=96"; the value is JSON or else text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"field {text!r} must have the form NAME=VALUE, as in dim=96")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, tuple(parsed) if isinstance(parsed, list) else parsed
