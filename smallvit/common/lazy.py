"""Lazy imports of a package's public names, so that a light import does not load jax."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smallvit.common.extras import extra_of


def lazy(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for an `__init__.py` that imports its names under `if TYPE_CHECKING:`.

    Type checkers and editors read these imports; at run time a name is imported on first use. Submodules are lazy too:
    `smallvit.layers` works after `import smallvit`.
    """
    homes = {
        alias.asname or alias.name: node.module
        for block in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name in homes:
            value = getattr(_import(homes[name], f"{package}.{name}"), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}"):
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes})


def _import(module: str, purpose: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        raise ImportError(f"{purpose} needs {error.name}: pip install 'smallvit[{extra}]'") from None
