"""Figures of a run, made from plain arrays and lists, without pyplot or a display."""

from typing import TYPE_CHECKING

from smallvit.common.lazy import lazy

if TYPE_CHECKING:
    from smallvit.plots.images import augmented, image_grid, mistakes, worst_mistakes
    from smallvit.plots.maps import (
        Field,
        Heads,
        Panel,
        attention,
        explanation,
        heads,
        layers,
        overlay,
        receptive_fields,
        upsampled,
        upscaled,
    )
    from smallvit.plots.scores import comparison, confusion, curves, folds, reliability
    from smallvit.plots.style import save

__all__ = [
    "Field",
    "Heads",
    "Panel",
    "attention",
    "augmented",
    "comparison",
    "confusion",
    "curves",
    "explanation",
    "folds",
    "heads",
    "image_grid",
    "layers",
    "mistakes",
    "overlay",
    "receptive_fields",
    "reliability",
    "save",
    "upsampled",
    "upscaled",
    "worst_mistakes",
]
__getattr__, __dir__ = lazy(__name__, __file__)
