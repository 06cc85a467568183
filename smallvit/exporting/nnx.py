"""Our models as Flax NNX modules."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.bridge.variables import linen_vars_to_nnx_attrs

from smallvit.layers import Classifier


def to_nnx(model: Classifier, variables: Mapping[str, Any]) -> nnx.bridge.ToNNX:
    """An NNX module with these variables that computes the same as `model.apply(variables, images)`."""
    module = nnx.bridge.ToNNX(model)
    # Not by `lazy_init`, which would run the model once and initialise weights that are thrown away.
    for name, value in linen_vars_to_nnx_attrs(jax.tree.map(jnp.asarray, dict(variables))).items():
        setattr(module, name, nnx.data(value))
    return module
