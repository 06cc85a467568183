"""Attention maps, and how much of each place each head reads."""

import jax
import numpy as np
from jaxtyping import Float

from smallvit.explanation.trace import Variables, compute_maps, token_grid, watch
from smallvit.layers import Classifier
from smallvit.ops import Images


def attention_maps(
    model: Classifier, variables: Variables, images: Images
) -> dict[str, Float[np.ndarray, "b *groups h n m"]]:
    """By the path of their layer and in the order of the computation; where attention is within windows, one a group.

    A map is as it leaves the softmax: how much each token n reads of each token m, a sum of 1 over m.
    """
    seen = watch(model, variables, images)
    maps = jax.device_get(compute_maps(model, variables, images))
    return {path: maps[path] for path in seen.maps}


def class_attention(
    model: Classifier, variables: Variables, images: Images
) -> dict[str, Float[np.ndarray, "b heads h w"]]:
    """By layer and head: how much the class token reads of each place; without one, how much all tokens do on average.

    Only of the `global_layers`.
    """
    maps = jax.device_get(compute_maps(model, variables, images))
    found = {}
    for path, (prefix, grid) in global_layers(model, variables, images).items():
        read = maps[path][:, :, 0, prefix:] if prefix or maps[path].shape[2] == 1 else maps[path].mean(axis=2)
        found[path] = read.reshape(*read.shape[:2], *grid)
    return found


def global_layers(model: Classifier, variables: Variables, images: Images) -> dict[str, tuple[int, tuple[int, int]]]:
    """The layers in which all tokens of a grid are read at once, with `token_grid` of each; nothing is computed."""
    seen = watch(model, variables, images)
    found = {}
    for path, shape in seen.maps.items():
        n, m = shape[-2:]
        if len(shape) != 4 or n not in (1, m):
            continue
        try:
            found[path] = token_grid(m, seen.grid or (images.shape[1], images.shape[2]))
        except ValueError:  # such as a few merged tokens, which have no place
            continue
    return found


def unit_range(heat: Float[np.ndarray, "b H W"]) -> Float[np.ndarray, "b H W"]:
    """Each map from 0, its least, to 1, its most; all 0 where it is flat."""
    low, high = heat.min(axis=(1, 2), keepdims=True), heat.max(axis=(1, 2), keepdims=True)
    return (heat - low) / np.where(high > low, high - low, 1)
