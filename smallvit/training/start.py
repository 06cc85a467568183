"""Pretrained weights that a run starts from: a smallvit run, a file, or a repository on a hub."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smallvit.catalogue import catalogue
from smallvit.common.files import read_json
from smallvit.common.paths import by_path
from smallvit.common.words import did_you_mean
from smallvit.convert.load import FACTS, State, fetch, fit_weights, head_paths, read_state
from smallvit.data import Preprocess
from smallvit.layers import Classifier
from smallvit.ops import pair
from smallvit.registry import preset
from smallvit.runs.folder import MODEL
from smallvit.runs.saved import CONFIG, Saved, check_single, from_pretrained
from smallvit.training.config import TrainConfig

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and std that most published weights expect


@dataclass(frozen=True)
class Start:
    source: str
    state: State
    saved: Saved | None  # of a smallvit model
    facts: Mapping[str, Any]  # the configuration beside other weights, if there is one

    def settle(self, config: TrainConfig) -> tuple[TrainConfig, list[str]]:
        """Completes the configuration from the source, so that a resumed run does not need it; also returns messages.

        Model, fields, image size and normalisation are the source's unless the user sets them.
        """
        ours = self.saved is not None
        config = self._with_our_model(config) if ours else self._with_given_model(config)
        lines = []
        if config.image_size is None:
            (height, width), origin = self._size(config)
            config = replace(config, image_size=(height, width))
            lines.append(f"images are resized to {height} x {width}, the size of {origin} (--image-size changes it)")
        if config.mean is None and config.std is None:
            mean, std, origin = self._normalisation()
            config = replace(config, mean=mean, std=std)
            lines.append(f"images are normalised with mean {_numbers(mean)} and std {_numbers(std)}, {origin}")
        return config, lines

    def arrays(
        self, model: Classifier, shape: tuple[int, int, int], classes: tuple[str, ...]
    ) -> tuple[dict[str, np.ndarray], str]:
        """The variables by path, without a head for other classes, and a message about the head."""
        same = self.saved is not None and self.saved.classes == classes
        try:
            arrays = fit_weights(model, self.state, shape, self.source, head=same)
        except ValueError as error:
            raise ValueError(f"{error}; give the --model and --fields that it was trained with") from None
        head = head_paths(model, shape)
        values = sum(array.size for array in arrays.values())
        kept = "its head is kept: the classes are the same" if head <= arrays.keys() else (
            f"the head is newly initialised, for {len(classes)} classes"
        )  # fmt: skip
        return arrays, f"starting from {self.source} with {values:,} pretrained values; {kept}"

    def _with_our_model(self, config: TrainConfig) -> TrainConfig:
        assert self.saved is not None
        spec = self.saved.spec
        if config.model not in (None, spec.name):
            raise ValueError(
                f"{self.source} is a {spec.name}, not a {config.model}: leave out --model, or start from another source"
            )
        fields = {name: value for name, value in spec.fields.items() if name != "dtype"}
        if config.image_size is not None and pair(config.image_size) != spec.image_size:
            # Fields derived from the image size, such as the patch size, stay those of the source.
            derived = {name: value for name, value in preset(spec.name).fields.items() if callable(value)}
            fields = {name: value(spec.image_size) for name, value in derived.items()} | fields
        texts = tuple(f"{name}={json.dumps(value)}" for name, value in fields.items())
        given = {text.partition("=")[0] for text in config.fields}
        kept = tuple(text for text in texts if text.partition("=")[0] not in given)
        return replace(config, model=spec.name, fields=(*kept, *config.fields))

    def _with_given_model(self, config: TrainConfig) -> TrainConfig:
        if config.model is None:
            name = self.source.rpartition("/")[2].partition(":")[2] or Path(self.source).stem
            hint = did_you_mean(name.rpartition("_")[0] or name, [entry.name for entry in catalogue()])
            raise ValueError(f"{self.source} does not say which model it is: give it with --model{hint}")
        return config

    def _size(self, config: TrainConfig) -> tuple[tuple[int, int], str]:
        if self.saved is not None:
            return self.saved.preprocess.size, self.source
        known = self.facts.get("input_size") or self.facts.get("image_size")
        if known:
            # Channels, height, width in timm.
            size = known[-2:] if isinstance(known, list) else [known, known]
            return self._checked(size=size).size, self.source
        model = config.model or ""
        return pair(preset(model).fields["image_size"]), f"{model}, since the source has none"

    def _normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...], str]:
        if self.saved is not None:
            return self.saved.preprocess.mean, self.saved.preprocess.std, "those of the source"
        values = [self.facts.get(name) or self.facts.get(f"image_{name}") for name in ("mean", "std")]
        if isinstance(values[0], list) and isinstance(values[1], list):
            known = self._checked(channels=len(values[0]), mean=values[0], std=values[1])
            return known.mean, known.std, "those of the source"
        return *IMAGENET, "those of ImageNet, since the source has none (--mean and --std change them)"

    def _checked(self, **facts: Any) -> Preprocess:
        """Checks values from elsewhere by the rules for our own models."""
        usual = {"size": [1, 1], "channels": 3, "fit": "crop", "mean": IMAGENET[0], "std": IMAGENET[1]}
        try:
            return Preprocess.from_json({**usual, **facts})
        except ValueError as error:
            raise ValueError(f"the configuration beside {self.source} cannot be used: {error}") from None


def read_start(source: str) -> Start:
    """Reads the source of `--init`: a run or model folder, a file of weights, `timm:NAME` or `hf:REPO`."""
    path = fetch(source)
    check_single(path)
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and (folder / MODEL / CONFIG).exists():
        folder = folder / MODEL
    facts: dict[str, Any] = {}
    for name in reversed(FACTS):
        if (folder / name).exists() and (isinstance(content := read_json(folder / name), dict)):
            facts |= content
    if facts.get("format") == "smallvit" and (path.is_dir() or path.name == "model.safetensors"):
        saved = from_pretrained(folder)
        return Start(source, by_path(saved.variables), saved, {})
    if path.is_dir() and "config" in facts:
        raise ValueError(f"{source} holds no model yet: give a run that has evaluated at least once")
    of_timm = facts.get("pretrained_cfg")
    return Start(source, read_state(path), None, {**facts, **(of_timm if isinstance(of_timm, dict) else {})})


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4g}" for value in values)
