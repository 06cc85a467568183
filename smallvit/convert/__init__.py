"""Conversion of weights from other model zoos, one table per model."""

from smallvit.convert.rules import Converted, Table, convert

__all__ = ["Converted", "Table", "convert"]
