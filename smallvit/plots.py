"""Figures of a run, each from plain arrays and lists; nothing here knows of pyplot or a screen."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Bool, Float, Integer, UInt8
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

from smallvit.files import write_safely
from smallvit.scores import calibration_bins, calibration_error

INK, MUTED, FAINT = "#1f2933", "#66727f", "#e4e8ec"
TRAIN, VAL, WRONG = "#8a97a6", "#1f6feb", "#c8402f"
BLUES = LinearSegmentedColormap.from_list("blues", ["#f7f9fc", "#c4d8f5", "#7fabea", "#1f6feb", "#0b3a86"])
HEAT = matplotlib.colormaps["inferno"]
MOST_MISTAKES = 24
FEW = 10  # images of a bin

Images = UInt8[np.ndarray, "b H W c"]

_styled = matplotlib.rc_context(
    {
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.06,
        "figure.constrained_layout.h_pad": 0.06,
        "figure.dpi": 120,
        "savefig.dpi": 120,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 8,
        "axes.labelsize": 9.5,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": "#c5ccd3",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": False,
        "axes.axisbelow": True,
        "grid.color": FAINT,
        "text.color": INK,
        "text.parse_math": False,  # names of classes and files may hold a dollar sign
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 4.5,
        "lines.solid_capstyle": "round",
    }
)


def save(figure: Figure, path: Path) -> None:
    """As PNG; a reader of `path` sees the old file or the whole new one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands for a letter the font does not have
        write_safely(path, lambda temporary: figure.savefig(temporary, format="png", facecolor="white"))


@_styled
def curves(rows: Sequence[Mapping[str, float | int | None]]) -> Figure:
    """Loss, top-1 and learning rate against `epoch`.

    A row has any of train_loss, val_loss, train_top1, val_top1 (both in percent) and learning_rate.
    """
    if not rows:
        return _notice("No epoch has been finished yet.")
    figure = Figure(figsize=(11, 3.4))
    loss, top1, rate = figure.subplots(1, 3)
    epochs = _series(rows, "epoch")[1]
    first, last = min(epochs), max(epochs)
    for axes, title, lines in (
        (loss, "Loss", [("train_loss", "training", TRAIN), ("val_loss", "validation", VAL)]),
        (top1, "Top-1, %", [("train_top1", "training", TRAIN), ("val_top1", "validation", VAL)]),
        (rate, "Learning rate", [("learning_rate", "", VAL)]),
    ):
        axes.set_title(title)
        axes.set_xlabel("epoch")
        axes.grid(axis="y")
        for key, label, colour in lines:
            epochs, values = _series(rows, key)
            axes.plot(epochs, values, color=colour, label=label, marker="o" if len(values) <= 12 else "")
        axes.set_xlim(*((first - 0.5, last + 0.5) if last - first < 2 else (first, last)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=8))
        axes.margins(y=0.12)
    epochs, values = _series(rows, "val_top1")
    if values:
        best = int(np.argmax(values))
        top1.plot(
            epochs[best], values[best], "o", color=VAL, markersize=7, markeredgecolor="white", clip_on=False, zorder=3
        )
        top1.set_title(f"Top-1, %: best {values[best]:.1f} at epoch {epochs[best]:.3g}")
    rate.yaxis.set_major_formatter("{x:.3g}")
    for axes in (loss, top1):
        axes.legend(loc="best")
    return figure


@_styled
def confusion(matrix: Integer[np.ndarray, "k k"], classes: Sequence[str]) -> Figure:
    """Rows are the true classes, columns the predicted ones; the colour is the share of the row."""
    k = len(classes)
    if matrix.shape != (k, k):
        raise ValueError(f"a confusion matrix of shape {matrix.shape} for {k} classes: it must be {k} x {k}")
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    named, numbered = k <= 60, k <= 20
    side = float(np.clip(2.6 + 0.42 * k, 4.2, 9.5))
    figure = Figure(figsize=(side + 0.9, side + 0.3))
    axes = figure.subplots()
    # Where no numbers stand in the cells, a few mistakes are to be seen as well.
    norm = PowerNorm(1 if numbered else 0.5, vmin=0, vmax=1)
    picture = axes.imshow(share, cmap=BLUES, norm=norm, interpolation="nearest")
    right = np.trace(matrix) / max(matrix.sum(), 1)
    axes.set_title(f"{right:.1%} of {matrix.sum():,} images on the diagonal")
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    for spine in axes.spines.values():
        spine.set_visible(False)
    if named:
        size = 9.5 if k <= 20 else float(np.clip(330 / k, 5.5, 9))
        names = [_short(name, 18) for name in classes]
        upright = max(map(len, names)) * k > 60
        axes.set_xticks(range(k), names, fontsize=size, rotation=90 if upright else 0)
        axes.set_yticks(range(k), names, fontsize=size)
    else:
        ticks = range(0, k, 20 if k <= 120 else 50)
        axes.set_xticks(ticks)
        axes.set_yticks(ticks)
        axes.set_xlabel("predicted, number of the class")
        axes.set_ylabel("true, number of the class")
    if numbered:
        size = float(np.clip(130 / k, 6.5, 12))
        for i, j in np.argwhere(matrix):
            colour = "white" if share[i, j] > 0.55 else INK
            axes.text(j, i, f"{matrix[i, j]}", ha="center", va="center", color=colour, fontsize=size)
        axes.set_xticks(np.arange(k - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(k - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
    bar = figure.colorbar(picture, ax=axes, shrink=0.6, aspect=28, pad=0.02, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["0", "50", "100 %"])
    bar.outline.set_visible(False)  # type: ignore[operator]  # matplotlib's stubs have it callable
    return figure


@_styled
def image_grid(images: Images, titles: Sequence[str], columns: int = 8) -> Figure:
    if not len(images):
        return _notice("No images.")
    figure, axes = _tiles(len(images), min(columns, len(images)), images.shape[1] / images.shape[2], lines=1)
    for each, image, title in zip(axes, images, titles, strict=True):
        _show(each, image)
        each.set_title(_short(title, 22), fontsize=8, fontweight="normal", pad=4)
    return figure


@_styled
def mistakes(
    images: Images,
    true: Integer[np.ndarray, " b"],
    predicted: Integer[np.ndarray, " b"],
    probability: Float[np.ndarray, " b"],
    classes: Sequence[str],
) -> Figure:
    """The wrong images of these, the most confident first; `probability` is that of the predicted class."""
    wrong = worst_mistakes(true, predicted, probability)
    if not wrong.size:
        return _notice(f"No mistakes: all {len(true):,} images were classified as labelled.")
    columns = min(6, max(len(wrong), 3))
    figure, axes = _tiles(len(wrong), columns, images.shape[1] / images.shape[2], lines=2)
    for each, i in zip(axes, wrong, strict=True):
        _show(each, np.asarray(images[i]))
        says = f"{_short(classes[int(predicted[i])], 16)} {probability[i]:.0%}"
        each.set_title(says, fontsize=8.5, color=WRONG, pad=17)
        each.text(
            0, 1.02, f"is {_short(classes[int(true[i])], 18)}", transform=each.transAxes, fontsize=8.5, va="bottom"
        )
    return figure


def worst_mistakes(
    true: Integer[np.ndarray, " b"], predicted: Integer[np.ndarray, " b"], probability: Float[np.ndarray, " b"]
) -> Integer[np.ndarray, " w"]:
    """Which images `mistakes` shows, in its order."""
    wrong = np.flatnonzero(true != predicted)
    return wrong[np.argsort(-probability[wrong], kind="stable")][:MOST_MISTAKES]


@_styled
def augmented(before: Images, after: Images) -> Figure:
    """Pairs: each image above what training sees of it."""
    if not len(before):
        return _notice("No images.")
    columns = min(8, len(before))
    blocks = -(-len(before) // columns)
    aspect = before.shape[1] / before.shape[2]
    width = max(10.0 / columns, 1.25) if columns > 1 else 2.4
    figure = Figure(figsize=(columns * width + 0.4, blocks * (2 * width * aspect + 0.35)))
    parts = figure.subfigures(blocks, 1, squeeze=False, hspace=0.04)
    for block, part in enumerate(parts[:, 0]):
        axes = part.subplots(2, columns, squeeze=False)
        for row, (name, batch) in enumerate((("before", before), ("after", after))):
            for column in range(columns):
                i = block * columns + column
                if i < len(batch):
                    _show(axes[row, column], np.asarray(batch[i]))
                else:
                    axes[row, column].set_axis_off()
            axes[row, 0].set_ylabel(name, color=MUTED if row == 0 else VAL)
    return figure


@_styled
def attention(images: Images, maps: Float[np.ndarray, "b h w"], titles: Sequence[str]) -> Figure:
    """Image, map and overlay side by side; a map has values in [0, 1] and any size."""
    if not len(images):
        return _notice("No images.")
    groups = 1 if len(images) <= 3 else 2
    rows = -(-len(images) // groups)
    aspect = images.shape[1] / images.shape[2]
    width = 1.75
    figure = Figure(figsize=(groups * (3 * width + 0.25), rows * (width * aspect + 0.34)))
    # An empty column keeps two groups apart.
    ratios = ([1, 1, 1, 0.12] * groups)[:-1]
    axes = figure.subplots(rows, len(ratios), squeeze=False, gridspec_kw={"width_ratios": ratios})
    for each in axes.flat:
        each.set_axis_off()
    for i, (image, heat, title) in enumerate(zip(images, maps, titles, strict=True)):
        row, column = i // groups, 4 * (i % groups)
        big = upscaled(image)
        heat = upsampled(heat, (big.shape[0], big.shape[1]))
        for offset, shown in enumerate((image, HEAT(heat)[..., :3], overlay(image, heat))):
            axes[row, column + offset].set_axis_on()
            _show(axes[row, column + offset], shown)
        axes[row, column].set_title(_short(title, 60), fontsize=8.5, fontweight="normal", pad=4)
    return figure


class Panel(NamedTuple):
    """What one model makes of one image."""

    model: str
    image: UInt8[np.ndarray, "H W c"]
    heat: Float[np.ndarray, "h w"]  # in [0, 1]
    answers: Sequence[tuple[str, float]]  # classes and their probabilities, the most probable first


@_styled
def explanation(panels: Sequence[Panel], what: str) -> Figure:
    """Image, map, overlay and answers; a row for each model. `what` says what the map is."""
    height, width = _fitted(panels[0].image)
    figure = Figure(figsize=(3 * width + 2.9, len(panels) * (height + 0.28) + 0.1))
    ratios = [width, width, width, 2.5]
    axes = figure.subplots(len(panels), 4, squeeze=False, gridspec_kw={"width_ratios": ratios})
    for (left, middle, right, bars), panel in zip(axes, panels, strict=True):
        big = upscaled(panel.image)
        heat = upsampled(panel.heat, (big.shape[0], big.shape[1]))
        for each, shown, title in (
            (left, big, _short(panel.model, 26)),
            (middle, HEAT(heat)[..., :3], what),
            (right, overlay(panel.image, heat), "on the image"),
        ):
            _show(each, shown)
            each.set_title(title, fontsize=8.5, fontweight="normal", color=MUTED, pad=5)
        _answers(bars, panel.answers)
    return figure


@_styled
def heads(
    images: Sequence[UInt8[np.ndarray, "_ _ _"]], maps: Sequence[Float[np.ndarray, "_ _ _"]], titles: Sequence[str]
) -> Figure:
    """Of each model the image, then an overlay for each head, each scaled by itself."""
    height, width = _fitted(images[0], 1.7)
    columns = min(6, 1 + max(map(len, maps)))
    rows = [-(-(len(each) + 1) // columns) for each in maps]
    figure = Figure(figsize=(columns * (width + 0.08) + 0.2, sum(rows) * (height + 0.22) + 0.3 * len(maps)))
    parts = figure.subfigures(len(maps), 1, squeeze=False, height_ratios=[n * (height + 0.22) + 0.3 for n in rows])
    for part, lines, image, each, title in zip(parts[:, 0], rows, images, maps, titles, strict=True):
        part.suptitle(title, x=0.012, ha="left", fontsize=10, fontweight="bold")
        axes = list(part.subplots(lines, columns, squeeze=False).flat)
        for place in axes[1 + len(each) :]:
            place.set_axis_off()
        _show(axes[0], upscaled(image))
        axes[0].set_title("image", fontsize=8.5, fontweight="normal", color=MUTED, pad=4)
        for i, (place, heat) in enumerate(zip(axes[1:], each, strict=False), start=1):
            spread = float(np.ptp(heat))
            _show(place, overlay(image, (heat - heat.min()) / (spread or 1)))
            place.set_title(f"head {i}", fontsize=8.5, fontweight="normal", color=MUTED, pad=4)
    return figure


class Heads(NamedTuple):
    """One quantity of all heads, layer by layer."""

    title: str
    values: Sequence[Float[np.ndarray, " h"] | None]
    reference: Sequence[float | None]
    meaning: str  # of the reference


@_styled
def layers(rows: Mapping[str, Sequence[Heads]]) -> Figure:
    """Dots for heads and a line for their mean, against the layer; a row of panels for each model."""
    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(3.6 * columns, 3.1 * len(rows)))
    parts = figure.subfigures(len(rows), 1, squeeze=False)
    for part, (name, panels) in zip(parts[:, 0], rows.items(), strict=True):
        part.suptitle(_short(name, 60), x=0.012, ha="left", fontsize=11, fontweight="bold")
        for axes, panel in zip(part.subplots(1, columns, squeeze=False)[0], panels, strict=True):
            _heads_by_layer(axes, panel)
    return figure


def _heads_by_layer(axes: Axes, panel: Heads) -> None:
    axes.set_title(panel.title, fontsize=9.5, fontweight="normal")
    axes.set_xlabel("layer")
    axes.grid(axis="y")
    numbers = range(1, len(panel.values) + 1)
    known = [(x, y) for x, y in zip(numbers, panel.reference, strict=True) if y is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label=panel.meaning)
    some = [(x, values) for x, values in zip(numbers, panel.values, strict=True) if values is not None]
    for x, values in some:
        axes.plot([x] * len(values), values, "o", color=VAL, alpha=0.4, markeredgewidth=0)
    if some:
        axes.plot([x for x, _ in some], [v.mean() for _, v in some], color=VAL, label="mean of the heads")
    axes.set_xlim(0.5, len(panel.values) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=12))
    axes.margins(y=0.28)  # for the legend
    axes.legend(loc="upper left", ncols=2, fontsize=8, columnspacing=1, handlelength=1.6)


class Field(NamedTuple):
    heat: Float[np.ndarray, "H W"]  # in [0, 1]
    grid: tuple[int, int]
    token: tuple[int, int]
    theory: tuple[int, int] | None


@_styled
def receptive_fields(fields: Mapping[str, Field], notes: Sequence[str]) -> Figure:
    """How much a token depends on each pixel: its patch is outlined, what it should see is dashed."""
    first = next(iter(fields.values())).heat
    height, width = 3.4 * np.array(first.shape) / max(first.shape)
    width = max(float(width), 2.6)
    figure = Figure(figsize=(len(fields) * (width + 0.3) + 0.5, float(height) + 0.78))
    axes = figure.subplots(1, len(fields), squeeze=False)[0]
    picture = None
    for each, (name, field), note in zip(axes, fields.items(), notes, strict=True):
        picture = each.imshow(field.heat, cmap=HEAT, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
        rows, columns = field.heat.shape
        p, q = rows / field.grid[0], columns / field.grid[1]
        each.set_xticks(np.arange(0, columns + 1, q) - 0.5, [])
        each.set_yticks(np.arange(0, rows + 1, p) - 0.5, [])
        each.grid(color="white", alpha=0.22, linewidth=0.7)
        each.set_axisbelow(False)
        centre = (field.token[0] + 0.5) * p - 0.5, (field.token[1] + 0.5) * q - 0.5
        boxes = [((p, q), "solid"), *([(field.theory, (0, (4, 3)))] if field.theory else [])]
        for (h, w), style in boxes:
            corner = centre[1] - w / 2, centre[0] - h / 2
            each.add_patch(Rectangle(corner, w, h, fill=False, edgecolor="#4cc2ff", linewidth=1.5, linestyle=style))
        for spine in each.spines.values():
            spine.set_visible(False)
        each.set_xlim(-0.5, columns - 0.5)
        each.set_ylim(rows - 0.5, -0.5)
        each.set_title(_short(name, 36), pad=20)
        each.text(0, 1.02, note, transform=each.transAxes, fontsize=8.5, color=MUTED, va="bottom")
    assert picture is not None
    bar = figure.colorbar(picture, ax=list(axes), shrink=0.75, aspect=26, pad=0.02, ticks=[0, 0.25, 1])
    bar.ax.set_yticklabels(["0", "25", "100 %"])
    bar.set_label("of the largest gradient", fontsize=8.5)
    bar.outline.set_visible(False)  # type: ignore[operator]  # matplotlib's stubs have it callable
    return figure


def _fitted(image: np.ndarray, side: float = 2.3) -> tuple[float, float]:
    """Height and width in inches of an image in its own shape."""
    height, width = image.shape[:2]
    return side * height / max(height, width), side * width / max(height, width)


def _answers(axes: Axes, answers: Sequence[tuple[str, float]]) -> None:
    """Names over bars, the answer in colour."""
    axes.set_axis_off()
    axes.set_xlim(0, 1.18)
    axes.set_ylim(2.7, -0.75)  # room for three, however few there are
    for row, (name, probability) in enumerate(answers[:3]):
        colour, weight = (VAL, "bold") if row == 0 else (TRAIN, "normal")
        axes.barh(row + 0.12, 1, height=0.14, color=FAINT)
        axes.barh(row + 0.12, probability, height=0.14, color=colour)
        axes.text(0, row - 0.06, _short(name, 24), fontsize=10 if row == 0 else 9, fontweight=weight, va="bottom")
        axes.text(1.18, row + 0.12, f"{probability:.0%}", fontsize=8.5, color=MUTED, ha="right", va="center")


def overlay(image: UInt8[np.ndarray, "H W c"], heat: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "y x 3"]:
    """The image in grey under the colours of the map: the warmer, the more the colour covers."""
    big = upscaled(image)
    grey = np.asarray(Image.fromarray(big).convert("L"), np.float32)[..., None] / 255
    heat = upsampled(heat, (big.shape[0], big.shape[1]))
    cover = 0.1 + 0.6 * heat[..., None]
    return (255 * ((1 - cover) * grey + cover * HEAT(heat)[..., :3])).astype(np.uint8)


def upscaled(image: UInt8[np.ndarray, "H W c"], side: int = 224) -> UInt8[np.ndarray, "y x 3"]:
    """In colour, and as many times larger as reaches `side`, each pixel a crisp square."""
    colour = image if image.shape[-1] == 3 else np.repeat(image[..., :1], 3, axis=-1)
    times = max(-(-side // max(image.shape[:2])), 1)
    return colour.repeat(times, axis=0).repeat(times, axis=1)


def upsampled(heat: Float[np.ndarray, "h w"], size: tuple[int, int]) -> Float[np.ndarray, "y x"]:
    """Bilinear, to (height, width)."""
    large = Image.fromarray(np.asarray(heat, np.float32)).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.clip(np.asarray(large), 0, 1)


@_styled
def reliability(confidence: Float[np.ndarray, " b"], correct: Bool[np.ndarray, " b"], bins: int = 15) -> Figure:
    """Of the images that the model is so sure of, how many are right; below, how many there are."""
    if not confidence.size:
        return _notice("No images.")
    centres, accuracy, sure, count = calibration_bins(confidence, correct, bins)
    figure = Figure(figsize=(4.8, 5.4))
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3.4, 1]})
    filled = count > 0
    top.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 4)), label="calibrated")
    few = count < FEW  # their share says little
    for which, colour, label in (
        (filled & ~few, 0.45, "share that is right"),
        (filled & few, 0.16, f"of under {FEW} images"),
    ):
        top.bar(centres[which], accuracy[which], width=0.86 / bins, color=BLUES(colour), label=label)
    top.plot(sure[filled], accuracy[filled], "o", color=VAL, markeredgecolor="white")
    top.set_title(f"Calibration: ECE {100 * calibration_error(confidence, correct, bins):.1f} %")
    top.set_ylabel("right")
    top.set_ylim(0, 1.02)
    figure.legend(loc="outside lower center", ncols=3, columnspacing=1.2, handlelength=1.4)
    bottom.bar(centres, count, width=0.86 / bins, color=TRAIN)
    bottom.set_xlabel("the model's confidence")
    bottom.set_ylabel("images")
    bottom.set_xlim(0, 1)
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    for axis in (top.yaxis, bottom.xaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    for axes in (top, bottom):
        axes.grid(axis="y")
    return figure


@_styled
def comparison(scores: Mapping[str, Sequence[float]]) -> Figure:
    """Top-1 in percent of each model: a dot for each seed, a line for the mean."""
    figure = Figure(figsize=(7.5, 0.9 + 0.42 * len(scores)))
    axes = figure.subplots()
    for row, values in enumerate(scores.values()):
        mean = sum(values) / len(values)
        axes.plot(values, [row] * len(values), "o", color=VAL, alpha=0.55, markeredgewidth=0)
        axes.plot([mean, mean], [row - 0.28, row + 0.28], color=INK, linewidth=2)
        axes.annotate(f"{mean:.2f}", (mean, row - 0.3), ha="center", va="bottom", fontsize=8.5, color=INK)
    axes.set_yticks(range(len(scores)), [_short(name, 40) for name in scores])
    axes.set_ylim(len(scores) - 0.5, -0.75)
    axes.margins(x=0.12)
    axes.set_xlabel("top-1 in %")
    axes.grid(axis="x")
    return figure


def _series(rows: Sequence[Mapping[str, float | int | None]], key: str) -> tuple[list[float], list[float]]:
    """(epochs, values) of the rows that have this value; counted from 1 where rows do not say their epoch."""
    numbered = [({"epoch": i} | dict(row)) for i, row in enumerate(rows, 1)]
    pairs = [(row["epoch"], value) for row in numbered if (value := row.get(key)) is not None]
    return [float(epoch or 0) for epoch, _ in pairs], [float(value) for _, value in pairs]


def _notice(text: str) -> Figure:
    figure = Figure(figsize=(6, 1.1))
    figure.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, fontsize=11)
    return figure


def _tiles(count: int, columns: int, aspect: float, lines: int) -> tuple[Figure, list[Axes]]:
    """A figure of so many places for images, `lines` of text above each."""
    rows = -(-count // columns)
    width = max(10.0 / max(columns, 4), 1.2)
    figure = Figure(figsize=(columns * width, rows * (width * aspect + 0.1 + 0.2 * lines)))
    axes = figure.subplots(rows, columns, squeeze=False)
    for empty in axes.flat[count:]:
        empty.set_axis_off()
    return figure, list(axes.flat[:count])


def _show(axes: Axes, image: np.ndarray) -> None:
    """Without interpolation, so that the pixels of a small image stay crisp."""
    grey = image.shape[-1] == 1
    axes.imshow(image[..., 0] if grey else image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _short(text: str, width: int) -> str:
    """On one line, and no longer than that."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"
