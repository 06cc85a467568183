"""How sharp and how local attention is: temperature, entropy and distance per layer and head."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

import numpy as np
from jaxtyping import Float

from smallvit.common.paths import by_path
from smallvit.explanation.maps import attention_maps
from smallvit.explanation.trace import Variables, token_grid, watch
from smallvit.layers import Classifier
from smallvit.ops import Images


def temperatures(model: Classifier, variables: Variables, images: Images) -> dict[str, Float[np.ndarray, " h"]]:
    """The learned scale of LSA per layer and head, as a multiple of its initial value, dim_head ** -0.5.

    Above 1, attention is sharper than without LSA. Layers without a learned temperature are left out.
    """
    params = by_path(variables["params"])
    scales = watch(model, variables, images).scales
    names = {path: (f"{path}/temperature", scale) for path, scale in scales.items()}
    return {path: np.asarray(params[name]) / scale for path, (name, scale) in names.items() if name in params}


def attention_entropy(
    maps: Mapping[str, Float[np.ndarray, "b *groups h n m"]],
) -> dict[str, Float[np.ndarray, " h"]]:
    """Entropy in nats per layer and head, averaged over images and tokens: from 0, one token, to log(m), uniform."""

    def entropy(p: np.ndarray) -> np.ndarray:
        p_log_p = p * np.log(np.where(p > 0, p, 1))
        return -_by_head(p_log_p.sum(axis=-1))

    return {path: entropy(p) for path, p in maps.items()}


def attention_distance(
    maps: Mapping[str, Float[np.ndarray, "b h n n"]], grid: tuple[int, int]
) -> dict[str, Float[np.ndarray, " h"]]:
    """Mean attention distance per layer and head, in tokens of the grid.

    A class token before the grid is excluded, as query and as key.
    """
    rows, columns = np.mgrid[: grid[0], : grid[1]].reshape(2, -1)
    distance = np.hypot(rows[:, None] - rows, columns[:, None] - columns).astype(np.float32)

    def mean_distance(path: str, p: np.ndarray) -> np.ndarray:
        n, m = p.shape[-2:]
        prefix = m - distance.shape[0]
        if n != m or prefix not in (0, 1):
            raise ValueError(
                f"{path} has maps of {n} x {m}, which do not match the tokens of a grid of {grid[0]} x {grid[1]}"
            )
        p = p[..., prefix:, prefix:]
        return _by_head((p * distance).sum(axis=-1) / np.maximum(p.sum(axis=-1), 1e-12))

    return {path: mean_distance(path, p) for path, p in maps.items()}


@dataclass(frozen=True)
class LayerAttention:
    path: str
    initial: float  # sqrt(dim_head): the divisor without LSA, the initial value with LSA
    temperature: Float[np.ndarray, " h"] | None  # learned
    entropy: Float[np.ndarray, " h"]  # in nats
    even: float  # the entropy of uniform attention
    distance: Float[np.ndarray, " h"] | None  # in tokens of the layer's grid; None for attention within groups


def attention_by_layer(model: Classifier, variables: Variables, images: Images) -> list[LayerAttention]:
    """Temperature, entropy and distance per layer and head."""
    seen = watch(model, variables, images)
    learned = temperatures(model, variables, images)
    maps = attention_maps(model, variables, images)
    entropy = attention_entropy(maps)
    shape = seen.grid or (images.shape[1], images.shape[2])

    def distance(path: str) -> np.ndarray | None:
        p = maps[path]
        try:
            return attention_distance({path: p}, token_grid(p.shape[-1], shape)[1])[path] if p.ndim == 4 else None
        except ValueError:
            return None

    return [
        LayerAttention(
            path,
            1 / seen.scales[path],
            1 / (learned[path] * seen.scales[path]) if path in learned else None,
            entropy[path],
            log(maps[path].shape[-1]),
            distance(path),
        )
        for path in maps
    ]


def _by_head(x: Float[np.ndarray, "b *groups h n"]) -> Float[np.ndarray, " h"]:
    return x.mean(axis=tuple(axis for axis in range(x.ndim) if axis != x.ndim - 2))
