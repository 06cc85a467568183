"""What a user can say about a training run: the library's configuration, the command line and the run's config file."""

import json
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from smallvit.training.recipe import RECIPES, Recipe

DEFAULT_MINUTES = 5.0

# What --help says of an option that need not be given: the kind of value, and what holds without it.
Int = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Float = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Switch = Annotated[bool | None, tyro.conf.arg(metavar="True|False", help_behavior_hint="")]
Sides = Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="INT [INT]", help_behavior_hint="")]
Fields = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...", help_behavior_hint="")]
Policy = Literal["none", "randaugment", "cifar10", "svhn", "imagenet"]
Data = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA", help_behavior_hint="")]


@dataclass(frozen=True)
class RecipeOptions:
    """In place of what the recipe says."""

    batch_size: Int = None
    """Images of a step."""
    learning_rate: Float = None
    """Peak learning rate."""
    weight_decay: Float = None
    """Weight decay: with `default` over the whole run, else per step as in AdamW."""
    warmup: Float = None
    """Share of the steps in which the learning rate grows."""
    clip: Float = None
    """Largest norm of the gradient."""
    ema: Float = None
    """Horizon of the average of the weights, as a share of all steps; 0 switches it off."""
    repeats: Int = None
    """How often an image stands in a batch, each time augmented anew."""
    balance: Switch = None
    """Weigh the classes so that each counts the same."""
    flip: Switch = None
    """Mirror images; switch it off where left and right matter."""
    policy: Annotated[Policy | None, tyro.conf.arg(metavar="|".join(get_args(Policy)), help_behavior_hint="")] = None
    """RandAugment, or one of AutoAugment's policies."""
    mixup: Float = None
    """Probability that a batch is mixed."""
    cutmix: Float = None
    """Probability that a batch is cut-mixed."""
    erasing: Float = None
    """Probability that a box of an image is erased."""
    label_smoothing: Float = None
    """Share of the label that all classes get."""

    def apply(self, recipe: Recipe) -> Recipe:
        given = {name: value for name, value in vars(self).items() if value is not None}
        known = {each.name for each in fields(Recipe)}
        augment = replace(recipe.augment, **{name: value for name, value in given.items() if name not in known})
        return replace(recipe, augment=augment, **{name: value for name, value in given.items() if name in known})


@dataclass(frozen=True)
class MachineOptions:
    """Devices, machines and memory; none of it changes the result, but that `remat` draws dropout anew."""

    mesh: Text = None
    """Devices for images and for weights, as data=4,fsdp=2; by default all for images."""
    coordinator: Text = None
    """Address host:port of process 0, when several processes train one model."""
    num_processes: Int = None
    """How many there are."""
    process_id: Int = None
    """Which one this is, from 0."""
    accumulate: int = 1
    """Parts in which a batch is worked through, when memory is short."""
    remat: bool = False
    """Compute blocks again in the backward pass instead of keeping what is in them: less memory, more time."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; weights stay float32."""


@dataclass(frozen=True)
class RunOptions:
    """Where things are kept."""

    runs: Path = Path("runs")
    """Where run folders are made."""
    name: Text = None
    """Of the run folder; by default the data's and the model's."""
    data_dir: Folder = None
    """Where known data sets lie, or are downloaded to."""
    cache_dir: Folder = None
    """Where decoded images are kept; by default beside the run folders."""
    checkpoint_seconds: float = 60.0
    """Time between two checkpoints."""
    tensorboard: bool = False
    """Write event files, too."""


@dataclass(frozen=True)
class TrainConfig:
    data: Data = None
    """A folder of class folders, an .npz file, or a known set; by default the embedded Fashion-MNIST subset."""
    model: Text = None
    """A name from `smallvit models`, sl_ in front for SPT and LSA; by default what suits the data and the time."""
    fields: Fields = ()
    """Further fields of the model, as in dim=96 spt=false."""
    recipe: Literal["default", "paper", "keras"] = "default"
    """How to train; `default` adds augmentation by the number of epochs that fit."""
    minutes: Float = None
    """Time for the whole run; by default 5, or the recipe's epochs."""
    epochs: Float = None
    """Passes through the training images, in place of a time."""
    image_size: Sides = None
    """Side, or height and width; by default what suits the data."""
    fit: Literal["crop", "pad"] = "crop"
    """How an image of another shape becomes that size."""
    seed: int = 0
    """Of everything that is random in training."""
    split_seed: int = 0
    """Of what is held out to validate and test, where the data does not say."""
    resume: Folder = None
    """Go on with this run folder, exactly as if it had never stopped."""
    in_recipe: RecipeOptions = field(default_factory=RecipeOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        if self.minutes is not None and self.epochs is not None:
            raise ValueError("both minutes and epochs are given: the run can follow only one, leave the other out")
        for name in ("minutes", "epochs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive")
        if self.machine.accumulate < 1:
            raise ValueError(f"accumulate={self.machine.accumulate} must be at least 1")
        if self.recipe not in RECIPES:
            raise ValueError(f"unknown recipe {self.recipe!r}: there are {', '.join(RECIPES)}")
        if self.resume is not None:
            given = [each.name for each in fields(self) if getattr(self, each.name) != _default(each)]
            if others := sorted({*given} - {"resume", "machine"}):
                raise ValueError(f"a run goes on as it was begun: leave out {', '.join(others)}, or begin a new one")
        _ = self.full_recipe, self.model_fields  # both check what they are given

    @property
    def full_recipe(self) -> Recipe:
        return self.in_recipe.apply(RECIPES[self.recipe])

    @property
    def model_fields(self) -> dict[str, Any]:
        pairs = dict(parse_field(text) for text in self.fields)
        return pairs if self.machine.dtype == "float32" else {**pairs, "dtype": self.machine.dtype}

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self), default=str))

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "TrainConfig":
        size = stored["image_size"]
        paths = {name: Path(stored["run"][name]) for name in ("runs", "data_dir", "cache_dir") if stored["run"][name]}
        return cls(
            **{
                **stored,
                "fields": tuple(stored["fields"]),
                "image_size": tuple(size) if isinstance(size, list) else size,
                "resume": None,
                "in_recipe": RecipeOptions(**stored["in_recipe"]),
                "machine": MachineOptions(**stored["machine"]),
                "run": RunOptions(**{**stored["run"], **paths}),
            }
        )


@dataclass(frozen=True)
class CompareConfig:
    data: Data = None
    """As for `smallvit train`."""
    models: str = "vit_tiny_data,sl_vit_tiny_data"
    """Names with commas between them."""
    ablation: Literal["spt-lsa", "shift"] | None = None
    """Take a single model apart: its two add-ons, or directions and amounts of the shift."""
    recipes: str = "default"
    """One, or several with commas between them."""
    fields: Fields = ()
    """Further fields of all models, as in dim=96."""
    seeds: int = 3
    """How often each is trained."""
    minutes: Float = None
    """Time for each run."""
    epochs: Float = None
    """Passes through the training images in each run, in place of a time."""
    image_size: Sides = None
    """As for `smallvit train`."""
    fit: Literal["crop", "pad"] = "crop"
    """As for `smallvit train`."""
    out: Path = Path("comparison")
    """Where runs and table go; a comparison that was stopped goes on there."""
    data_dir: Folder = None
    """Where known data sets lie, or are downloaded to."""
    in_recipe: RecipeOptions = field(default_factory=RecipeOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds} must be at least 1")
        if self.ablation is not None and len(self.models.split(",")) > 1:
            raise ValueError(f"an ablation takes one model apart, but there are {self.models}: name one with --models")
        if self.ablation == "shift" and self.image_size is None:
            raise ValueError("an ablation of the shift needs --image-size: amounts are shares of a patch")


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def parse_field(text: str) -> tuple[str, Any]:
    """("dim", 96) from "dim=96": a JSON value, or a word as it is."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"field {text!r} must look like dim=96")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, tuple(parsed) if isinstance(parsed, list) else parsed
