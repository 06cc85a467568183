"""What a user can say about a training run: the library's configuration, the command line and the run's config file."""

import json
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from smallvit.augment.policies import AUTOAUGMENT
from smallvit.augment.spec import Fill, Policy
from smallvit.data import Dataset
from smallvit.ops import Size
from smallvit.training.recipe import RECIPES, Recipe

DEFAULT_MINUTES = 5.0

# What --help says of an option that need not be given: the kind of value, and what holds without it.
Int = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Float = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Switch = Annotated[bool | None, tyro.conf.arg(metavar="True|False", help_behavior_hint="")]
Sides = Annotated[Size | None, tyro.conf.arg(metavar="INT [INT]", help_behavior_hint="")]
Shares = Annotated[tuple[float, float] | None, tyro.conf.arg(metavar="LOW HIGH", help_behavior_hint="")]
Fields = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...", help_behavior_hint="")]
Data = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA", help_behavior_hint="")]


@dataclass(frozen=True)
class RecipeOptions:
    """In place of what the recipe says: each is a field of `Recipe` or of `Augment`."""

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
    """Mirror images; switch it off where left and right matter, as in digits and signs."""
    crop_padding: Float = None
    """Border around an image, in pixels or below 1 as a share of its side, before a random crop."""
    resized_crop: Annotated[Shares, tyro.conf.arg(aliases=("--scale",))] = None
    """Shares of the area that a random resized crop has, as in 0.5 1."""
    rotation: Float = None
    """Largest rotation, in turns."""
    zoom: Float = None
    """Largest zoom in or out, as a share of the side."""
    policy: Annotated[Policy | None, tyro.conf.arg(metavar="|".join(get_args(Policy)), help_behavior_hint="")] = None
    """RandAugment, or one of AutoAugment's policies."""
    magnitude: Float = None
    """Strength of RandAugment, 0 to 10."""
    num_ops: Int = None
    """How many operations RandAugment does to an image."""
    colour: Annotated[Float, tyro.conf.arg(aliases=("--color-jitter",))] = None
    """How far brightness, contrast and saturation are changed, 0 to 1."""
    mixup: Float = None
    """Probability that a batch is mixed."""
    cutmix: Float = None
    """Probability that a batch is cut-mixed."""
    alpha: Float = None
    """Of the Beta distribution that mixup and cutmix draw from."""
    erasing: Annotated[Float, tyro.conf.arg(aliases=("--reprob",))] = None
    """Probability that a box of an image is erased."""
    label_smoothing: Annotated[Float, tyro.conf.arg(aliases=("--smoothing",))] = None
    """Share of the label that all classes get."""
    fill: Annotated[Fill | None, tyro.conf.arg(metavar="|".join(get_args(Fill)), help_behavior_hint="")] = None
    """What lies beyond the border of an image that crops and policies move."""

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

    def resume(self, begun: "MachineOptions") -> "MachineOptions":
        """For a run that was begun with other options: devices, mesh and processes may change, the results may not."""
        kept = {name: getattr(begun, name) for name in ("accumulate", "remat", "dtype")}
        default = MachineOptions()
        for name, value in kept.items():
            if (given := getattr(self, name)) not in (getattr(default, name), value):
                raise ValueError(f"the run was begun with {name}={value}, not {given}: leave out {name}")
        return replace(self, **kept)


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
    drop_path: Float = None
    """How often a block of the model is left out in training; by default as the model has it."""
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
    from_scratch: bool = False
    """With --resume: set the run's checkpoints aside and begin again at step 0."""
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
            if others := sorted({*given} - {"resume", "from_scratch", "machine"}):
                raise ValueError(f"a run goes on as it was begun: leave out {', '.join(others)}, or begin a new one")
        elif self.from_scratch:
            raise ValueError("from_scratch sets the checkpoints of a run aside: give the run with --resume")
        _ = self.full_recipe, self.model_fields  # both check what they are given

    @property
    def full_recipe(self) -> Recipe:
        return self.in_recipe.apply(RECIPES[self.recipe])

    def recipe_for(self, data: Dataset) -> Recipe:
        """The recipe as the data needs it, unless the user says otherwise."""
        recipe = RECIPES[self.recipe]
        policy = data.policy if recipe.augment.policy in AUTOAUGMENT else recipe.augment.policy
        augment = replace(recipe.augment, flip=recipe.augment.flip and data.mirrors, policy=policy)
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
                "resume": None,
                "from_scratch": False,
                "in_recipe": RecipeOptions(**_with_tuples(stored["in_recipe"])),
                "machine": MachineOptions(**stored["machine"]),
                "run": RunOptions(**{**stored["run"], **paths}),
            }
        )


def _with_tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}


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
