"""Parameters and multiply-adds of a model, computed from its shapes without running it."""

import re
import sys
from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from smallvit import kernels
from smallvit.catalogue import FILE, Entry
from smallvit.common.files import write_bytes
from smallvit.common.text import as_csv
from smallvit.ops import Size, pair
from smallvit.registry import create_model, list_models, preset


def describe(name: str, *, image_size: Size | None = None, num_classes: int = 1000) -> Entry:
    """The catalogue entry of a registered model at an image size, by default the preset's."""
    cls, fields = preset(name)
    size = fields["image_size"] if image_size is None else image_size
    model = create_model(name, num_classes=num_classes, image_size=size)
    paper = re.search(r"https://[^\s)]+", sys.modules[cls.__module__].__doc__ or "")
    variables = _shapes(model, size, 3)
    return Entry(
        name=name,
        cls=cls.__name__,
        paper=paper[0] if paper else "",
        image_size=pair(size),
        parameters=_size(variables),
        multiply_adds=_cost(model, variables, size, 3),
    )


def write_catalogue() -> None:
    """Stores the entries of all models, so that `smallvit models` does not compute them."""
    rows: list[list[Any]] = [["name", "class", "paper", "image_size", "parameters", "multiply_adds"]]
    for entry in map(describe, list_models()):
        rows.append([*entry[:3], "x".join(map(str, entry.image_size)), entry.parameters, entry.multiply_adds])
    write_bytes(FILE, f"# Made by: python -m smallvit.count\n{as_csv(rows)}".encode())


def parameters(model: nn.Module, image_size: Size, channels: int = 3) -> int:
    """The number of trainable parameters."""
    return _size(_shapes(model, image_size, channels))


def multiply_adds(model: nn.Module, image_size: Size, channels: int = 3) -> int:
    """Multiply-adds of the matrix products and convolutions in the forward pass of one image."""
    return _cost(model, _shapes(model, image_size, channels), image_size, channels)


def _size(variables: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def _cost(model: nn.Module, variables: Any, image_size: Size, channels: int) -> int:
    # Papers count every token in every layer, which is what happens when the attention maps are recorded.
    apply = partial(model.apply, mutable="intermediates")
    with kernels.disabled():  # their products do not show up in the jaxpr
        jaxpr = jax.make_jaxpr(apply)(variables, _image(image_size, channels))
    return sum(_COSTS[eqn.primitive.name](eqn) for eqn in _equations(jaxpr.jaxpr) if eqn.primitive.name in _COSTS)


def _image(image_size: Size, channels: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *pair(image_size), channels), jnp.float32)


def _shapes(model: nn.Module, image_size: Size, channels: int) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), _image(image_size, channels))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All operations, including those inside of calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return prod(eqn.outvars[0].aval.shape) * prod(eqn.invars[0].aval.shape[axis] for axis in contracted)


def _convolution(eqn: Any) -> int:
    # Each output element reads one kernel: all axes except the output channels.
    kernel = eqn.invars[1].aval.shape
    outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return prod(eqn.outvars[0].aval.shape) * prod(kernel) // outputs


def _depthwise(eqn: Any) -> int:
    if eqn.params["name"] != "depthwise_sum":  # in ops.conv
        return 0
    kernel = eqn.invars[1].aval.shape
    return prod(eqn.outvars[0].aval.shape) * prod(kernel[:2])


_COSTS = {"dot_general": _dot, "conv_general_dilated": _convolution, "jit": _depthwise}


if __name__ == "__main__":
    write_catalogue()
