"""Conversion of another zoo's weights: a table maps module names to our paths, and a kind converts their arrays.

A table maps a module of the source, such as `blocks.{}.attn.qkv`, to one of our paths and a kind,
`("block_{}/attention/qkv", dense)`. `{}` stands for a number and is carried over. The kind is called for each array of
the module and returns the converted arrays, keyed by the end of our path. An entry that is an array itself, such as
`cls_token`, has an empty leaf. Where several source arrays form one of ours, each is keyed by its part, "kernel@0",
"kernel@1", and the parts are concatenated on the last axis.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]  # shapes of our parameters, by path
Kind = Callable[[str, np.ndarray, str, Shapes], dict[str, np.ndarray]]
Table = Mapping[str, tuple[str, Kind]]


class Converted(NamedTuple):
    arrays: dict[str, np.ndarray]  # keyed by our path, "params/..." or "batch_stats/..."
    left_over: list[str]  # source names that no entry of the table matches


def convert(state: Mapping[str, np.ndarray], table: Table, shapes: Shapes) -> Converted:
    """Converts the source's arrays to our paths and collects the names that match no entry."""
    patterns = {re.compile(re.escape(name).replace(r"\{\}", r"(\d+)")): entry for name, entry in table.items()}
    arrays, left_over = {}, []
    for name, array in state.items():
        for module, leaf in ((name, ""), tuple(name.rpartition(".")[::2])):
            found = next(((m, entry) for p, entry in patterns.items() if (m := p.fullmatch(module))), None)
            if found:
                match, (path, kind) = found
                path = "params/" + path.format(*match.groups())
                arrays |= {_join(path, end): a for end, a in kind(leaf, array, path, shapes).items()}
                break
        else:
            left_over.append(name)
    return Converted(_join_parts(arrays), left_over)


def _join_parts(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    whole = {path: array for path, array in arrays.items() if "@" not in path}
    parts: dict[str, list[np.ndarray]] = {}
    for path in sorted(arrays.keys() - whole.keys()):
        parts.setdefault(path.partition("@")[0], []).append(arrays[path])
    return whole | {path: np.concatenate(several, axis=-1) for path, several in parts.items()}


def _join(path: str, end: str) -> str:
    """Joins path and ending; an ending such as "batch_stats:mean" moves the array to another collection."""
    collection, _, leaf = end.rpartition(":")
    path = f"{collection}/{path.removeprefix('params/')}" if collection else path
    return f"{path}/{leaf}" if leaf else path


def dense(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"kernel": array.T} if leaf == "weight" else {"bias": array}


def dense_part(number: int) -> Kind:
    """One of several projections that we join into one, such as keys and values."""
    return lambda *given: {f"{end}@{number}": array for end, array in dense(*given).items()}


def norm(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"scale" if leaf == "weight" else "bias": array}


def patch_conv(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Converts a convolution with stride equal to kernel size to our Dense over flattened patches."""
    if leaf == "bias":
        return {"bias": array}
    return {"kernel": array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])}


def conv(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"kernel": array.transpose(2, 3, 1, 0)} if leaf == "weight" else {"bias": array}


def batch_norm(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Moves the running moments to `batch_stats` and drops the count of batches."""
    ends = {"weight": "scale", "running_mean": "batch_stats:mean", "running_var": "batch_stats:var"}
    return {} if leaf == "num_batches_tracked" else {ends.get(leaf, leaf): array}


def same(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Keeps the array, without the leading axes of length 1 that our shape does not have."""
    if not array.size:
        return {}  # vit-pytorch's class token in a model without one
    wanted = shapes.get(path, array.shape)
    return {"": array.reshape(array.shape[max(array.ndim - len(wanted), 0) :])}


def positions(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Splits a row of positions into the prefix and the grid, which is square unless our shape says otherwise."""
    table, prefix = array.reshape(-1, array.shape[-1]), shapes.get(f"{path}/prefix", (0,))[0]
    h, w = shapes[f"{path}/grid"][:2]
    if prefix + h * w != len(table):
        h = w = round((len(table) - prefix) ** 0.5)
    grid = table[prefix : prefix + h * w].reshape(h, w, -1)
    return {"prefix": table[:prefix], "grid": grid} if prefix else {"grid": grid}


def position_planes(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Converts positions stored as a channels-first image."""
    return {"grid": array[0].transpose(1, 2, 0)}
