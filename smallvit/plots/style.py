"""The common style of all figures."""

import warnings
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import UInt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from smallvit.common.files import write_safely
from smallvit.common.text import shown
from smallvit.data.view import as_picture

INK, MUTED, FAINT = "#1f2933", "#66727f", "#e4e8ec"
TRAIN, VAL, WRONG = "#8a97a6", "#1f6feb", "#c8402f"

Images = UInt[np.ndarray, "b H W c"]

styled = matplotlib.rc_context(
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
        "text.parse_math": False,  # class and file names may contain a dollar sign
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
    """Saves as PNG; a reader of `path` sees either the old file or the complete new one."""

    def write(temporary: Path) -> None:
        figure.draw_without_rendering()
        # The layout leaves too little room for long names beside cells of a fixed shape: the page grows with them.
        page = Bbox.union([figure.bbox_inches, figure.get_tightbbox().padded(0.08)])
        figure.savefig(temporary, format="png", facecolor="white", bbox_inches=page)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the font lacks some characters
        write_safely(path, write)


def notice(text: str) -> Figure:
    figure = Figure(figsize=(6, 1.1))
    figure.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, fontsize=11)
    return figure


def tiles(count: int, columns: int, aspect: float, lines: int) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of images, `lines` of text above each."""
    rows = -(-count // columns)
    width = max(10.0 / max(columns, 4), 1.2)
    figure = Figure(figsize=(columns * width, rows * (width * aspect + 0.1 + 0.2 * lines)))
    axes = figure.subplots(rows, columns, squeeze=False)
    for empty in axes.flat[count:]:
        empty.set_axis_off()
    return figure, list(axes.flat[:count])


def show(axes: Axes, image: np.ndarray) -> None:
    """Shows an image without interpolation, so that pixels stay sharp."""
    image = as_picture(image) if image.dtype.kind == "u" else image
    grey = image.shape[-1] == 1
    axes.imshow(image[..., 0] if grey else image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def cut_end(text: str, width: int) -> str:
    """Puts text on one line and shortens it to a maximum length."""
    text = shown(" ".join(text.split()))
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def cut_middle(text: str, width: int) -> str:
    """Like `cut_end`, but cuts the middle, for file names, which differ at their ends."""
    text = shown(" ".join(text.split()))
    tail = width // 2
    return text if len(text) <= width else f"{text[: width - tail - 1]}…{text[-tail:]}"
