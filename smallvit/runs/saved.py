"""The model folder: `model.safetensors` and `config.json` hold everything needed to use a model."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from smallvit.common.extras import first_line
from smallvit.common.files import read_json, write_bytes, write_json
from smallvit.common.paths import by_path, nested
from smallvit.data import Preprocess
from smallvit.layers import Classifier
from smallvit.registry import create_model
from smallvit.runs.answers import Images, Prediction
from smallvit.runs.calibration import UNCALIBRATED, Calibration, Choice
from smallvit.runs.checks import check_config, check_count, check_weights
from smallvit.runs.folder import MODEL, finished_folds, fold_folders

WEIGHTS, CONFIG = "model.safetensors", "config.json"
LARGEST_CONFIG = 32 * 2**20  # bytes: 100,000 classes with long names


@dataclass(frozen=True)
class Spec:
    """The arguments of `create_model`, in a form that JSON can hold."""

    name: str
    num_classes: int
    image_size: tuple[int, int]
    fields: dict[str, Any]

    def create(self) -> Classifier:
        return create_model(self.name, num_classes=self.num_classes, image_size=self.image_size, **self.fields)


@dataclass(frozen=True)
class Saved:
    """A trained model: the module, its variables, class names and preprocessing."""

    model: Classifier
    variables: dict[str, Any]
    classes: tuple[str, ...]
    preprocess: Preprocess
    spec: Spec
    calibration: Calibration = UNCALIBRATED
    others: tuple["Saved", ...] = ()  # further models of an ensemble, whose probabilities are averaged

    @property
    def members(self) -> tuple["Saved", ...]:
        return (self, *self.others)

    @property
    def temperature(self) -> float:
        """The divisor of the logits that calibrates the probabilities; 1 if it was not fitted."""
        return self.calibration.temperature

    def predict(self, images: Images, top: int = 3, *, threshold: float | None = None) -> list[Prediction]:
        """Returns the `top` classes of each image with their probabilities; see `smallvit.predict`."""
        from smallvit.runs.prediction import predict

        return predict(self._predictor, images, top, threshold=threshold)

    def choose_threshold(self, precision: float) -> Choice:
        """Returns the lowest threshold that reaches this precision on the run's validation images."""
        if self.others:
            raise ValueError("an ensemble has no validation images that are new to all its models: give a threshold")
        return self.calibration.choose(precision)

    @cached_property
    def _predictor(self) -> Any:
        from smallvit.runs.prediction import Predictor

        return Predictor(self)


def save_model(folder: Path, spec: Spec, variables: PyTree, classes: tuple[str, ...], preprocess: Preprocess) -> None:
    """Writes the folder, or overwrites the weights of the same model in it."""
    arrays = {path: np.asarray(leaf) for path, leaf in by_path(variables).items()}
    write_json(folder / CONFIG, describe(spec, classes, preprocess))
    write_bytes(folder / WEIGHTS, save(arrays))


def save_calibration(path: str | Path, calibration: Calibration) -> None:
    """Adds the calibration to config.json of a run or model folder."""
    config = model_folder(path) / CONFIG
    write_json(config, {**read_json(config), **calibration.to_json()})


def describe(
    spec: Spec, classes: tuple[str, ...], preprocess: Preprocess, calibration: Calibration = UNCALIBRATED
) -> dict[str, Any]:
    """Returns the content of config.json."""
    return {
        "format": "smallvit",
        "model": {**vars(spec), "image_size": list(spec.image_size)},
        "classes": list(classes),
        "preprocess": preprocess.to_json(),
        **calibration.to_json(),
    }


def model_folder(path: str | Path) -> Path:
    """Returns the model folder of a run folder, or the path itself if it is a model folder."""
    folder = Path(path)
    check_single(folder)
    folder = folder / MODEL if (folder / MODEL / CONFIG).exists() else folder
    if not folder.exists():
        raise ValueError(f"{path}: there is no such folder; give a run folder or its model/")
    if not (folder / CONFIG).exists():
        raise ValueError(f"{path} holds no model: give a run folder, or a folder with {CONFIG} and {WEIGHTS}")
    return folder


def check_single(path: Path) -> None:
    """Raises a ValueError if the path is an ensemble; for commands that need a single model."""
    if folds := fold_folders(path):
        raise ValueError(f"{path} has the models of {len(folds)} folds, one is needed: give {folds[0]}, for example")


def load_ensemble(path: str | Path) -> Saved:
    """Loads the model of a run or model folder or, for a cross-validation, the ensemble of all folds."""
    folders = finished_folds(path)
    if not folders:
        return from_pretrained(path)
    first, *others = map(from_pretrained, folders)
    for folder, other in zip(folders[1:], others, strict=True):
        if (other.classes, other.preprocess.size) != (first.classes, first.preprocess.size):
            raise ValueError(f"{folder} has other classes or another image size than {folders[0]}: give one of them")
    return replace(first, others=tuple(others))


def from_pretrained(path: str | Path) -> Saved:
    """Loads the model of a run or model folder, with its weights, class names and preprocessing."""
    folder = model_folder(path)
    if (folder / CONFIG).stat().st_size > LARGEST_CONFIG:
        raise ValueError(f"{folder / CONFIG} has more than {LARGEST_CONFIG:,} bytes: it was not written by smallvit")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or config.get("format") != "smallvit":
        raise ValueError(f"{folder / CONFIG} was not written by smallvit: give a run folder or its model/")
    try:
        check_config(config)
        preprocess = Preprocess.from_json(config["preprocess"])
        calibration = Calibration.from_json(config)
        stored = config["model"]
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in stored["fields"].items()}
        spec = Spec(**{**stored, "image_size": tuple(stored["image_size"]), "fields": fields})
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} cannot be used: {error}") from None
    try:
        with safe_open(folder / WEIGHTS, "numpy") as file:  # reads only names and shapes
            given = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read ({error})") from None
    try:
        check_weights(spec.fields, list(given.values()))
        model, wanted = abstract_model(spec, preprocess)
        check_count([leaf.shape for leaf in wanted.values()], list(given.values()))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} cannot be used: {error}") from None
    misfit = f"{folder / WEIGHTS} does not match the model described by {CONFIG} in the same folder"
    if {path: leaf.shape for path, leaf in wanted.items()} != given:
        raise ValueError(misfit)
    arrays = load_file(folder / WEIGHTS)
    for name, leaf in wanted.items():
        if arrays[name].dtype != leaf.dtype:
            raise ValueError(f"{misfit}: {name} is {arrays[name].dtype}, not {leaf.dtype}")
    return Saved(model, nested(arrays), tuple(config["classes"]), preprocess, spec, calibration)


def abstract_model(spec: Spec, preprocess: Preprocess) -> tuple[Classifier, dict[str, Any]]:
    """Returns the model and the shapes of its variables by path, without computing anything."""
    image = jax.ShapeDtypeStruct((1, *preprocess.size, preprocess.channels), jnp.float32)
    try:
        model = spec.create()
        return model, by_path(jax.eval_shape(model.init, jax.random.key(0), image))
    except ValueError:  # by which models reject most invalid combinations
        raise
    except Exception as error:  # the others fail in some operation
        reason = first_line(error) or type(error).__name__
        given = ", ".join(f"{name}={value}" for name, value in spec.fields.items())
        raise ValueError(f"{spec.name} cannot be created with {given} ({reason})") from None
