"""Figures of numbers: training curves, evaluation, comparisons."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Integer
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from smallvit.plots.style import INK, MUTED, TRAIN, VAL, cut_end, notice, styled
from smallvit.runs.scores import calibration_bins, calibration_error

BLUES = LinearSegmentedColormap.from_list("blues", ["#f7f9fc", "#c4d8f5", "#7fabea", "#1f6feb", "#0b3a86"])
FEW = 10  # images in a bin, for a meaningful accuracy


@styled
def curves(rows: Sequence[Mapping[str, float | int | None]], kept: int = -1) -> Figure:
    """Loss, top-1 accuracy and learning rate against `epoch`.

    A row has any of train_loss, val_loss, train_top1, val_top1 (both in percent) and learning_rate. Row `kept`, whose
    weights the model has, is marked.
    """
    if not rows:
        return notice("No epoch has been finished yet.")
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
            if key.startswith("train_"):
                epochs, values = without_short_end(epochs, values)
            axes.plot(epochs, values, color=colour, label=label, marker="o" if len(values) <= 12 else "")
        axes.set_xlim(*((first - 0.5, last + 0.5) if last - first < 2 else (first, last)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=8))
        axes.margins(y=0.12)
    epochs, values = _series(rows[kept:][:1], "val_top1")
    if values:
        top1.plot(epochs, values, "o", color=VAL, markersize=7, markeredgecolor="white", clip_on=False, zorder=3)
        top1.set_title(f"Top-1, %: {values[0]:.1f} at epoch {epochs[0]:.3g}, kept")
    rate.yaxis.set_major_formatter("{x:.3g}")
    for axes in (loss, top1):
        axes.legend(loc="best")
    return figure


def without_short_end(epochs: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Merges the last two points of a curve of running means if the last one covers only a few steps.

    The merged value is the mean of the two, weighted by their epochs.
    """
    spans = np.diff(epochs, prepend=0.0)
    if len(spans) < 3 or spans[-1] >= np.median(spans) / 2:
        return epochs, values
    mean = float(np.average(values[-2:], weights=spans[-2:]))
    return [*epochs[:-2], epochs[-1]], [*values[:-2], mean]


@styled
def confusion(matrix: Integer[np.ndarray, "k k"], classes: Sequence[str]) -> Figure:
    """Rows are the true classes, columns the predicted ones; the colour is the share of the row."""
    k = len(classes)
    if matrix.shape != (k, k):
        raise ValueError(f"the confusion matrix of {k} classes must be {k} x {k}, not of shape {matrix.shape}")
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    named, numbered = k <= 60, k <= 20
    side = float(np.clip(2.6 + 0.42 * k, 4.2, 9.5))
    figure = Figure(figsize=(side + 0.9, side + 0.3))
    axes = figure.subplots()
    # Rare mistakes must be visible if the cells have no numbers.
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
        names = [cut_end(name, 18) for name in classes]
        upright = max(map(len, names)) * k > 60
        axes.set_xticks(range(k), names, fontsize=size, rotation=90 if upright else 0)
        axes.set_yticks(range(k), names, fontsize=size)
    else:
        ticks = range(0, k, 20 if k <= 120 else 50)
        axes.set_xticks(ticks)
        axes.set_yticks(ticks)
        axes.set_xlabel("predicted class number")
        axes.set_ylabel("true class number")
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
    bar.outline.set_visible(False)  # type: ignore[operator]  # matplotlib's stubs declare it callable
    return figure


@styled
def reliability(
    confidence: Float[np.ndarray, " b"],
    correct: Bool[np.ndarray, " b"],
    bins: int = 15,
    *,
    before: Float[np.ndarray, " b"] | None = None,
) -> Figure:
    """Accuracy against confidence, above the number of images per bin.

    `before` is the confidence before temperature scaling, shown on the left.
    """
    if not confidence.size:
        return notice("No images.")
    columns = {"Calibration": confidence}
    if before is not None:
        columns = {"Before temperature scaling": before, "After": confidence}
    figure = Figure(figsize=(4.8 if before is None else 8.8, 5.4))
    axes = figure.subplots(
        2, len(columns), squeeze=False, sharex=True, sharey="row", gridspec_kw={"height_ratios": [3.4, 1]}
    )
    for (top, bottom), (title, values) in zip(axes.T, columns.items(), strict=True):
        _reliability(top, bottom, values, correct, bins)
        top.set_title(f"{title}: ECE {100 * calibration_error(values, correct, bins):.1f} %")
        bottom.set_xticks([0, 0.25, 0.5, 0.75, 1])  # few enough for two panels side by side
    axes[0, 0].set_ylabel("right")
    axes[1, 0].set_ylabel("images")
    handles: dict[str, Artist] = {}
    for top in axes[0]:
        artists, labels = top.get_legend_handles_labels()
        handles |= dict(zip(labels, artists, strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, columnspacing=1.2, handlelength=1.4)
    return figure


def _reliability(
    top: Axes, bottom: Axes, confidence: Float[np.ndarray, " b"], correct: Bool[np.ndarray, " b"], bins: int
) -> None:
    centres, accuracy, mean_confidence, count = calibration_bins(confidence, correct, bins)
    filled = count > 0
    top.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 4)), label="calibrated")
    few = count < FEW  # too few for a meaningful accuracy
    for which, colour, label in (
        (filled & ~few, 0.45, "share that is right"),
        (filled & few, 0.16, f"of under {FEW} images"),
    ):
        if which.any():
            top.bar(centres[which], accuracy[which], width=0.86 / bins, color=BLUES(colour), label=label)
    top.plot(mean_confidence[filled], accuracy[filled], "o", color=VAL, markeredgecolor="white")
    top.set_ylim(0, 1.02)
    bottom.bar(centres, count, width=0.86 / bins, color=TRAIN)
    bottom.set_xlabel("the model's confidence")
    bottom.set_xlim(0, 1)
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    for axis in (top.yaxis, bottom.xaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    for axes in (top, bottom):
        axes.grid(axis="y")


@styled
def comparison(scores: Mapping[str, Sequence[float]]) -> Figure:
    """Top-1 accuracy of each model in percent: one dot per seed, a line for the mean."""
    figure = Figure(figsize=(7.5, 0.9 + 0.42 * len(scores)))
    axes = figure.subplots()
    for row, values in enumerate(scores.values()):
        mean = sum(values) / len(values)
        axes.plot(values, [row] * len(values), "o", color=VAL, alpha=0.55, markeredgewidth=0)
        axes.plot([mean, mean], [row - 0.28, row + 0.28], color=INK, linewidth=2)
        axes.annotate(f"{mean:.2f}", (mean, row - 0.3), ha="center", va="bottom", fontsize=8.5, color=INK)
    axes.set_yticks(range(len(scores)), [cut_end(name, 40) for name in scores])
    axes.set_ylim(len(scores) - 0.5, -0.75)
    axes.margins(x=0.12)
    axes.set_xlabel("top-1 in %")
    axes.grid(axis="x")
    return figure


@styled
def folds(top1: Sequence[float], intervals: Sequence[tuple[float, float]], together: float) -> Figure:
    """Top-1 accuracy in percent of each fold with its interval, and a line for that of all images."""
    figure = Figure(figsize=(7.5, 1.1 + 0.36 * len(top1)))
    axes = figure.subplots()
    for row, (value, (low, high)) in enumerate(zip(top1, intervals, strict=True)):
        axes.plot([low, high], [row, row], color=TRAIN)
        axes.plot(value, row, "o", color=VAL, markersize=6)
        axes.annotate(f"{value:.1f}", (high, row), (6, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.axvline(together, color=INK, linewidth=1, linestyle=(0, (4, 4)), zorder=0)
    axes.set_title(f"{together:.2f} % of all images right, each by the model of its fold")
    axes.set_yticks(range(len(top1)), [f"fold {number}" for number in range(1, len(top1) + 1)])
    axes.set_ylim(len(top1) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlabel("top-1 in %, with 95 % intervals")
    axes.grid(axis="x")
    return figure


def _series(rows: Sequence[Mapping[str, float | int | None]], key: str) -> tuple[list[float], list[float]]:
    """The epochs and values of the rows that have this key; rows without an epoch are numbered from 1."""
    numbered = [({"epoch": i} | dict(row)) for i, row in enumerate(rows, 1)]
    pairs = [(row["epoch"], value) for row in numbered if (value := row.get(key)) is not None]
    return [float(epoch or 0) for epoch, _ in pairs], [float(value) for _, value in pairs]
