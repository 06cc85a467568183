"""Maps that the page overlays on an image: the saliency, and the attention of each head on the token grid."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt

from smallvit.explanation import attention_maps, saliency, token_grid, unit_range
from smallvit.runs.saved import Saved


class Maps(NamedTuple):
    saliency: Float[np.ndarray, "H W"] | None  # None if the model has no token grid that its output depends on
    layers: dict[str, Float[np.ndarray, "h rows columns"]]  # by the path of the layer; values from 0 to 1


def explain(saved: Saved, image: UInt[np.ndarray, "H W c"]) -> Maps:
    """Computes the maps of an image; skips layers with window attention, or whose tokens form no grid."""
    images = np.asarray(saved.preprocess.normalise(image[None]), saved.model.dtype)
    try:
        heat = np.asarray(saliency(saved.model, saved.variables, images)[0], np.float32)
    except ValueError:
        heat = None
    layers = {}
    for path, maps in attention_maps(saved.model, saved.variables, images).items():
        if maps.ndim == 4:
            try:
                layers[path] = read_by_head(maps[0].astype(np.float32), (image.shape[0], image.shape[1]))
            except ValueError:
                continue
    return Maps(heat, layers)


def read_by_head(maps: Float[np.ndarray, "h n m"], shape: tuple[int, int]) -> Float[np.ndarray, "h rows columns"]:
    """The attention of the class token to the token grid or, without a class token, the mean over all tokens."""
    heads, n, m = maps.shape
    prefix, grid = token_grid(m, shape)
    read = maps[:, 0] if prefix and n == m else maps.mean(axis=1)
    return unit_range(read[:, prefix:].reshape(heads, *grid))
