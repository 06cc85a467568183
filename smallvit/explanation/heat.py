"""One saliency map per image: attention rollout, or Grad-CAM."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Integer

from smallvit.explanation.maps import unit_range
from smallvit.explanation.trace import Seen, Variables, compute_maps, token_grid, watch
from smallvit.layers import Classifier
from smallvit.ops import Images


def saliency(
    model: Classifier, variables: Variables, images: Images, target: Integer[np.ndarray, " b"] | int | None = None
) -> Float[np.ndarray, "b H W"]:
    """How much each place matters for the prediction, from 0 to 1 in each image, as one block of pixels per token.

    Uses attention rollout if every layer has global attention, else Grad-CAM (https://arxiv.org/abs/1610.02391) on the
    last grid of tokens that the prediction depends on, for the class `target` or the predicted one. Rollout is not
    specific to a class: it shows what the model attends to.
    """
    seen = watch(model, variables, images)
    size = images.shape[1], images.shape[2]
    if seen.all_read_all:
        prefix, grid = token_grid(seen.tokens, seen.grid or size)
        maps = jax.device_get(compute_maps(model, variables, images))
        heat = rollout(_layers({path: maps[path] for path in seen.maps}, seen.tokens), prefix)
        heat = heat.reshape(-1, *grid)
    else:
        heat = _grad_cam(model, variables, images, target, seen)
    large = jax.image.resize(heat, (heat.shape[0], *size), "nearest")
    return unit_range(np.asarray(large))


def rollout(maps: Sequence[Float[np.ndarray, "b _ n n"]], prefix: int) -> Float[np.ndarray, "b g"]:
    """How much each token of the grid contributes to the prediction (https://arxiv.org/abs/2005.00928).

    Each block passes on half of what its attention reads, averaged over heads, and half of the token itself. The
    prediction is read from the class token if there is one, `prefix=1`, else from the mean of all tokens.
    """
    total = np.eye(maps[0].shape[-1], dtype=np.float32)[None]
    for layer in maps:
        mixed = layer.mean(axis=1) + np.eye(layer.shape[-1], dtype=np.float32)
        total = mixed / mixed.sum(axis=-1, keepdims=True) @ total
    answer = total[:, 0] if prefix else total.mean(axis=1)
    return answer[:, prefix:]


def _layers(maps: dict[str, np.ndarray], tokens: int) -> list[Float[np.ndarray, "b 1 n n"]]:
    """Prepares maps for rollout: one map of all tokens per block.

    Branches are averaged; tokens that a block does not update attend to themselves.
    """
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
    model: Classifier, variables: Variables, images: Images, target: np.ndarray | int | None, seen: Seen
) -> Float[Array, "b h w"]:
    if not model.num_classes:
        raise ValueError(
            "num_classes=0: a model without a head has no prediction to explain; create it with its classes"
        )
    wanted = np.broadcast_to(np.asarray(-1 if target is None else target, np.int32), images.shape[:1])
    if target is not None and not ((wanted >= 0) & (wanted < model.num_classes)).all():
        raise ValueError(f"target {target} must be a class, from 0 to {model.num_classes - 1}")
    shape = seen.grid or (images.shape[1], images.shape[2])
    parts = []
    for path, left in seen.parts.items():
        try:
            prefix, grid = token_grid(int(np.prod(left)), shape)
        except ValueError:  # not a grid, such as a single class token
            continue
        if len(left) == 1 or left == grid:
            parts.append((path, prefix, grid))
    # With mean pooling, all tokens count: the last grid is taken, or that of the last attention if a coarser one
    # follows. With a class token, the last layer that it reads from must be found.
    if model.pool == "mean":
        tokens = {path: np.prod(left) for path, left in seen.parts.items()}
        attended = tokens.get(list(seen.maps)[-1].split("/")[0]) if seen.maps else None
        parts = [part for part in parts if tokens[part[0]] == attended][-1:] or parts[-1:]
    for heat, reached in reversed(_cams(model, tuple(parts), variables, images, wanted)):
        if reached:
            return heat
    raise ValueError(f"no part of {type(model).__name__} has a grid of tokens that the prediction depends on")


@partial(jax.jit, static_argnames=("model", "parts"))
def _cams(
    model: Classifier,
    parts: tuple[tuple[str, int, tuple[int, int]], ...],
    variables: Variables,
    images: Images,
    target: Integer[Array, " b"] | Integer[np.ndarray, " b"],
) -> list[tuple[Float[Array, "b h w"], Array]]:
    """Grad-CAM after each of these parts, and whether the prediction depends on its grid tokens.

    Zeros are added to the output of a part from outside; their gradient is the gradient of the output.
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
            scores, _ = model.apply(variables, images, mutable="intermediates")  # runs all tokens through all layers
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
        # The paper keeps positive evidence only. If there is none, the weakest negative evidence is shown.
        heat = jnp.where(heat.max(axis=1, keepdims=True) > 0, jax.nn.relu(heat), heat)
        return rearrange(heat, "b (h w) -> b h w", h=grid[0]), (gradient != 0).any()

    return [cam(*part) for part in parts]
