"""Our models as Flax NNX modules."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.bridge.variables import linen_vars_to_nnx_attrs

from smallvit.layers import Classifier


def to_nnx(model: Classifier, variables: Mapping[str, Any]) -> nnx.bridge.ToNNX:
    """An NNX module with these variables that computes what `model.apply(variables, images)` does."""
    module = nnx.bridge.ToNNX(model)
    # Set rather than found by `lazy_init`, which would compute the model once to make weights that are thrown away.
    for name, value in linen_vars_to_nnx_attrs(jax.tree.map(jnp.asarray, dict(variables))).items():
        setattr(module, name, nnx.data(value))
    return module
