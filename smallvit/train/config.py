"""What a user can say about a training run: the library's configuration, the command line and the run's config file."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from smallvit.layers import Size
from smallvit.train.recipe import RECIPES, Recipe

DEFAULT_MINUTES = 5.0


@dataclass(frozen=True)
class RecipeOptions:
    """In place of what the recipe says."""

    batch_size: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    warmup: float | None = None
    """Share of the steps in which the learning rate grows."""
    clip: float | None = None
    """Largest norm of the gradient."""
    ema: float | None = None
    """Decay of the average of the weights; 0 switches it off."""
    repeats: int | None = None
    """How often an image stands in a batch, each time augmented anew."""
    balance: bool | None = None
    """Weigh the classes so that each counts the same."""
    flip: bool | None = None
    """Mirror images; switch it off where left and right matter."""
    policy: Literal["none", "randaugment", "cifar10", "svhn", "imagenet"] | None = None
    """RandAugment, or one of AutoAugment's policies."""
    mixup: float | None = None
    """Probability that a batch is mixed."""
    cutmix: float | None = None
    """Probability that a batch is cut-mixed."""
    erasing: float | None = None
    """Probability that a box of an image is erased."""
    label_smoothing: float | None = None

    def apply(self, recipe: Recipe) -> Recipe:
        given = {name: value for name, value in vars(self).items() if value is not None}
        known = {each.name for each in fields(Recipe)}
        augment = replace(recipe.augment, **{name: value for name, value in given.items() if name not in known})
        return replace(recipe, augment=augment, **{name: value for name, value in given.items() if name in known})


@dataclass(frozen=True)
class MachineOptions:
    """Devices and machines; none of it changes the result."""

    mesh: str | None = None
    """Devices for images and for weights, as data=4,fsdp=2; by default all for images."""
    coordinator: str | None = None
    """Address host:port of process 0, when several processes train one model."""
    num_processes: int | None = None
    process_id: int | None = None
    accumulate: int = 1
    """Parts in which a batch is worked through, when memory is short."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; weights stay float32."""


@dataclass(frozen=True)
class RunOptions:
    """Where things are kept."""

    runs: Path = Path("runs")
    """Where run folders are made."""
    name: str | None = None
    """Of the run folder; by default the data's and the model's."""
    data_dir: Path | None = None
    """Where known data sets lie, or are downloaded to."""
    cache_dir: Path | None = None
    """Where decoded images are kept; by default beside the run folders."""
    checkpoint_seconds: float = 60.0
    """Time between two checkpoints."""
    tensorboard: bool = False
    """Write event files, too."""


@dataclass(frozen=True)
class TrainConfig:
    data: Annotated[str | None, tyro.conf.Positional] = None
    """A folder of class folders, an .npz file, or a known set; by default the embedded Fashion-MNIST subset."""
    model: str = "sl_vit_tiny_data"
    """A name from `smallvit models`; sl_ in front of any switches SPT and LSA on."""
    fields: tuple[str, ...] = ()
    """Further fields of the model, as in dim=96 spt=false."""
    recipe: Literal["default", "paper", "keras"] = "default"
    """How to train."""
    minutes: float | None = None
    """Time for the whole run; by default 5, or the recipe's epochs."""
    epochs: float | None = None
    """Passes through the training images, in place of a time."""
    image_size: Size | None = None
    """Side, or height and width; by default what suits the data."""
    fit: Literal["crop", "pad"] = "crop"
    """How an image of another shape becomes that size."""
    seed: int = 0
    """Of everything that is random in training."""
    split_seed: int = 0
    """Of what is held out to validate and test, where the data does not say."""
    resume: Path | None = None
    """Go on with this run folder, exactly as if it had never stopped."""
    in_recipe: tyro.conf.OmitArgPrefixes[RecipeOptions] = field(default_factory=RecipeOptions)
    machine: tyro.conf.OmitArgPrefixes[MachineOptions] = field(default_factory=MachineOptions)
    run: tyro.conf.OmitArgPrefixes[RunOptions] = field(default_factory=RunOptions)

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
