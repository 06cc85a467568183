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
    """Maps by the path of their layer, in order of computation; one per group where attention is within windows.

    A map is as it leaves the softmax: how much each token n reads of each token m, a sum of 1 over m.
    """
    seen = watch(model, variables, images)
    maps = jax.device_get(compute_maps(model, variables, images))
    return {path: maps[path] for path in seen.maps}


def class_attention(
    model: Classifier, variables: Variables, images: Images
) -> dict[str, Float[np.ndarray, "b heads h w"]]:
    """Per layer and head, how much the class token attends to each place; without one, all tokens on average.

    Only of the `global_layers`.
    """
    maps = jax.device_get(compute_maps(model, variables, images))
    found = {}
    for path, (prefix, grid) in global_layers(model, variables, images).items():
        read = maps[path][:, :, 0, prefix:] if prefix or maps[path].shape[2] == 1 else maps[path].mean(axis=2)
        found[path] = read.reshape(*read.shape[:2], *grid)
    return found


def global_layers(model: Classifier, variables: Variables, images: Images) -> dict[str, tuple[int, tuple[int, int]]]:
    """The layers with global attention over a grid, with the `token_grid` of each; nothing is computed."""
    seen = watch(model, variables, images)
    found = {}
    for path, shape in seen.maps.items():
        n, m = shape[-2:]
        if len(shape) != 4 or n not in (1, m):
            continue
        try:
            found[path] = token_grid(m, seen.grid or (images.shape[1], images.shape[2]))
        except ValueError:  # such as merged tokens, which have no place
            continue
    return found


def unit_range(heat: Float[np.ndarray, "b H W"]) -> Float[np.ndarray, "b H W"]:
    """Scales each map to the range from 0 to 1; a constant map becomes 0."""
    low, high = heat.min(axis=(1, 2), keepdims=True), heat.max(axis=(1, 2), keepdims=True)
    return (heat - low) / np.where(high > low, high - low, 1)
