"""The configuration of a run, for the library, the command line and config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints, runtime_checkable

import tyro

from smallvit.augment.spec import AutoAugment, Fill, Policy
from smallvit.catalogue import catalogue
from smallvit.common.words import did_you_mean
from smallvit.training.recipe import RECIPES, Freeze, Recipe

Tracked = Literal["tensorboard", "mlflow", "wandb"]
DEFAULT_MINUTES = 5.0
SHORT = {  # aliases
    "lr": "learning_rate",
    "wd": "weight_decay",
    "scale": "resized_crop",
    "color_jitter": "colour",
    "reprob": "erasing",
    "smoothing": "label_smoothing",
}
PLANNED = ("policy", "mixup", "cutmix", "erasing")  # chosen by the plan of a run, with the recipe `default`


def _optional(metavar: str, default: str = "") -> Any:
    """An option without a default value; `default` describes in --help what happens without it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


def _of_recipe(name: str, metavar: str | None) -> Any:
    """An option that overrides a part of the recipe; --help shows each recipe's value."""
    values = {}
    for key, recipe in RECIPES.items():
        value = getattr(recipe, name) if hasattr(recipe, name) else getattr(recipe.augment, name)
        values[key] = "by the epochs that fit" if key == "default" and name in PLANNED else _in_words(value)
    same = len({*values.values()}) == 1
    hint = values["default"] if same else ", ".join(f"{key} {value}" for key, value in values.items())
    hint = f"({'default' if same else 'by recipe'}: {hint})"
    aliases = [f"--{short.replace('_', '-')}" for short, long in SHORT.items() if long == name]
    return tyro.conf.arg(metavar=metavar, aliases=aliases, help_behavior_hint=hint)


def _in_words(value: bool | int | float | str | tuple[float, float] | None) -> str:
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return "AutoAugment for the data set" if value in get_args(AutoAugment) else value
    return " ".join(f"{number:g}" for number in (value if isinstance(value, tuple) else (value,)))


# Types of optional options.
Int = Annotated[int | None, _optional("INT")]
Float = Annotated[float | None, _optional("FLOAT")]
Text = Annotated[str | None, _optional("TEXT")]
Folder = Annotated[Path | None, _optional("PATH")]
Sides = Annotated[int | tuple[int, int] | None, _optional("INT [INT]")]
RecipeName = Annotated[
    Literal["default", "finetune", "paper", "keras"] | None,
    _optional("default|finetune|paper|keras", "default, or finetune with --init"),
]
Fields = Annotated[tuple[str, ...], _optional("NAME=VALUE ...")]
Data = Annotated[str | None, tyro.conf.Positional, _optional("DATA")]
Switch = tyro.conf.DisallowNone[bool | None]  # --flip, --no-flip, or neither
Device = Annotated[Literal["cpu", "gpu", "tpu"] | None, _optional("cpu|gpu|tpu", "the fastest that jax finds")]


@dataclass(frozen=True)
class RecipeOptions:
    """Overrides of the recipe, each a field of `Recipe` or of `Augment`."""

    batch_size: Annotated[int | None, _of_recipe("batch_size", "INT")] = None
    """Images per step."""
    learning_rate: Annotated[float | None, _of_recipe("learning_rate", "FLOAT")] = None
    """Peak learning rate."""
    weight_decay: Annotated[float | None, _of_recipe("weight_decay", "FLOAT")] = None
    """Weight decay, as in AdamW: multiplied by the learning rate in every step."""
    matrix_rate: Annotated[float | None, _of_recipe("matrix_rate", "FLOAT")] = None
    """Peak learning rate of the hidden matrices, where Muon trains them."""
    warmup: Annotated[float | None, _of_recipe("warmup", "FLOAT")] = None
    """Warm-up, as a fraction of all steps."""
    clip: Annotated[float | None, _of_recipe("clip", "FLOAT")] = None
    """Maximum norm of the gradient; 0 turns clipping off."""
    ema: Annotated[float | None, _of_recipe("ema", "FLOAT")] = None
    """Horizon of the exponential moving average of the weights, as a fraction of all steps; 0 turns it off."""
    repeats: Annotated[int | None, _of_recipe("repeats", "INT")] = None
    """Copies of each image per batch, each augmented differently."""
    freeze: Annotated[Freeze | None, _of_recipe("freeze", "|".join(get_args(Freeze)))] = None
    """What is not trained: `backbone` trains only the head."""
    layer_decay: Annotated[float | None, _of_recipe("layer_decay", "FLOAT")] = None
    """Layer-wise learning-rate decay: the factor from each block to the one before it; 1 turns it off."""
    balance: Annotated[Switch, _of_recipe("balance", None)] = None
    """Weight the classes so that each counts the same."""
    flip: Annotated[Switch, _of_recipe("flip", None)] = None
    """Random horizontal flips, except for `mnist` and `svhn`; turn them off if left and right matter."""
    crop_padding: Annotated[float | None, _of_recipe("crop_padding", "FLOAT")] = None
    """Padding before a random crop, in pixels, or as a fraction of the side if below 1."""
    resized_crop: Annotated[tuple[float, float] | None, _of_recipe("resized_crop", "LOW HIGH")] = None
    """Random resized crop: smallest and largest fraction of the image's area, as in 0.5 1."""
    rotation: Annotated[float | None, _of_recipe("rotation", "FLOAT")] = None
    """Maximum random rotation, as a fraction of a full turn."""
    zoom: Annotated[float | None, _of_recipe("zoom", "FLOAT")] = None
    """Maximum random zoom in or out, as a fraction of the side."""
    policy: Annotated[Policy | None, _of_recipe("policy", "|".join(get_args(Policy)))] = None
    """RandAugment, or one of the AutoAugment policies."""
    magnitude: Annotated[float | None, _of_recipe("magnitude", "FLOAT")] = None
    """Magnitude of RandAugment, 0 to 10."""
    num_ops: Annotated[int | None, _of_recipe("num_ops", "INT")] = None
    """Number of RandAugment operations per image."""
    colour: Annotated[float | None, _of_recipe("colour", "FLOAT")] = None
    """Colour jitter: maximum change of brightness, contrast and saturation, 0 to 1."""
    mixup: Annotated[float | None, _of_recipe("mixup", "FLOAT")] = None
    """Probability of Mixup per batch."""
    cutmix: Annotated[float | None, _of_recipe("cutmix", "FLOAT")] = None
    """Probability of CutMix per batch."""
    alpha: Annotated[float | None, _of_recipe("alpha", "FLOAT")] = None
    """Alpha of the Beta distribution that Mixup and CutMix sample from."""
    erasing: Annotated[float | None, _of_recipe("erasing", "FLOAT")] = None
    """Probability of random erasing per image."""
    label_smoothing: Annotated[float | None, _of_recipe("label_smoothing", "FLOAT")] = None
    """Label smoothing."""
    fill: Annotated[Fill | None, _of_recipe("fill", "|".join(get_args(Fill)))] = None
    """Fill of crops and policies beyond the border of an image."""

    def apply(self, recipe: Recipe) -> Recipe:
        given = {name: value for name, value in vars(self).items() if value is not None}
        known = {option.name for option in fields(Recipe)}
        augment = replace(recipe.augment, **{name: value for name, value in given.items() if name not in known})
        return replace(recipe, augment=augment, **{name: value for name, value in given.items() if name in known})


@dataclass(frozen=True)
class MachineOptions:
    """Devices, processes and memory. They do not change the result, except that `remat` draws dropout differently."""

    device: Device = None
    """Kind of device to compute on."""
    mesh: Annotated[str | None, _optional("TEXT", "all devices share the images")] = None
    """Devices for images and for weights, as in data=4,fsdp=2."""
    coordinator: Text = None
    """Address host:port of process 0, if several processes train one model."""
    num_processes: Int = None
    """Number of processes."""
    process_id: Int = None
    """Index of this process, from 0."""
    accumulate: int = 1
    """Number of parts of a batch whose gradients are accumulated, to save memory."""
    remat: bool = False
    """Recompute blocks in the backward pass instead of storing their activations: less memory, more time."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; weights stay float32."""

    def resume(self, started: "MachineOptions") -> "MachineOptions":
        """The options of a resumed run: devices, mesh and processes may change, but nothing that changes the result."""
        kept = {name: getattr(started, name) for name in ("accumulate", "remat", "dtype")}
        default = MachineOptions()
        for name, value in kept.items():
            if (given := getattr(self, name)) not in (getattr(default, name), value):
                raise ValueError(f"the run was started with {name}={value}, not {given}: leave out {name}")
        return replace(self, **kept)


@dataclass(frozen=True)
class RunOptions:
    """Folders and tracking."""

    runs: Path = Path("runs")
    """Folder in which run folders are created."""
    name: Annotated[str | None, _optional("TEXT", "DATA-MODEL")] = None
    """Name of the run folder."""
    data_dir: Annotated[Path | None, _optional("PATH", "the user's cache")] = None
    """Folder of known data sets; missing ones are downloaded to it."""
    cache_dir: Annotated[Path | None, _optional("PATH", "RUNS/.cache")] = None
    """Folder for decoded images."""
    checkpoint_seconds: float = 60.0
    """Time between two checkpoints."""
    track: Annotated[tuple[Tracked, ...], _optional("tensorboard|mlflow|wandb ...")] = ()
    """Also send metrics and settings to these trackers."""


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
    model: Annotated[str | None, _optional("TEXT", "by data and time")] = None
    """A name from `smallvit models`; the prefix sl_ adds SPT and LSA."""
    fields: Fields = ()
    """Other fields of the model, as in dim=96 spt=false."""
    drop_path: Annotated[float | None, _optional("FLOAT", "the model's")] = None
    """Drop path (stochastic depth): the probability that a block is skipped in training."""
    init: Annotated[str | None, _optional("SOURCE", "random weights")] = None
    """Start from trained weights: a run or model folder, a file of weights, timm:NAME or hf:REPO."""
    recipe: RecipeName = None
    """Training recipe; `default` adds augmentation by the number of epochs that fit."""
    minutes: Annotated[float | None, _optional("FLOAT", f"{DEFAULT_MINUTES:g}, or the epochs of the recipe")] = None
    """Time for the whole run."""
    epochs: Float = None
    """Number of epochs, instead of a time."""
    patience: Int = None
    """Stop early after this many evaluations in a row without a gain in validation accuracy beyond chance."""
    image_size: Annotated[int | tuple[int, int] | None, _optional("INT [INT]", "by the data")] = None
    """Image size in pixels: one side, or height and width."""
    fit: Literal["crop", "pad"] = "crop"
    """How images of another aspect ratio are fitted: cropped to the centre, or padded with their mean colour."""
    mean: Annotated[tuple[float, ...] | None, _optional("FLOAT ...", "that of the images, or of --init")] = None
    """Mean to subtract from pixels in 0 to 1, one number per channel."""
    std: Annotated[tuple[float, ...] | None, _optional("FLOAT ...", "that of the images, or of --init")] = None
    """Standard deviation to divide them by, one number per channel."""
    seed: int = 0
    """Random seed of the training."""
    split_seed: int = 0
    """Random seed of the validation and test split, if the data has none."""
    labels: Annotated[Path | None, _optional("CSV", "labels.csv in DATA, if there are no class folders")] = None
    """Table of the images in DATA: columns file and label, and optionally split and group."""
    group: Annotated[str | None, _optional("COLUMN", "group")] = None
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
    labels: Annotated[Path | None, _optional("CSV")] = None
    """As for `smallvit train`."""
    group: Annotated[str | None, _optional("COLUMN")] = None
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


Config = TypeVar("Config", TrainConfig, CompareConfig)


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
