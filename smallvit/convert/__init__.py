"""Weights of other zoos, by table."""

from smallvit.convert.rules import Converted, Table, convert

__all__ = ["Converted", "Table", "convert"]
