"""Figures of images: samples, mistakes, augmentation."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Integer
from matplotlib.figure import Figure

from smallvit.plots.style import MUTED, VAL, WRONG, Images, cut_end, cut_middle, notice, show, styled, tiles

MOST_MISTAKES = 24


@styled
def image_grid(images: Images, titles: Sequence[str], columns: int = 8) -> Figure:
    if not len(images):
        return notice("No images.")
    figure, axes = tiles(len(images), min(columns, len(images)), images.shape[1] / images.shape[2], lines=1)
    for tile, image, title in zip(axes, images, titles, strict=True):
        show(tile, image)
        tile.set_title(cut_end(title, 22), fontsize=8, fontweight="normal", pad=4)
    return figure


@styled
def mistakes(
    images: Images,
    true: Integer[np.ndarray, " b"],
    predicted: Integer[np.ndarray, " b"],
    probability: Float[np.ndarray, " b"],
    classes: Sequence[str],
    names: Sequence[str] | None = None,
    rows: Integer[np.ndarray, " w"] | None = None,
) -> Figure:
    """The misclassified images, most confident first; `probability` is that of the predicted class.

    `names` are file names, shown below the images. `rows` are the indices of other images to show, in this order.
    """
    wrong = worst_mistakes(true, predicted, probability) if rows is None else rows[:MOST_MISTAKES]
    if not wrong.size:
        return notice(f"No mistakes: all {len(true):,} images were classified correctly.")
    columns = min(6, max(len(wrong), 3))
    lines = 2 if names is None else 3
    figure, axes = tiles(len(wrong), columns, images.shape[1] / images.shape[2], lines)
    for tile, i in zip(axes, wrong, strict=True):
        show(tile, np.asarray(images[i]))
        answer = f"{cut_end(classes[int(predicted[i])], 16)} {probability[i]:.0%}"
        tile.set_title(answer, fontsize=8.5, color=WRONG, pad=17)
        label = f"label: {cut_end(classes[int(true[i])], 15)}"
        tile.text(0, 1.02, label, transform=tile.transAxes, fontsize=8.5, va="bottom")
        if names is not None:
            tile.set_xlabel(
                cut_middle(names[int(i)].rsplit("/", 1)[-1], 24), fontsize=7, color=MUTED, loc="left", labelpad=2
            )
    return figure


def worst_mistakes(
    true: Integer[np.ndarray, " b"],
    predicted: Integer[np.ndarray, " b"],
    probability: Float[np.ndarray, " b"],
    most: int | None = MOST_MISTAKES,
) -> Integer[np.ndarray, " w"]:
    """Indices of the images that `mistakes` shows, in its order; with `most=None`, of all misclassified images."""
    wrong = np.flatnonzero(true != predicted)
    return wrong[np.argsort(-probability[wrong], kind="stable")][:most]


@styled
def augmented(before: Images, after: Images) -> Figure:
    """Each image above its augmented version."""
    if not len(before):
        return notice("No images.")
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
                    show(axes[row, column], np.asarray(batch[i]))
                else:
                    axes[row, column].set_axis_off()
            axes[row, 0].set_ylabel(name, color=MUTED if row == 0 else VAL)
    return figure
