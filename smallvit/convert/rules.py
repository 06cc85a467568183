"""How one zoo's weights become ours: a table from module names to paths, and a kind for each that turns the arrays.

A table maps a module of the source, `blocks.{}.attn.qkv`, to a path of ours and a kind,
`("block_{}/attention/qkv", dense)`; `{}` stands for a number and is carried over. A kind is called for each array of
the module and returns what becomes of it, by the ending of our path; an entry without modules below it, such as
`cls_token`, has the empty leaf. Where ours is one array and the source's are several, each gets the ending of its
part, "kernel@0", "kernel@1", and they are joined on the last axis.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]  # of our parameters, by path
Kind = Callable[[str, np.ndarray, str, Shapes], dict[str, np.ndarray]]
Table = Mapping[str, tuple[str, Kind]]


class Converted(NamedTuple):
    arrays: dict[str, np.ndarray]  # by our path, "params/..." or "batch_stats/..."
    left_over: list[str]  # names of the source that no entry of the table takes


def convert(state: Mapping[str, np.ndarray], table: Table, shapes: Shapes) -> Converted:
    """The source's arrays under our paths, and the names that found no place."""
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
    """A kind may leave params for another collection by an ending such as "batch_stats:mean"."""
    collection, _, leaf = end.rpartition(":")
    path = f"{collection}/{path.removeprefix('params/')}" if collection else path
    return f"{path}/{leaf}" if leaf else path


def dense(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"kernel": array.T} if leaf == "weight" else {"bias": array}


def dense_part(number: int) -> Kind:
    """One of the projections that ours makes in one, such as the first of keys and values."""
    return lambda *given: {f"{end}@{number}": array for end, array in dense(*given).items()}


def norm(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"scale" if leaf == "weight" else "bias": array}


def patch_conv(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """A convolution whose stride is its kernel is our Dense over flattened patches."""
    if leaf == "bias":
        return {"bias": array}
    return {"kernel": array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])}


def conv(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"kernel": array.transpose(2, 3, 1, 0)} if leaf == "weight" else {"bias": array}


def batch_norm(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Its running moments are no parameters, and the number of batches they were taken from is dropped."""
    ends = {"weight": "scale", "running_mean": "batch_stats:mean", "running_var": "batch_stats:var"}
    return {} if leaf == "num_batches_tracked" else {ends.get(leaf, leaf): array}


def same(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Taken over with its leading axes of length 1 dropped, as far as our shape asks for it."""
    if not array.size:
        return {}  # vit-pytorch's class token where there is none
    wanted = shapes.get(path, array.shape)
    return {"": array.reshape(array.shape[max(array.ndim - len(wanted), 0) :])}


def positions(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """A row of positions is cut into those before the grid and the grid itself, square unless ours says otherwise."""
    table, prefix = array.reshape(-1, array.shape[-1]), shapes.get(f"{path}/prefix", (0,))[0]
    h, w = shapes[f"{path}/grid"][:2]
    if prefix + h * w != len(table):
        h = w = round((len(table) - prefix) ** 0.5)
    grid = table[prefix : prefix + h * w].reshape(h, w, -1)
    return {"prefix": table[:prefix], "grid": grid} if prefix else {"grid": grid}


def position_planes(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Positions as an image, channels first."""
    return {"grid": array[0].transpose(1, 2, 0)}
