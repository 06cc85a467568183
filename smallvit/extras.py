"""Packages that only some need, by the extra that installs them."""

from importlib import import_module
from typing import Any


def need(package: str, purpose: str, extra: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ValueError(f"{purpose} needs {package}: pip install 'smallvit[{extra}]'") from None


def first_line(error: Exception) -> str:
    """What another package says is wrong, fit for a line of ours."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
