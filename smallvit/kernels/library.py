"""The compiled library: found, loaded, its handlers made known to XLA; or why not."""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

PATH = Path(__file__).with_name("libsmallvit_kernels.so")
VARIABLE = "SMALLVIT_KERNELS"  # avx512, avx2, portable: this instruction set; 0: off; unset: the best there is

_HANDLERS = (
    "attention_forward",
    "attention_backward",
    "packed_forward",
    "packed_backward",
    "mixed_forward",
    "mixed_backward",
    "norm_forward",
    "norm_backward",
    "batch_forward",
    "batch_backward",
    "gelu_forward",
    "gelu_backward",
    "transpose",
    "unfold",
    "fold",
    "dense",
    "dense_gelu",
    "dense_gradient",
    "conv",
    "conv_gradient",
    "depthwise",
    "depthwise_gradient",
)

# jax traces anew when it changes: a function that was traced before does not bring its kernels along.
_off = jax.make_user_context(False)


@dataclass(frozen=True)
class Status:
    """Whether the native kernels are there, and with which instruction set, or why not."""

    path: Path
    instruction_set: str | None
    reason: str | None = None

    def __str__(self) -> str:
        if self.instruction_set is None:
            return f"native kernels: not in use, {self.reason}"
        return f"native kernels: {self.instruction_set}, {self.path}"


class _Unusable(Exception):
    pass


@cache
def _library(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise _Unusable("not built (python -m smallvit.kernels.build)")
    try:
        library = ctypes.CDLL(str(path))
        library.smallvit_choose.restype = ctypes.c_char_p
        library.smallvit_choose.argtypes = [ctypes.c_char_p]
        library.smallvit_has_bfloat16.restype = ctypes.c_bool
        for name in _HANDLERS:
            handler = jax.ffi.pycapsule(getattr(library, f"smallvit_{name}"))
            jax.ffi.register_ffi_target(f"smallvit_{name}", handler, platform="cpu")
    except Exception as error:  # built for another system, another jaxlib, or an older version of this package
        raise _Unusable(f"{path.name} does not load: {str(error).splitlines()[0]}") from error
    return library


def choose(name: str) -> str | None:
    """Uses this instruction set from now on, the best one for ""; None if the CPU has no such one."""
    found = _library(PATH).smallvit_choose(name.encode())
    return None if found is None else found.decode()


@cache
def has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 numbers itself, as XLA makes use of."""
    return bool(_library(PATH).smallvit_has_bfloat16())


@cache
def status() -> Status:
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "0":
        return Status(PATH, None, f"switched off by {VARIABLE}=0")
    try:
        found = choose(wanted)
    except _Unusable as error:
        return Status(PATH, None, str(error))
    return Status(PATH, found, None if found else f"this CPU has no instruction set {VARIABLE}={wanted}")


def usable() -> bool:
    """Whether what is traced now may contain native kernels.

    Not with several devices: XLA does not know how to divide a foreign function, and each would compute everything.
    """
    found = status().instruction_set is not None
    return not _off.value and found and jax.default_backend() == "cpu" and jax.device_count() == 1


@contextmanager
def disabled() -> Iterator[None]:
    """No native kernels in what is traced within, such as a program that is exported to other machines."""
    with _off(True):
        yield


def some(*shape: int) -> bool:
    """Whether there is anything to do, and it is known how much: a symbolic size is no int."""
    return all(isinstance(size, int) and size > 0 for size in shape)


def optional(x: jax.Array | None, axes: int) -> jax.Array:
    """A foreign function has no optional arguments: an array without elements stands for None."""
    return jnp.zeros((0,) * axes, jnp.float32) if x is None else x


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def call(
    name: str,
    results: list[jax.ShapeDtypeStruct],
    *args: jax.Array | np.ndarray,
    **attributes: bool | np.float32 | np.ndarray,
) -> Sequence[jax.Array]:
    """The results of one handler. Under vmap one call after the other."""
    if status().instruction_set is None:
        raise ValueError(f"{status()}: ask smallvit.kernels.usable() first")
    return jax.ffi.ffi_call(f"smallvit_{name}", results, vmap_method="sequential")(*args, **attributes)
