"""How large and how expensive a model is, found from its shapes without running it."""

import re
import sys
from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from smallvit import kernels
from smallvit.ops import Size, pair
from smallvit.registry import create_model, preset


class Description(NamedTuple):
    paper: str
    image_size: tuple[int, int]
    parameters: int
    multiply_adds: int
    spt: bool
    lsa: bool


def describe(name: str, *, image_size: Size | None = None, num_classes: int = 1000) -> Description:
    """What there is to know about a registered model at an image size, its own when none is given."""
    cls, fields = preset(name)
    size = fields["image_size"] if image_size is None else image_size
    model = create_model(name, num_classes=num_classes, image_size=size)
    paper = re.search(r"https://[^\s)]+", sys.modules[cls.__module__].__doc__ or "")
    return Description(
        paper=paper[0] if paper else "",
        image_size=pair(size),
        parameters=parameters(model, size),
        multiply_adds=multiply_adds(model, size),
        spt=hasattr(model, "spt"),
        lsa=hasattr(model, "lsa"),
    )


def parameters(model: nn.Module, image_size: Size, channels: int = 3) -> int:
    """The number of trained numbers."""
    return sum(leaf.size for leaf in jax.tree.leaves(_shapes(model, image_size, channels)["params"]))


def multiply_adds(model: nn.Module, image_size: Size, channels: int = 3) -> int:
    """Multiplications with an addition in the products and convolutions of one image's forward pass."""
    variables = _shapes(model, image_size, channels)
    # As papers count: every token to the end, which is how it goes when the maps are asked for.
    apply = partial(model.apply, mutable="intermediates")
    with kernels.disabled():  # whose products do not show
        jaxpr = jax.make_jaxpr(apply)(variables, _image(image_size, channels))
    return sum(_COSTS[eqn.primitive.name](eqn) for eqn in _equations(jaxpr.jaxpr) if eqn.primitive.name in _COSTS)


def _image(image_size: Size, channels: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *pair(image_size), channels), jnp.float32)


def _shapes(model: nn.Module, image_size: Size, channels: int) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), _image(image_size, channels))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All operations, those inside of calls too."""
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
    # Each output element reads one kernel: all of its axes but the one that numbers the outputs.
    kernel = eqn.invars[1].aval.shape
    outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return prod(eqn.outvars[0].aval.shape) * prod(kernel) // outputs


def _depthwise(eqn: Any) -> int:
    if eqn.params["name"] != "depthwise_sum":  # in ops.conv
        return 0
    kernel = eqn.invars[1].aval.shape
    return prod(eqn.outvars[0].aval.shape) * prod(kernel[:2])


_COSTS = {"dot_general": _dot, "conv_general_dilated": _convolution, "jit": _depthwise}
