"""Packages that only some need, by the extra that installs them."""

from importlib import import_module
from typing import Any


def need(package: str, purpose: str, extra: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ValueError(f"{purpose} needs {package}: pip install 'smallvit[{extra}]'") from None
