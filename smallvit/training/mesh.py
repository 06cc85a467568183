"""The mesh of devices: images are sharded over all of it, weights over its axis `fsdp`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

AXES = ("data", "fsdp")


def make_mesh(layout: str | None = None) -> Mesh:
    """A mesh from "data=4,fsdp=2"; without a layout, pure data parallelism."""
    devices = jax.device_count()
    sizes = {"data": devices, "fsdp": 1} if layout is None else {"data": 1, "fsdp": 1}
    for part in layout.split(",") if layout else ():
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh {layout!r} must look like data=4,fsdp=2")
        sizes[axis] = int(size)
    if sizes["data"] * sizes["fsdp"] != devices:
        raise ValueError(f"mesh {layout!r} is for {sizes['data'] * sizes['fsdp']} devices, but there are {devices}")
    return jax.make_mesh((sizes["data"], sizes["fsdp"]), AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def over_images(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(AXES))


def over_weights(mesh: Mesh, state: PyTree) -> PyTree:
    """Shards each array on its longest axis that `fsdp` divides; small arrays are replicated."""
    parts = mesh.shape["fsdp"]

    def sharding(leaf: Any) -> NamedSharding:
        axes = [axis for axis, length in enumerate(leaf.shape) if length % parts == 0]
        if parts == 1 or leaf.size < 1024 or not axes:
            return replicated(mesh)
        longest = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, "fsdp"))

    return jax.tree.map(sharding, state)


def on_mesh(mesh: Mesh, run: Callable[..., Any]) -> Callable[..., Any]:
    """Traces `run` for this mesh, so that its native kernels are sharded over it."""

    @wraps(run)
    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return run(*args)

    return traced


def shards_weights() -> bool:
    """Whether the code being traced is for a mesh over which weights are sharded."""
    return jax.sharding.get_abstract_mesh().shape.get("fsdp", 1) > 1


def spread(mesh: Mesh, size: int, rows: Callable[[slice], np.ndarray]) -> jax.Array:
    """An array over the mesh of which each process makes only its own rows."""
    shape = (size, *rows(slice(0, 0)).shape[1:])

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return rows(index[0])

    return jax.make_array_from_callback(shape, over_images(mesh), part)
