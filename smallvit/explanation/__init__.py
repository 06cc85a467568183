"""Explanations of a model: attention maps, saliency, attention statistics, receptive fields, and pictures of them.

Nothing here knows an architecture by name: the layers are observed from outside while the model is applied.
"""

from smallvit.explanation.field import ReceptiveField, receptive_field
from smallvit.explanation.heat import rollout, saliency
from smallvit.explanation.maps import attention_maps, class_attention, global_layers, unit_range
from smallvit.explanation.statistics import (
    LayerAttention,
    attention_by_layer,
    attention_distance,
    attention_entropy,
    temperatures,
)
from smallvit.explanation.trace import token_grid

__all__ = [
    "LayerAttention",
    "ReceptiveField",
    "attention_by_layer",
    "attention_distance",
    "attention_entropy",
    "attention_maps",
    "class_attention",
    "global_layers",
    "receptive_field",
    "rollout",
    "saliency",
    "temperatures",
    "token_grid",
    "unit_range",
]
