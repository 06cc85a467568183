"""Attention maps, and how much each head attends to each place."""

import jax
import numpy as np
from jaxtyping import Float

from smallvit.explanation.trace import Variables, compute_maps, token_grid, watch
from smallvit.layers import Classifier
from smallvit.ops import Images


def attention_maps(
    model: Classifier, variables: Variables, images: Images
) -> dict[str, Float[np.ndarray, "b *groups h n m"]]:
    """Maps by layer path, in order of computation; one per group if attention is within windows.

    A map is the softmax output: how much each token n attends to each token m, with a sum of 1 over m.
    """
    seen = watch(model, variables, images)
    maps = jax.device_get(compute_maps(model, variables, images))
    return {path: maps[path] for path in seen.maps}


def class_attention(
    model: Classifier, variables: Variables, images: Images
) -> dict[str, Float[np.ndarray, "b heads h w"]]:
    """How much the class token attends to each place, per layer and head; the mean of all tokens if there is none.

    Covers only the `global_layers`.
    """
    maps = jax.device_get(compute_maps(model, variables, images))
    attended = {}
    for path, (prefix, grid) in global_layers(model, variables, images).items():
        read = maps[path][:, :, 0, prefix:] if prefix or maps[path].shape[2] == 1 else maps[path].mean(axis=2)
        attended[path] = read.reshape(*read.shape[:2], *grid)
    return attended


def global_layers(model: Classifier, variables: Variables, images: Images) -> dict[str, tuple[int, tuple[int, int]]]:
    """The layers with global attention over a grid, with the `token_grid` of each; computes nothing."""
    seen = watch(model, variables, images)
    grids = {}
    for path, shape in seen.maps.items():
        n, m = shape[-2:]
        if len(shape) != 4 or n not in (1, m):
            continue
        try:
            grids[path] = token_grid(m, seen.grid or (images.shape[1], images.shape[2]))
        except ValueError:  # such as merged tokens, which have no position
            continue
    return grids


def unit_range(heat: Float[np.ndarray, "b H W"]) -> Float[np.ndarray, "b H W"]:
    """Scales each map to the range from 0 to 1; a constant map becomes 0."""
    low, high = heat.min(axis=(1, 2), keepdims=True), heat.max(axis=(1, 2), keepdims=True)
    return (heat - low) / np.where(high > low, high - low, 1)
