"""Pictures that explain image files, with one model or several side by side."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt, UInt8

from smallvit import plots
from smallvit.common.files import check_folder, truncated
from smallvit.data import find_images
from smallvit.data.decoding import decode, header
from smallvit.data.view import as_picture
from smallvit.explanation import (
    LayerAttention,
    ReceptiveField,
    attention_by_layer,
    class_attention,
    global_layers,
    receptive_field,
    saliency,
    unit_range,
)
from smallvit.runs.answers import Unreadable, top_classes
from smallvit.runs.prediction import Predictor
from smallvit.runs.saved import Saved, from_pretrained
from smallvit.runs.source import own_images

if TYPE_CHECKING:
    import matplotlib.figure  # slow to import, so only when a picture is drawn

BATCH = 16
SHARP = 448  # maximum side of a picture in pixels, which may exceed the model's input size
MEASURED = 64  # maximum number of images for statistics


@dataclass(frozen=True)
class Explained:
    """One model's map and predictions for one image."""

    model: str
    image: UInt8[np.ndarray, "H W c"]  # the part that the model sees, at the resolution of the file
    heat: Float[np.ndarray, "h w"]  # from 0 to 1
    answers: tuple[tuple[str, float], ...]  # the top three classes and their probabilities
    heads: Float[np.ndarray, "heads y x"] | None  # one map per head of the layer


class Explainer:
    """Explains images with each of the models.

    With `layer`, counted from 1, the map is the mean over that layer's heads instead of the saliency of the whole
    model. With `heads`, the map of each head of that layer, or of the last one, is kept as well.
    """

    def __init__(self, runs: Sequence[str | Path], *, layer: int | None = None, heads: bool = False) -> None:
        self.models = named_models(runs)
        self.layer, self.heads = layer, heads
        self._predictors = {name: Predictor(saved, BATCH) for name, saved in self.models.items()}
        self.layers = {
            name: _layer(saved, layer) if layer is not None or heads else "" for name, saved in self.models.items()
        }

    def __call__(self, files: Sequence[Path | io.BytesIO]) -> Iterator[list[Explained] | Unreadable]:
        """Yields the explanations of the files in order."""
        for start in range(0, len(files), BATCH):
            yield from self._batch(files[start : start + BATCH], min(BATCH, len(files)))

    def _batch(self, files: Sequence[Path | io.BytesIO], size: int) -> Iterator[list[Explained] | Unreadable]:
        read = [self._read(file) for file in files]
        readable = [entry for entry in read if not isinstance(entry, Unreadable)]
        columns = [
            self._explain(name, [entry[name] for entry in readable], size) if readable else () for name in self.models
        ]
        rows = iter(zip(*columns, strict=True))
        for entry in read:
            yield entry if isinstance(entry, Unreadable) else list(next(rows))

    def _read(self, file: Path | io.BytesIO) -> "dict[str, _Pair] | Unreadable":
        try:
            content = file.read_bytes() if isinstance(file, Path) else file.getvalue()
            return {name: _pair(content, saved) for name, saved in self.models.items()}
        except OSError as error:
            return Unreadable(str(file), f"cannot read {file}: {error.strerror}")
        except ValueError as error:
            name = str(file) if isinstance(file, Path) else "-"
            return Unreadable(name, str(error).replace("cannot read the image", f"cannot read {name}", 1))

    def _explain(self, name: str, pairs: "Sequence[_Pair]", size: int) -> list[Explained]:
        saved, number = self.models[name], len(pairs)
        images = np.zeros((size, *pairs[0].seen.shape), saved.preprocess.dtype)  # fixed batch size, compiled once
        images[:number] = [pair.seen for pair in pairs]
        probabilities = self._predictors[name](images[:number])
        inputs = np.asarray(saved.preprocess.normalise(images), np.float32)
        path = self.layers[name]
        heads = class_attention(saved.model, saved.variables, inputs)[path] if path else None
        if self.layer is not None and heads is not None:
            heat = unit_range(heads.mean(axis=1))
        else:
            heat = saliency(saved.model, saved.variables, inputs)
        return [
            Explained(
                name,
                pair.shown,
                heat[i],
                top_classes(probabilities[i], saved.classes, 3),
                heads[i] if self.heads and heads is not None else None,
            )
            for i, pair in enumerate(pairs)
        ]

    def picture(self, explained: Sequence[Explained]) -> "matplotlib.figure.Figure":
        what = "what the model looks at" if self.layer is None else f"what layer {self.layer} attends to"
        return plots.explanation([plots.Panel(e.model, e.image, e.heat, e.answers) for e in explained], what)

    def heads_picture(self, explained: Sequence[Explained]) -> "matplotlib.figure.Figure":
        titles = [f"{e.model}, {self.layers[e.model].removesuffix('/attend')}" for e in explained]
        maps = [e.heads for e in explained if e.heads is not None]
        return plots.heads([e.image for e in explained], maps, titles)


def explain(
    run: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    layer: int | None = None,
    heads: bool = False,
    compare: str | Path | None = None,
) -> dict[Path, list[Explained]]:
    """Draws what a trained model looks at in each image, like `smallvit explain`.

    Args:
        run: A run folder or its model/.
        images: Files, folders with everything below them, or patterns such as "photos/*.jpg"; one or several.
        out: Folder for the pictures. Defaults to RUN/explanations.
        layer: Show what this layer attends to, counted from 1, instead of the saliency of the whole model.
        heads: Also draw each head of that layer, or of the last one.
        compare: Another run, shown side by side.

    Returns:
        The map and predictions of each model, keyed by the path of the picture. A file that cannot be read raises a
        ValueError.
    """
    explainer = Explainer([run] if compare is None else [run, compare], layer=layer, heads=heads)
    files = find_images([images] if isinstance(images, str | Path) else images)
    drawn = {}
    for picture, explained in draw_explanations(explainer, files, Path(out or Path(run) / "explanations")):
        if isinstance(explained, Unreadable):
            raise ValueError(explained.reason)
        drawn[picture] = explained
    return drawn


def draw_explanations(
    explainer: Explainer, files: Sequence[Path | io.BytesIO], out: Path
) -> Iterator[tuple[Path, list[Explained] | Unreadable]]:
    """Draws the files one by one into a folder; yields the path of each picture and its content."""
    for target, explained in zip(picture_names(files, out), explainer(files), strict=True):
        picture = Path(f"{target}-explained.png")
        if not isinstance(explained, Unreadable):
            plots.save(explainer.picture(explained), picture)
            if explainer.heads:
                plots.save(explainer.heads_picture(explained), Path(f"{target}-heads.png"))
        yield picture, explained


@dataclass(frozen=True)
class _Pair:
    seen: UInt[np.ndarray, "H W c"]
    shown: UInt8[np.ndarray, "y x 3"]


def _pair(content: bytes, saved: Saved) -> _Pair:
    """The model's input, and the same part of the image in RGB at the resolution of the file."""
    preprocess = saved.preprocess
    height, width = preprocess.size

    def read(size: tuple[int, int]) -> UInt[np.ndarray, "_ _ _"]:
        return decode(io.BytesIO(content), size, preprocess.channels, preprocess.fit, depth=preprocess.depth)

    seen = read(preprocess.size)
    whole = header(io.BytesIO(content))
    times = max(min(whole.height // height, whole.width // width, SHARP // max(height, width)), 1)
    large = (times * height, times * width)
    if preprocess.photographic:
        shown = decode(io.BytesIO(content), large, 3, preprocess.fit)
    else:
        shown = np.broadcast_to(as_picture(read(large)), (*large, 3))
    return _Pair(seen, shown)


def named_models(runs: Sequence[str | Path]) -> dict[str, Saved]:
    """The models by architecture name, or by folder if these are equal."""
    models = [from_pretrained(run) for run in runs]
    names = [saved.spec.name for saved in models]
    if len(set(names)) < len(names):
        names = [Path(run).resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"{names[0]} would be compared with itself: give another run")
    return dict(zip(names, models, strict=True))


def _layer(saved: Saved, layer: int | None) -> str:
    """The path of the global attention layer with this number, counted from 1."""
    paths = list(global_layers(saved.model, saved.variables, _noise(saved, 1)))
    if not paths:
        raise ValueError(f"{saved.spec.name} has no layer with global attention: leave out --heads and --layer")
    if layer is not None and not 1 <= layer <= len(paths):
        raise ValueError(f"layer {layer} of {saved.spec.name} must be from 1 to {len(paths)}")
    return paths[(layer or 0) - 1]


def _noise(saved: Saved, number: int) -> Float[np.ndarray, "b H W c"]:
    shape = (number, *saved.preprocess.size, saved.preprocess.channels)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def picture_names(files: Sequence[Path | io.BytesIO], folder: Path) -> list[Path]:
    """The path of each file's picture without extension: the file's name, with its folder's if names collide."""
    check_folder(folder)
    stems = [file.stem if isinstance(file, Path) else "stdin" for file in files]
    longer = [f"{file.parent.name}-{file.stem}" if isinstance(file, Path) else "stdin" for file in files]
    taken: set[str] = set()
    names = []
    for stem, long in zip(stems, longer, strict=True):
        wanted = truncated(stem if stems.count(stem) == 1 else long, 200)
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}-{number}"
        taken.add(name)
        names.append(folder / name)
    inputs = {file.resolve() for file in files if isinstance(file, Path)}
    for name in names:
        for kind in ("explained", "heads"):
            if (target := Path(f"{name}-{kind}.png")).resolve() in inputs:
                raise ValueError(f"{target} is one of the images and would be overwritten: choose another --out")
    return names


def images_of(run: str | Path, saved: Saved, files: Sequence[Path]) -> Float[np.ndarray, "b H W c"] | None:
    """These files as model inputs, or the run's test images; None if there are none."""
    preprocess = saved.preprocess
    if files:
        images = np.stack(
            [
                decode(file, preprocess.size, preprocess.channels, preprocess.fit, depth=preprocess.depth)
                for file in files[:MEASURED]
            ]
        )
    else:
        try:
            split = own_images(run, saved).split
        except ValueError:
            return None
        images = split.images[np.unique(np.linspace(0, len(split) - 1, MEASURED).astype(int))]
    return np.asarray(preprocess.normalise(images), np.float32)


def layer_statistics(
    runs: Sequence[str | Path], files: Sequence[Path] = ()
) -> tuple[dict[str, list[LayerAttention]], "matplotlib.figure.Figure"]:
    """How sharp and how local the attention of each layer is, on these files or the runs' test images."""
    statistics = {}
    for run, (name, saved) in zip(runs, named_models(runs).items(), strict=True):
        images = images_of(run, saved, files)
        if images is None:
            raise ValueError(f"the test images of {run} are not available: give images to measure its attention on")
        statistics[name] = attention_by_layer(saved.model, saved.variables, images)
        if not statistics[name]:
            raise ValueError(f"{name} has no attention to measure")
    rows = {
        name: [
            plots.Heads("Temperature", [e.temperature for e in layers], [e.initial for e in layers], "sqrt(d)"),
            plots.Heads("Entropy, nats", [e.entropy for e in layers], [e.even for e in layers], "uniform attention"),
            plots.Heads("Distance, tokens", [e.distance for e in layers], [None for _ in layers], ""),
        ]
        for name, layers in statistics.items()
    }
    return statistics, plots.layers(rows)


def receptive_fields(
    runs: Sequence[str | Path], files: Sequence[Path] = ()
) -> tuple[dict[str, ReceptiveField], "matplotlib.figure.Figure"]:
    """The receptive field of one token before the first block, on these files or on noise."""
    results = {}
    for run, (name, saved) in zip(runs, named_models(runs).items(), strict=True):
        images = images_of(run, saved, files) if files else _noise(saved, 8)
        assert images is not None
        results[name] = receptive_field(saved.model, saved.variables, images)
    fields = {name: plots.Field(f.heat, f.grid, f.token, f.theory) for name, f in results.items()}
    return results, plots.receptive_fields(fields, [describe(field) for field in results.values()])


def describe(field: ReceptiveField) -> str:
    measured = f"{field.measured[0]} x {field.measured[1]} pixels measured"
    return measured if field.theory is None else f"{measured}, {field.theory[0]} x {field.theory[1]} in theory"
