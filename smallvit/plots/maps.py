"""Figures of what a model looks at."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float, UInt, UInt8
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

from smallvit.data.view import as_picture
from smallvit.plots.style import FAINT, MUTED, TRAIN, VAL, Images, cut_end, notice, show, styled

HEAT = matplotlib.colormaps["inferno"]


@styled
def attention(images: Images, maps: Float[np.ndarray, "b h w"], titles: Sequence[str]) -> Figure:
    """Image, map and overlay side by side; a map has values in [0, 1] and any size."""
    if not len(images):
        return notice("No images.")
    groups = 1 if len(images) <= 3 else 2
    rows = -(-len(images) // groups)
    aspect = images.shape[1] / images.shape[2]
    width = 1.75
    figure = Figure(figsize=(groups * (3 * width + 0.25), rows * (width * aspect + 0.34)))
    # An empty column separates the two groups.
    ratios = ([1, 1, 1, 0.12] * groups)[:-1]
    axes = figure.subplots(rows, len(ratios), squeeze=False, gridspec_kw={"width_ratios": ratios})
    for tile in axes.flat:
        tile.set_axis_off()
    for i, (image, heat, title) in enumerate(zip(images, maps, titles, strict=True)):
        row, column = i // groups, 4 * (i % groups)
        big = upscaled(image)
        heat = upsampled(heat, (big.shape[0], big.shape[1]))
        for offset, shown in enumerate((image, HEAT(heat)[..., :3], overlay(image, heat))):
            axes[row, column + offset].set_axis_on()
            show(axes[row, column + offset], shown)
        axes[row, column].set_title(cut_end(title, 60), fontsize=8.5, fontweight="normal", pad=4)
    return figure


class Panel(NamedTuple):
    """One model's map and predictions for one image."""

    model: str
    image: UInt[np.ndarray, "H W c"]
    heat: Float[np.ndarray, "h w"]  # in [0, 1]
    answers: Sequence[tuple[str, float]]  # classes and their probabilities, most probable first


@styled
def explanation(panels: Sequence[Panel], what: str) -> Figure:
    """Image, map, overlay and predictions; one row per model. `what` is the title of the maps."""
    height, width = _fitted(panels[0].image)
    figure = Figure(figsize=(3 * width + 2.9, len(panels) * (height + 0.28) + 0.1))
    ratios = [width, width, width, 2.5]
    axes = figure.subplots(len(panels), 4, squeeze=False, gridspec_kw={"width_ratios": ratios})
    for (left, middle, right, bars), panel in zip(axes, panels, strict=True):
        big = upscaled(panel.image)
        heat = upsampled(panel.heat, (big.shape[0], big.shape[1]))
        for tile, shown, title in (
            (left, big, cut_end(panel.model, 26)),
            (middle, HEAT(heat)[..., :3], what),
            (right, overlay(panel.image, heat), "on the image"),
        ):
            show(tile, shown)
            tile.set_title(title, fontsize=8.5, fontweight="normal", color=MUTED, pad=5)
        _answers(bars, panel.answers)
    return figure


@styled
def heads(
    images: Sequence[UInt[np.ndarray, "_ _ _"]], maps: Sequence[Float[np.ndarray, "_ _ _"]], titles: Sequence[str]
) -> Figure:
    """The image of each model, then one overlay per head, each with its own scale."""
    height, width = _fitted(images[0], 1.7)
    columns = min(6, 1 + max(map(len, maps)))
    rows = [-(-(len(model_maps) + 1) // columns) for model_maps in maps]
    figure = Figure(figsize=(columns * (width + 0.08) + 0.2, sum(rows) * (height + 0.22) + 0.3 * len(maps)))
    parts = figure.subfigures(len(maps), 1, squeeze=False, height_ratios=[n * (height + 0.22) + 0.3 for n in rows])
    for part, lines, image, model_maps, title in zip(parts[:, 0], rows, images, maps, titles, strict=True):
        part.suptitle(cut_end(title, 100), x=0.012, ha="left", fontsize=10, fontweight="bold")
        axes = list(part.subplots(lines, columns, squeeze=False).flat)
        for tile in axes[1 + len(model_maps) :]:
            tile.set_axis_off()
        show(axes[0], upscaled(image))
        axes[0].set_title("image", fontsize=8.5, fontweight="normal", color=MUTED, pad=4)
        for i, (tile, heat) in enumerate(zip(axes[1:], model_maps, strict=False), start=1):
            spread = float(np.ptp(heat))
            show(tile, overlay(image, (heat - heat.min()) / (spread or 1)))
            tile.set_title(f"head {i}", fontsize=8.5, fontweight="normal", color=MUTED, pad=4)
    return figure


class Heads(NamedTuple):
    """One quantity per layer and head."""

    title: str
    values: Sequence[Float[np.ndarray, " h"] | None]
    reference: Sequence[float | None]
    meaning: str  # of the reference


@styled
def layers(rows: Mapping[str, Sequence[Heads]]) -> Figure:
    """Dots for heads and a line for their mean, against the layer; one row of panels per model."""
    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(3.6 * columns, 3.1 * len(rows)))
    parts = figure.subfigures(len(rows), 1, squeeze=False)
    for part, (name, panels) in zip(parts[:, 0], rows.items(), strict=True):
        part.suptitle(cut_end(name, 60), x=0.012, ha="left", fontsize=11, fontweight="bold")
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
    present = [(x, values) for x, values in zip(numbers, panel.values, strict=True) if values is not None]
    for x, values in present:
        axes.plot([x] * len(values), values, "o", color=VAL, alpha=0.4, markeredgewidth=0)
    if present:
        axes.plot([x for x, _ in present], [v.mean() for _, v in present], color=VAL, label="mean of the heads")
    axes.set_xlim(0.5, len(panel.values) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=12))
    axes.margins(y=0.28)  # leaves room for the legend
    axes.legend(loc="upper left", ncols=2, fontsize=8, columnspacing=1, handlelength=1.6)


class Field(NamedTuple):
    heat: Float[np.ndarray, "H W"]  # in [0, 1]
    grid: tuple[int, int]
    token: tuple[int, int]
    theory: tuple[int, int] | None


@styled
def receptive_fields(fields: Mapping[str, Field], notes: Sequence[str]) -> Figure:
    """How much a token depends on each pixel; its patch is outlined, its theoretical field dashed."""
    first = next(iter(fields.values())).heat
    height, width = 3.4 * np.array(first.shape) / max(first.shape)
    width = max(float(width), 2.6)
    figure = Figure(figsize=(len(fields) * (width + 0.3) + 0.5, float(height) + 0.78))
    axes = figure.subplots(1, len(fields), squeeze=False)[0]
    picture = None
    for panel, (name, field), note in zip(axes, fields.items(), notes, strict=True):
        picture = panel.imshow(field.heat, cmap=HEAT, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
        rows, columns = field.heat.shape
        p, q = rows / field.grid[0], columns / field.grid[1]
        panel.set_xticks(np.arange(0, columns + 1, q) - 0.5, [])
        panel.set_yticks(np.arange(0, rows + 1, p) - 0.5, [])
        panel.grid(color="white", alpha=0.22, linewidth=0.7)
        panel.set_axisbelow(False)
        centre = (field.token[0] + 0.5) * p - 0.5, (field.token[1] + 0.5) * q - 0.5
        boxes = [((p, q), "solid"), *([(field.theory, (0, (4, 3)))] if field.theory else [])]
        for (h, w), style in boxes:
            corner = centre[1] - w / 2, centre[0] - h / 2
            panel.add_patch(Rectangle(corner, w, h, fill=False, edgecolor="#4cc2ff", linewidth=1.5, linestyle=style))
        for spine in panel.spines.values():
            spine.set_visible(False)
        panel.set_xlim(-0.5, columns - 0.5)
        panel.set_ylim(rows - 0.5, -0.5)
        panel.set_title(cut_end(name, 36), pad=20)
        panel.text(0, 1.02, note, transform=panel.transAxes, fontsize=8.5, color=MUTED, va="bottom")
    assert picture is not None
    bar = figure.colorbar(picture, ax=list(axes), shrink=0.75, aspect=26, pad=0.02, ticks=[0, 0.25, 1])
    bar.ax.set_yticklabels(["0", "25", "100 %"])
    bar.set_label("of the largest gradient", fontsize=8.5)
    bar.outline.set_visible(False)  # type: ignore[operator]  # matplotlib's stubs declare it callable
    return figure


def _fitted(image: np.ndarray, side: float = 2.3) -> tuple[float, float]:
    """Height and width in inches of an image with its aspect ratio."""
    height, width = image.shape[:2]
    return side * height / max(height, width), side * width / max(height, width)


def _answers(axes: Axes, answers: Sequence[tuple[str, float]]) -> None:
    """Draws class names over bars; the top class is coloured."""
    axes.set_axis_off()
    axes.set_xlim(0, 1.18)
    axes.set_ylim(2.7, -0.75)  # room for three bars, even if there are fewer
    for row, (name, probability) in enumerate(answers[:3]):
        colour, weight = (VAL, "bold") if row == 0 else (TRAIN, "normal")
        axes.barh(row + 0.12, 1, height=0.14, color=FAINT)
        axes.barh(row + 0.12, probability, height=0.14, color=colour)
        axes.text(0, row - 0.06, cut_end(name, 24), fontsize=10 if row == 0 else 9, fontweight=weight, va="bottom")
        axes.text(1.18, row + 0.12, f"{probability:.0%}", fontsize=8.5, color=MUTED, ha="right", va="center")


def overlay(image: UInt[np.ndarray, "H W c"], heat: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "y x 3"]:
    """The grey image under the colours of the map; warm colours are more opaque."""
    big = upscaled(image)
    grey = np.asarray(Image.fromarray(big).convert("L"), np.float32)[..., None] / 255
    heat = upsampled(heat, (big.shape[0], big.shape[1]))
    cover = 0.1 + 0.6 * heat[..., None]
    return (255 * ((1 - cover) * grey + cover * HEAT(heat)[..., :3])).astype(np.uint8)


def upscaled(image: UInt[np.ndarray, "H W c"], side: int = 224) -> UInt8[np.ndarray, "y x 3"]:
    """Converts to RGB and enlarges by an integer factor to reach `side`, without interpolation."""
    image = as_picture(image)
    colour = image if image.shape[-1] == 3 else np.repeat(image, 3, axis=-1)
    times = max(-(-side // max(image.shape[:2])), 1)
    return colour.repeat(times, axis=0).repeat(times, axis=1)


def upsampled(heat: Float[np.ndarray, "h w"], size: tuple[int, int]) -> Float[np.ndarray, "y x"]:
    """Resizes to (height, width) without interpolation: each token stays a block."""
    large = Image.fromarray(np.asarray(heat, np.float32)).resize((size[1], size[0]), Image.Resampling.NEAREST)
    return np.clip(np.asarray(large), 0, 1)
