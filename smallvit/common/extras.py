"""Optional packages and the extras that install them."""

from importlib import import_module
from typing import Any

EXTRAS = {
    "onnx": ("jax2onnx", "onnx", "onnxruntime"),
    "serve": ("starlette", "uvicorn", "python_multipart"),
    "hub": ("huggingface_hub",),
    "keras": ("h5py",),
    "tensorboard": ("tensorboardX",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
}


def need(package: str, purpose: str) -> Any:
    """Imports and returns a package, or raises a ValueError that says how to install it."""
    try:
        return import_module(package)
    except ImportError:
        extra = extra_of(package)
        install = package if extra is None else f"'smallvit[{extra}]'"
        raise ValueError(f"{purpose} needs {package}: pip install {install}") from None


def extra_of(package: str) -> str | None:
    """The name of the extra that installs a package."""
    return next((name for name, packages in EXTRAS.items() if package in packages), None)


def first_line(error: Exception) -> str:
    """The first line of another package's error message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
