"""Loads the compiled library and registers its handlers with XLA, or reports why it cannot."""

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
from jax.sharding import PartitionSpec

PATH = Path(__file__).with_name("libsmallvit_kernels.so")
VARIABLE = "SMALLVIT_KERNELS"  # avx512, avx2, portable: use this instruction set; 0: off; unset: the best available

# The handlers, with one letter per argument and result that says how it is sharded over devices. r: by the leading
# axis; c: by the last axis; w: replicated; m: replicated masks, which rows use in turn; s: each device has a sum over
# its rows, and the sums are added up; g: each device has a result of its own, and all are gathered on a new first axis;
# *: any number of replicated arrays, and each device computes everything.
_HANDLERS = {
    "attention_forward": "rrrwwm->rr",
    "attention_backward": "rrrwwmrr->rrrrs",
    "packed_forward": "rwwm->rr",
    "packed_backward": "rwwmrr->rrs",
    "mixed_forward": "rrrwmwwwww->rr",
    "mixed_backward": "rrrwmwwwwwrr->rrrrrrrrr",
    "norm_forward": "rww->r",
    "norm_backward": "rwr->rss",
    "column_moments": "r->g",
    "batch_forward": "rwwwwr->r",
    "batch_sums": "rwwrr->ss",
    "batch_backward": "rwwwrrww->rr",
    "gelu_forward": "rw->r",
    "gelu_backward": "rwr->rs",
    "transpose": "r->c",
    "unfold": "r->r",
    "fold": "r->r",
    "max_pool": "r->r",
    "max_pool_gradient": "rr->r",
    "batch_pool_forward": "rwwww->r",
    "batch_pool_sums": "rwwwwr->ss",
    "batch_pool_backward": "rwwwwrww->r",
    "dense": "rww->r",
    "dense_gelu": "rww->rr",
    "dense_gradient": "rr->ss",
    "conv": "rw->r",
    "conv_gradient": "rr->s",
    "depthwise": "rw->r",
    "depthwise_gradient": "rr->s",
    "clip": "*->*",
    "weighted_sums": "*->*",
    "adam": "*->*",
    "muon": "*->*",
}

# jax retraces when it changes, so that a function traced before does not keep its kernels.
_off = jax.make_user_context(False)


@dataclass(frozen=True)
class Status:
    """The instruction set of the native kernels, or why they are not in use."""

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
        raise _Unusable(f"{path.name} cannot be loaded: {str(error).splitlines()[0]}") from error
    return library


def choose(name: str) -> str | None:
    """Selects an instruction set, the best one for "", and returns its name; None if the CPU does not have it."""
    found = _library(PATH).smallvit_choose(name.encode())
    return None if found is None else found.decode()


@cache
def has_bfloat16() -> bool:
    """Whether the CPU has bfloat16 instructions, which XLA uses."""
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
    """Whether the code being traced may contain native kernels.

    With several devices, only if a mesh is set (`jax.set_mesh`), over which the calls are sharded: XLA cannot shard a
    foreign function itself, and each device would compute everything.
    """
    found = status().instruction_set is not None
    one = jax.device_count() == 1 or not jax.sharding.get_abstract_mesh().empty
    return not _off.value and found and jax.default_backend() == "cpu" and one


@contextmanager
def disabled() -> Iterator[None]:
    """Within this context, traced code has no native kernels, as in a program exported to other machines."""
    with _off(True):
        yield


def some(*shape: int) -> bool:
    """Whether all sizes are known and positive; a symbolic size is not an int."""
    return all(isinstance(size, int) and size > 0 for size in shape)


def optional(x: jax.Array | None, axes: int) -> jax.Array:
    """Replaces None by an empty array, since a foreign function has no optional arguments."""
    return jnp.zeros((0,) * axes, jnp.float32) if x is None else x


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def call(
    name: str,
    results: list[jax.ShapeDtypeStruct],
    *args: jax.Array | np.ndarray,
    **attributes: bool | np.float32 | np.int64 | np.ndarray,
) -> Sequence[jax.Array]:
    """Calls a handler; each device computes its rows. Under vmap, calls are sequential."""
    _check()
    mesh = jax.sharding.get_abstract_mesh()
    arguments, _, returns = _HANDLERS[name].partition("->")
    if mesh.size < 2 or mesh.manual_axes or not _divides(mesh.size, arguments, args):
        found = zip(_call(name, results, args, attributes), returns, strict=True)
        return [each[None] if kind == "g" else each for each, kind in found]
    local = [_part(result, kind, mesh.size) for result, kind in zip(results, returns, strict=True)]

    def run(*args: jax.Array | np.ndarray) -> tuple[jax.Array, ...]:
        join = {"s": jax.lax.psum, "g": jax.lax.all_gather}
        found = zip(_call(name, local, args, attributes), returns, strict=True)
        return tuple(join[kind](each, mesh.axis_names) if kind in join else each for each, kind in found)

    specs = {"r": PartitionSpec(mesh.axis_names), "c": PartitionSpec(None, mesh.axis_names)}
    ins, outs = (tuple(specs.get(kind, PartitionSpec()) for kind in kinds) for kinds in (arguments, returns))
    return jax.shard_map(run, in_specs=ins, out_specs=outs, check_vma=False)(*args)


def call_whole(
    name: str,
    results: list[jax.ShapeDtypeStruct],
    args: Sequence[jax.Array | np.ndarray],
    attributes: dict[str, np.float64 | np.int64 | np.ndarray],
    overwrite: dict[int, int],
) -> Sequence[jax.Array]:
    """Calls a handler for any number of replicated arrays; each device computes everything.

    `overwrite` maps arguments to the results that use their memory, unless the arguments are needed later.
    """
    _check()
    return _call(name, results, args, attributes, overwrite)


def _check() -> None:
    if status().instruction_set is None:
        raise ValueError(f"{status()}: check smallvit.kernels.usable() first")


def _call(
    name: str,
    results: list[jax.ShapeDtypeStruct],
    args: Sequence,
    attributes: dict,
    overwrite: dict[int, int] | None = None,
) -> Sequence[jax.Array]:
    run = jax.ffi.ffi_call(f"smallvit_{name}", results, vmap_method="sequential", input_output_aliases=overwrite)
    return run(*args, **attributes)


def _divides(parts: int, kinds: str, args: Sequence[jax.Array | np.ndarray]) -> bool:
    """Whether all devices get the same number of rows, and the right masks for them."""
    rows = len(args[0])
    maps = [len(arg) for arg, kind in zip(args, kinds, strict=True) if kind == "m"]
    return rows % parts == 0 and all(rows // parts % number == 0 for number in maps if number)


def _part(result: jax.ShapeDtypeStruct, kind: str, parts: int) -> jax.ShapeDtypeStruct:
    shape = list(result.shape)
    if kind in "rc":
        shape[0 if kind == "r" else -1] //= parts
    return jax.ShapeDtypeStruct(shape, result.dtype)
