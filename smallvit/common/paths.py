"""Conversion between nested variables, {"params": {"head": {"bias": x}}}, and flat ones, {"params/head/bias": x}."""

from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict


def by_path(variables: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flatten_dict(variables, sep="/"))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    return unflatten_dict(dict(flat), sep="/")
