"""The options of training in three groups: the recipe, the machine and the run folder."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from smallvit.augment.spec import AutoAugment, Fill, Policy
from smallvit.common.arguments import Device, Int, Switch, Text, argument
from smallvit.training.recipe import RECIPES, Freeze, Recipe, Schedule

Tracked = Literal["tensorboard", "mlflow", "wandb"]
SHORT = {  # aliases
    "lr": "learning_rate",
    "wd": "weight_decay",
    "vflip": "vertical_flip",
    "scale": "resized_crop",
    "color_jitter": "colour",
    "reprob": "erasing",
    "smoothing": "label_smoothing",
}
PLANNED = {  # chosen by the plan of a run, with the recipe `default`
    **dict.fromkeys(("policy", "mixup", "cutmix", "erasing"), "by the epochs that fit"),
    "progressive": "by model",
    "weight_decay": "by the number of images",
}


def _of_recipe(name: str, metavar: str | None) -> Any:
    """An option that overrides a part of the recipe; --help shows each recipe's value."""
    values = {}
    for key, recipe in RECIPES.items():
        value = getattr(recipe, name) if hasattr(recipe, name) else getattr(recipe.augment, name)
        values[key] = PLANNED[name] if key == "default" and name in PLANNED else _in_words(value)
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
    schedule: Annotated[Schedule | None, _of_recipe("schedule", "|".join(get_args(Schedule)))] = None
    """How the learning rate falls after the warm-up."""
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
    progressive: Annotated[float | None, _of_recipe("progressive", "FLOAT")] = None
    """Progressive resizing: the fraction of the steps, from the first on, that are on smaller images."""
    balance: Annotated[Switch, _of_recipe("balance", None)] = None
    """Weight the classes so that each counts the same."""
    flip: Annotated[Switch, _of_recipe("flip", None)] = None
    """Random horizontal flips, except for `mnist` and `svhn`; turn them off if left and right matter."""
    vertical_flip: Annotated[Switch, _of_recipe("vertical_flip", None)] = None
    """Random vertical flips, for images without an upright side, such as those of a microscope or a satellite."""
    quarter_turns: Annotated[Switch, _of_recipe("quarter_turns", None)] = None
    """Random turns by 0, 90, 180 or 270 degrees, for the same images."""
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
    """Devices, processes and memory. They do not change the result, except that `remat` changes the dropout masks."""

    device: Device = None
    """Kind of device to compute on."""
    mesh: Annotated[str | None, argument("TEXT", "all devices share the images")] = None
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
    name: Annotated[str | None, argument("TEXT", "DATA-MODEL")] = None
    """Name of the run folder."""
    data_dir: Annotated[Path | None, argument("PATH", "the user's cache")] = None
    """Folder of known data sets; missing ones are downloaded to it."""
    cache_dir: Annotated[Path | None, argument("PATH", "RUNS/.cache")] = None
    """Folder for decoded images."""
    checkpoint_seconds: float = 60.0
    """Time between two checkpoints."""
    track: Annotated[tuple[Tracked, ...], argument("tensorboard|mlflow|wandb ...")] = ()
    """Also send metrics and settings to these trackers."""
