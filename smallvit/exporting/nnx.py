"""Conversion of our models to Flax NNX modules."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.bridge.variables import linen_vars_to_nnx_attrs

from smallvit.layers import Classifier


def to_nnx(model: Classifier, variables: Mapping[str, Any]) -> nnx.bridge.ToNNX:
    """Returns an NNX module with these variables that computes the same as `model.apply(variables, images)`."""
    module = nnx.bridge.ToNNX(model)
    # Not with `lazy_init`, which would run the model once to initialise weights that are replaced.
    for name, value in linen_vars_to_nnx_attrs(jax.tree.map(jnp.asarray, dict(variables))).items():
        setattr(module, name, nnx.data(value))
    return module
