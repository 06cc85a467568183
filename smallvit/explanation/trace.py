"""Observes a model while it is applied: its attention maps, its parts, and the grids of their tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import log
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array

from smallvit.common.paths import by_path
from smallvit.layers import (
    SPT,
    Attend,
    Classifier,
    PatchEmbed,
    PatchMerger,
    PositionEmbed,
)
from smallvit.ops import Images, grid_size

Variables = Mapping[str, Any]


def token_grid(tokens: int, shape: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """The number of tokens before the grid, 0 or 1, and the grid.

    `shape` is the height and width of the image or of an earlier grid. The grid is `shape` itself if the tokens fill
    it, else the one with the closest aspect ratio.
    """
    if (prefix := tokens - shape[0] * shape[1]) in (0, 1):
        return prefix, shape
    grids = [
        (prefix, (h, (tokens - prefix) // h))
        for prefix in (0, 1)
        for h in range(1, tokens - prefix + 1)
        if (tokens - prefix) % h == 0 and tokens - prefix > 1
    ]
    best = min(grids, key=lambda candidate: _misfit(candidate[1], shape), default=None)
    if best is None or _misfit(best[1], shape) > _MISFIT:
        raise ValueError(f"{tokens} tokens do not fill a grid shaped like {shape[0]} x {shape[1]}")
    return best


# Rounding when halving changes the ratio: 5 x 8 becomes 3 x 4, then 2 x 2. A ratio of 1 x 2 is too far from a square.
_MISFIT = log(1.9)


def _misfit(grid: tuple[int, int], shape: tuple[int, int]) -> float:
    return abs(log(grid[0] * shape[1] / (grid[1] * shape[0])))


@dataclass
class Seen:
    """The result of tracing a model, which computes nothing."""

    maps: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes by path, in order
    scales: dict[str, float] = field(default_factory=dict)  # initial scale of each attention
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # output shapes, (n,) or (h, w), in order
    grid: tuple[int, int] | None = None  # grid of the first tokens, if a layer knows it
    embedding: str | None = None  # the first layer that cuts the image into patches,
    sees: tuple[int, int] | None = None  # and height and width of the field of one of its tokens
    tokens: int = 0  # number of tokens of the features

    @property
    def all_read_all(self) -> bool:
        """Whether every layer has global attention, among all tokens, all but the class token, or from it alone.

        False for a model without attention.
        """
        n = self.tokens
        known = ((n, n), (n - 1, n - 1), (1, n))
        return bool(self.maps) and all(len(shape) == 4 and shape[2:] in known for shape in self.maps.values())


_watched: dict[tuple[Any, ...], Seen] = {}


def watch(model: Classifier, variables: Variables, images: Images) -> Seen:
    """Traces a model. Cached per model and shape: tracing takes far longer than computing a small model's maps."""
    key = model, images.shape, images.dtype
    if key not in _watched:
        _watched[key] = _trace(model, variables, images)
    return _watched[key]


def _trace(model: Classifier, variables: Variables, images: Images) -> Seen:
    seen, merged = Seen(), False

    def watch(call: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        nonlocal merged
        out, module, path = call(*args, **kwargs), context.module, "/".join(context.module.path)
        if not module.path and context.method_name == "features":
            seen.tokens = out.shape[1]
        if context.method_name != "__call__" or not isinstance(out, jax.Array):
            return out
        if isinstance(module, Attend):
            seen.scales[path] = module.first_scale(kwargs["heads"], *args, values=kwargs.get("values"))
        if isinstance(module, PatchEmbed | SPT):
            seen.grid = seen.grid or grid_size(args[0].shape[1:3], module.patch_size)
            if seen.embedding is None and args[0].shape == images.shape:
                seen.embedding, seen.sees = path, module.sees
        if isinstance(module, PositionEmbed):
            seen.grid = seen.grid or module.grid
        merged = merged or isinstance(module, PatchMerger)  # merged tokens have no position in the image
        if len(module.path) == 1 and out.ndim in (3, 4) and not merged:
            seen.parts[path] = out.shape[1:-1]
        return out

    def apply(variables: Variables, images: Array) -> None:
        with nn.intercept_methods(watch):
            _, state = model.apply(variables, images, mutable="intermediates")
        # Inside the trace, because its outputs have sorted keys: block_10 before block_2.
        seen.maps.update({path: p.shape for path, p in _sown(state).items()})

    jax.eval_shape(apply, variables, jax.ShapeDtypeStruct(images.shape, images.dtype))
    return seen


def _sown(state: Any) -> dict[str, Array]:
    intermediates = by_path(state.get("intermediates", {}))
    return {
        path.removesuffix("/attention"): p for path, (p, *_) in intermediates.items() if path.endswith("/attention")
    }


@partial(jax.jit, static_argnames="model")
def compute_maps(model: Classifier, variables: Variables, images: Images) -> dict[str, Array]:
    return _sown(model.apply(variables, images, mutable="intermediates")[1])
