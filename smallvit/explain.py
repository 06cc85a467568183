"""What a model looks at: its attention maps, and one map an image of what counts for the answer.

Nothing here knows an architecture by name. What its layers do is watched from outside, while it is applied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Integer

from smallvit.layers import SPT, Attend, Classifier, Images, PatchEmbed, PatchMerger, PositionEmbed, grid_size
from smallvit.paths import by_path

Variables = Mapping[str, Any]


def attention_maps(
    model: Classifier, variables: Variables, images: Images
) -> dict[str, Float[np.ndarray, "b *groups h n m"]]:
    """By the path of their layer and in the order of the computation; where attention is within windows, one a group.

    A map is as it leaves the softmax: how much each token n reads of each token m, a sum of 1 over m.
    """
    seen = _watch(model, variables, images)
    maps = jax.device_get(_maps(model, variables, images))
    return {path: maps[path] for path in seen.maps}


def saliency(
    model: Classifier, variables: Variables, images: Images, target: Integer[np.ndarray, " b"] | int | None = None
) -> Float[np.ndarray, "b H W"]:
    """What counts for the answer, from 0 to 1 in each image.

    Attention rollout where all tokens read all tokens throughout; else Grad-CAM (https://arxiv.org/abs/1610.02391) on
    the last grid of tokens that the answer depends on, for the class `target`, or the predicted one. Rollout has no
    class: it says what the model read.
    """
    seen = _watch(model, variables, images)
    size = images.shape[1], images.shape[2]
    if seen.all_read_all:
        prefix, grid = token_grid(seen.tokens, seen.grid or size)
        maps = jax.device_get(_maps(model, variables, images))
        heat = rollout(_layers({path: maps[path] for path in seen.maps}, seen.tokens), prefix)
        heat = heat.reshape(-1, *grid)
    else:
        heat = _grad_cam(model, variables, images, target, seen)
    large = jax.image.resize(heat, (heat.shape[0], *size), "linear", antialias=False)
    return unit_range(np.asarray(large))


def rollout(maps: Sequence[Float[np.ndarray, "b _ n n"]], prefix: int) -> Float[np.ndarray, "b g"]:
    """How much of each token of the grid reaches the answer (https://arxiv.org/abs/2005.00928).

    A block passes on half of what its attention reads, averaged over heads, and half of the token itself. The answer
    is read from the class token if there is one, `prefix=1`, else from the average of all.
    """
    total = np.eye(maps[0].shape[-1], dtype=np.float32)[None]
    for layer in maps:
        mixed = layer.mean(axis=1) + np.eye(layer.shape[-1], dtype=np.float32)
        total = mixed / mixed.sum(axis=-1, keepdims=True) @ total
    answer = total[:, 0] if prefix else total.mean(axis=1)
    return answer[:, prefix:]


def temperatures(model: Classifier, variables: Variables, images: Images) -> dict[str, Float[np.ndarray, " h"]]:
    """What LSA has learned, by layer and head, as multiples of the scale it started from, dim_head ** -0.5.

    Above 1, attention is sharper than without LSA. Layers without a learned temperature are left out.
    """
    params = by_path(variables["params"])
    scales = _watch(model, variables, images).scales
    found = {path: (f"{path}/temperature", scale) for path, scale in scales.items()}
    return {path: np.asarray(params[name]) / scale for path, (name, scale) in found.items() if name in params}


def attention_entropy(
    maps: Mapping[str, Float[np.ndarray, "b *groups h n m"]],
) -> dict[str, Float[np.ndarray, " h"]]:
    """By layer and head, in nats, averaged over images and tokens: 0 reads one token, log(m) reads all m alike."""

    def entropy(p: np.ndarray) -> np.ndarray:
        p_log_p = p * np.log(np.where(p > 0, p, 1))
        return -_by_head(p_log_p.sum(axis=-1))

    return {path: entropy(p) for path, p in maps.items()}


def attention_distance(
    maps: Mapping[str, Float[np.ndarray, "b h n n"]], grid: tuple[int, int]
) -> dict[str, Float[np.ndarray, " h"]]:
    """By layer and head: how far, in tokens of the grid, a token's attention goes on average.

    A class token before the grid is left out, as a reader and as read.
    """
    rows, columns = np.mgrid[: grid[0], : grid[1]].reshape(2, -1)
    distance = np.hypot(rows[:, None] - rows, columns[:, None] - columns).astype(np.float32)

    def mean_distance(path: str, p: np.ndarray) -> np.ndarray:
        n, m = p.shape[-2:]
        prefix = m - distance.shape[0]
        if n != m or prefix not in (0, 1):
            raise ValueError(
                f"{path} has maps of {n} x {m}: they are not of all tokens of a grid {grid[0]} x {grid[1]}"
            )
        p = p[..., prefix:, prefix:]
        return _by_head((p * distance).sum(axis=-1) / np.maximum(p.sum(axis=-1), 1e-12))

    return {path: mean_distance(path, p) for path, p in maps.items()}


def class_attention(
    model: Classifier, variables: Variables, images: Images
) -> dict[str, Float[np.ndarray, "b heads h w"]]:
    """By layer and head: how much the class token reads of each place; without one, how much all tokens do on average.

    Only of the `global_layers`.
    """
    maps = jax.device_get(_maps(model, variables, images))
    found = {}
    for path, (prefix, grid) in global_layers(model, variables, images).items():
        read = maps[path][:, :, 0, prefix:] if prefix or maps[path].shape[2] == 1 else maps[path].mean(axis=2)
        found[path] = read.reshape(*read.shape[:2], *grid)
    return found


def global_layers(model: Classifier, variables: Variables, images: Images) -> dict[str, tuple[int, tuple[int, int]]]:
    """The layers in which all tokens of a grid are read at once, with `token_grid` of each; nothing is computed."""
    seen = _watch(model, variables, images)
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


@dataclass(frozen=True)
class LayerAttention:
    path: str
    initial: float  # sqrt(dim_head): what logits are divided by without LSA, and with it before any learning
    temperature: Float[np.ndarray, " h"] | None  # the learned one; below `initial`, attention is sharper
    entropy: Float[np.ndarray, " h"]  # in nats
    even: float  # the entropy of reading all tokens alike
    distance: Float[np.ndarray, " h"] | None  # in tokens of the layer's grid; None where tokens read within groups


def attention_by_layer(model: Classifier, variables: Variables, images: Images) -> list[LayerAttention]:
    """How sharp and how local each layer is: learned temperatures, entropy and distance of its heads."""
    seen = _watch(model, variables, images)
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


@dataclass(frozen=True)
class ReceptiveField:
    """What one token sees of the image before the first block."""

    token: tuple[int, int]  # its place in the grid
    grid: tuple[int, int]
    heat: Float[np.ndarray, "H W"]  # how much the token depends on each pixel, from 0 to 1
    measured: tuple[int, int]  # height and width of where that is not 0
    theory: tuple[int, int] | None  # the patch, with SPT and its shifts on both sides; None where no patches are cut


def receptive_field(
    model: Classifier, variables: Variables, images: Images, token: tuple[int, int] | None = None
) -> ReceptiveField:
    """Of the token in the middle, or of the one at this row and column, averaged over the images.

    The heat is the absolute gradient of the embedded token by the image, summed over channels and features.
    """
    seen = _watch(model, variables, images)
    path = seen.embedding or next(iter(seen.parts), None)
    if path is None:
        raise ValueError(f"{type(model).__name__} has no first layer that makes tokens")
    tokens = int(np.prod(seen.parts[path])) if path in seen.parts else int(np.prod(seen.grid or ()))
    prefix, grid = token_grid(tokens, seen.grid or (images.shape[1], images.shape[2]))
    row, column = token or (grid[0] // 2, grid[1] // 2)
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(f"token {row}, {column} is not in the grid of {grid[0]} x {grid[1]}, which starts at 0, 0")
    heat = np.asarray(_reach(model, path, prefix + row * grid[1] + column, variables, images))
    rows, columns = np.flatnonzero(heat.any(axis=1)), np.flatnonzero(heat.any(axis=0))
    measured = (int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1) if rows.size else (0, 0)
    return ReceptiveField((row, column), grid, heat / max(heat.max(), 1e-30), measured, seen.sees)


@partial(jax.jit, static_argnames=("model", "path", "index"))
def _reach(model: Classifier, path: str, index: int, variables: Variables, images: Images) -> Float[Array, "H W"]:
    def token(images: Array) -> Float[Array, "b d"]:
        kept: dict[str, Array] = {}

        def keep(call: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            out = call(*args, **kwargs)
            if context.method_name == "__call__" and "/".join(context.module.path) == path:
                kept.setdefault(path, out)
            return out

        with nn.intercept_methods(keep):
            model.apply(variables, images)  # what comes after the token is not computed
        return kept[path].reshape(images.shape[0], -1, kept[path].shape[-1])[:, index]

    out, pull = jax.vjp(token, jnp.asarray(images))

    def add(heat: Array, feature: Array) -> tuple[Array, None]:
        (gradient,) = pull(jnp.broadcast_to(feature[None], out.shape))
        return heat + jnp.abs(gradient.astype(jnp.float32)).sum(axis=(0, 3)), None

    return jax.lax.scan(add, jnp.zeros(images.shape[1:3]), jnp.eye(out.shape[-1], dtype=out.dtype))[0]


def token_grid(tokens: int, shape: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """How many tokens, none or one, stand before the grid, and the grid.

    It is the one most like `shape`, the height and width of the image or of an earlier grid.
    """
    grids = [
        (prefix, (h, (tokens - prefix) // h))
        for prefix in (0, 1)
        for h in range(1, tokens - prefix + 1)
        if (tokens - prefix) % h == 0 and tokens - prefix > 1
    ]
    best = min(grids, key=lambda found: _misfit(found[1], shape), default=None)
    if best is None or _misfit(best[1], shape) > _MISFIT:
        raise ValueError(f"{tokens} tokens do not fill a grid that is shaped like {shape[0]} x {shape[1]}")
    return best


# Rounded halves change the shape: 5 x 8 becomes 3 x 4, then 2 x 2. What is as far off as 1 x 2 is no grid of a square.
_MISFIT = log(1.9)


def _misfit(grid: tuple[int, int], shape: tuple[int, int]) -> float:
    return abs(log(grid[0] * shape[1] / (grid[1] * shape[0])))


def unit_range(heat: Float[np.ndarray, "b H W"]) -> Float[np.ndarray, "b H W"]:
    """Each map from 0, its least, to 1, its most; all 0 where it is flat."""
    low, high = heat.min(axis=(1, 2), keepdims=True), heat.max(axis=(1, 2), keepdims=True)
    return (heat - low) / np.where(high > low, high - low, 1)


@dataclass
class _Seen:
    """What an application of a model shows, without computing it."""

    maps: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the shapes, by path, in order
    scales: dict[str, float] = field(default_factory=dict)  # of each attention, before any learning
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # what leaves them, (n,) or (h, w), in order
    grid: tuple[int, int] | None = None  # of the first tokens, where a layer knows it
    embedding: str | None = None  # the first layer that cuts the image into patches,
    sees: tuple[int, int] | None = None  # and height and width of what a token of it sees
    tokens: int = 0  # of the features

    @property
    def all_read_all(self) -> bool:
        """Or, before there is a class token, all others do; or the class token alone reads all."""
        n = self.tokens
        return all(len(shape) == 4 and shape[2:] in ((n, n), (n - 1, n - 1), (1, n)) for shape in self.maps.values())


_watched: dict[tuple[Any, ...], _Seen] = {}


def _watch(model: Classifier, variables: Variables, images: Images) -> _Seen:
    """Once for each model and shape: tracing takes far longer than computing a small model's maps."""
    key = model, images.shape, images.dtype
    if key not in _watched:
        _watched[key] = _trace(model, variables, images)
    return _watched[key]


def _trace(model: Classifier, variables: Variables, images: Images) -> _Seen:
    seen, merged = _Seen(), False

    def watch(call: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        nonlocal merged
        out, module, path = call(*args, **kwargs), context.module, "/".join(context.module.path)
        if not module.path and context.method_name == "read":
            seen.tokens = out.shape[1]
        if context.method_name != "__call__" or not isinstance(out, jax.Array):
            return out
        if isinstance(module, Attend):
            seen.scales[path] = module.first_scale(kwargs["heads"], *args)
        if isinstance(module, PatchEmbed | SPT):
            seen.grid = seen.grid or grid_size(args[0].shape[1:3], module.patch_size)
            if seen.embedding is None and args[0].shape == images.shape:
                seen.embedding, seen.sees = path, module.sees
        if isinstance(module, PositionEmbed):
            seen.grid = seen.grid or module.grid
        merged = merged or isinstance(module, PatchMerger)  # its tokens have no place in the image
        if len(module.path) == 1 and out.ndim in (3, 4) and not merged:
            seen.parts[path] = out.shape[1:-1]
        return out

    def apply(variables: Variables, images: Array) -> None:
        with nn.intercept_methods(watch):
            _, state = model.apply(variables, images, mutable="intermediates")
        # Here, since what leaves a traced function has its keys sorted: block_10 before block_2.
        seen.maps.update({path: p.shape for path, p in _sown(state).items()})

    jax.eval_shape(apply, variables, jax.ShapeDtypeStruct(images.shape, images.dtype))
    return seen


def _sown(state: Any) -> dict[str, Array]:
    found = by_path(state.get("intermediates", {}))
    return {path.removesuffix("/attention"): p for path, (p, *_) in found.items() if path.endswith("/attention")}


@partial(jax.jit, static_argnames="model")
def _maps(model: Classifier, variables: Variables, images: Images) -> dict[str, Array]:
    return _sown(model.apply(variables, images, mutable="intermediates")[1])


def _layers(maps: dict[str, np.ndarray], tokens: int) -> list[Float[np.ndarray, "b 1 n n"]]:
    """For rollout: one map of all tokens a block. Branches are averaged, idle tokens keep to themselves."""
    blocks: dict[str, list[np.ndarray]] = {}
    for path, p in maps.items():
        blocks.setdefault(path.split("/")[0], []).append(p.mean(axis=1))
    layers = []
    for branches in blocks.values():
        p = np.mean(branches, axis=0)
        whole = np.tile(np.eye(tokens, dtype=p.dtype), (len(p), 1, 1, 1))
        first = 1 if p.shape[-1] < tokens else 0
        whole[:, 0, first : first + p.shape[1], first:] = p
        layers.append(whole)
    return layers


def _grad_cam(
    model: Classifier, variables: Variables, images: Images, target: np.ndarray | int | None, seen: _Seen
) -> Float[Array, "b h w"]:
    if not model.num_classes:
        raise ValueError("num_classes=0: a model without a head gives no answer to explain, make it with its classes")
    wanted = np.broadcast_to(np.asarray(-1 if target is None else target, np.int32), images.shape[:1])
    if target is not None and not ((wanted >= 0) & (wanted < model.num_classes)).all():
        raise ValueError(f"target {target} must be a class, from 0 to {model.num_classes - 1}")
    shape = seen.grid or (images.shape[1], images.shape[2])
    parts = []
    for path, left in seen.parts.items():
        try:
            prefix, grid = token_grid(int(np.prod(left)), shape)
        except ValueError:  # not a grid, such as a class token alone
            continue
        if len(left) == 1 or left == grid:
            parts.append((path, prefix, grid))
    # Of an average all tokens count; before a class token, the last that it has read are to be found.
    parts = parts[-1:] if model.pool == "mean" else parts
    for heat, reached in reversed(_cams(model, tuple(parts), variables, images, wanted)):
        if reached:
            return heat
    raise ValueError(f"no part of {type(model).__name__} has its tokens on a grid that the answer depends on")


@partial(jax.jit, static_argnames=("model", "parts"))
def _cams(
    model: Classifier,
    parts: tuple[tuple[str, int, tuple[int, int]], ...],
    variables: Variables,
    images: Images,
    target: Integer[Array, " b"] | Integer[np.ndarray, " b"],
) -> list[tuple[Float[Array, "b h w"], Array]]:
    """Grad-CAM after each of these parts of the model, and whether the answer depends on its tokens of the grid.

    A part's output is reached from outside: something that is zero is added to it, and has the output's gradient.
    """
    outputs: dict[str, Array] = {}

    def score(added: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        def add(call: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            out, path = call(*args, **kwargs), "/".join(context.module.path)
            if context.method_name != "__call__" or path not in paths:
                return out
            outputs[path] = out
            return out + added[path] if path in added else out

        with nn.intercept_methods(add):
            scores, _ = model.apply(variables, images, mutable="intermediates")  # then all tokens go all the way
        assert isinstance(scores, jax.Array)
        chosen = jnp.where(target < 0, scores.argmax(axis=-1).astype(target.dtype), target)
        return jnp.take_along_axis(scores, chosen[:, None], axis=-1).sum(), dict(outputs)

    paths = {path for path, _, _ in parts}
    shapes = jax.eval_shape(lambda: score({})[1])
    zeros = {path: jnp.zeros(shape.shape, shape.dtype) for path, shape in shapes.items()}
    gradients, outputs_ = jax.grad(score, has_aux=True)(zeros)

    def cam(path: str, prefix: int, grid: tuple[int, int]) -> tuple[Array, Array]:
        tokens, gradient = (
            x.reshape(x.shape[0], -1, x.shape[-1])[:, prefix:].astype(jnp.float32)
            for x in (outputs_[path], gradients[path])
        )
        heat = jnp.einsum("bnd,bd->bn", tokens, gradient.mean(axis=1))
        # The paper keeps what speaks for the class; where nothing does, what speaks least against it is shown.
        heat = jnp.where(heat.max(axis=1, keepdims=True) > 0, jax.nn.relu(heat), heat)
        return rearrange(heat, "b (h w) -> b h w", h=grid[0]), (gradient != 0).any()

    return [cam(*part) for part in parts]


def _by_head(x: Float[np.ndarray, "b *groups h n"]) -> Float[np.ndarray, " h"]:
    return x.mean(axis=tuple(axis for axis in range(x.ndim) if axis != x.ndim - 2))
