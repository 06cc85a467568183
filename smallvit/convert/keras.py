"""The table for the Keras example's ViT (https://keras.io/examples/vision/vit_small_ds/), and its weight files.

Keras numbers the layers of a type in the order of their creation; the first has no number. It also numbers the arrays
of a layer: kernel then bias, scale then bias.
"""

import re
import warnings
from pathlib import Path

import numpy as np

from smallvit.common.extras import need
from smallvit.convert.rules import Kind, Shapes, Table

# Keras describes a shift by where the content moves to, we by where it is read from. This maps its copies to ours.
_COPIES = (0, 4, 2, 3, 1)


def table(depth: int) -> Table:
    """The table for a model with `depth` blocks."""
    names: dict[str, tuple[str, Kind]] = {
        "shifted_patch_tokenization.projection": ("patches/dense", patches),
        "shifted_patch_tokenization.layer_norm": ("patches/norm", patches_norm),
        "patch_encoder.position_embedding": ("positions", positions),
        _nth("layer_normalization", 2 * depth): ("norm", norm),
        _nth("dense", 2 * depth): ("head_mlp/dense_0", dense),
        _nth("dense", 2 * depth + 1): ("head_mlp/dense_1", dense),
        _nth("dense", 2 * depth + 2): ("head", dense),
    }
    for i in range(depth):
        names[_nth("layer_normalization", 2 * i)] = (f"block_{i}/attention_norm", norm)
        names[_nth("layer_normalization", 2 * i + 1)] = (f"block_{i}/mlp_norm", norm)
        names[_nth("dense", 2 * i)] = (f"block_{i}/mlp/dense_0", dense)
        names[_nth("dense", 2 * i + 1)] = (f"block_{i}/mlp/dense_1", dense)
        for kind in ("multi_head_attention", "multi_head_attention_lsa"):
            attention = _nth(kind, i)
            names[attention] = (f"block_{i}/attention/attend", tau)
            for number, part in enumerate(("query", "key", "value")):
                names[f"{attention}.{part}_dense"] = (f"block_{i}/attention/qkv", heads_in(number))
            names[f"{attention}.output_dense"] = (f"block_{i}/attention/out", heads_out)
    return names


def dense(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"kernel" if leaf == "0" else "bias": array}


def norm(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"scale" if leaf == "0" else "bias": array}


def _our_copies(array: np.ndarray, path: str, shapes: Shapes) -> np.ndarray:
    """Reorders the shifted copies on the first axis, which runs over pixels, copies and channels."""
    if f"{path.rpartition('/')[0]}/norm/scale" not in shapes:
        return array  # plain patches
    # Patches are square and there are five copies, so each pixel has 5 * channels entries: try the usual numbers of
    # channels.
    pixels = next(len(array) // (5 * c) for c in (3, 1, 4) if _is_square(len(array) / (5 * c)))
    rest = array.shape[1:]
    return array.reshape(pixels, 5, -1, *rest)[:, _COPIES].reshape(-1, *rest)


def _is_square(number: float) -> bool:
    return number == round(number**0.5) ** 2


def patches(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"kernel": _our_copies(array, path, shapes)} if leaf == "0" else {"bias": array}


def patches_norm(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"scale" if leaf == "0" else "bias": _our_copies(array, path, shapes)}


def positions(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    side = round(len(array) ** 0.5)
    return {"grid": array.reshape(side, side, -1)}


def heads_in(number: int) -> Kind:
    """Joins queries, keys and values, separate (dim, heads, dim_head) kernels in Keras, into one kernel."""

    def kind(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
        if leaf == "0":
            return {f"kernel@{number}": array.reshape(len(array), -1)}
        return {f"bias@{number}": array.reshape(-1)}

    return kind


def heads_out(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"kernel": array.reshape(-1, array.shape[-1])} if leaf == "0" else {"bias": array}


def tau(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Inverts the temperature: Keras divides by it, we multiply."""
    return {"temperature": 1 / array.reshape(1)}


def read_h5(path: Path) -> dict[str, np.ndarray]:
    """Reads a `.weights.h5` file; "layers/dense_3/vars/0" becomes "dense_3.0"."""
    h5py = need("h5py", f"reading {path.name}")
    state: dict[str, np.ndarray] = {}

    def take(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            parts = [part for part in name.split("/") if part not in ("layers", "vars")]
            state[".".join(parts)] = np.asarray(item)

    with h5py.File(path) as file:
        file.visititems(take)
    moments = {name.rpartition(".")[2]: array for name, array in state.items() if ".normalization." in f".{name}"}
    if moments:
        _warn_normalization(path, moments["0"], moments["1"])
    return {name: a for name, a in state.items() if not {"normalization", "seed_generator"} & set(name.split("."))}


_ENDINGS = {"kernel": "0", "gamma": "0", "embeddings": "0", "bias": "1", "beta": "1"}
_INNER = {"dense": "projection", "layer_normalization": "layer_norm", "embedding": "position_embedding"}
_INNER |= {"query": "query_dense", "key": "key_dense", "value": "value_dense", "attention_output": "output_dense"}


def read_saved_model(path: Path) -> dict[str, np.ndarray]:
    """Reads a SavedModel folder of Keras 2 and gives its arrays the names of Keras 3.

    Only the order of the variables is reliable: it follows the layers. The numbers in the names depend on what else the
    process created, and a temperature, created outside of Keras, is just called "Variable".
    """
    tensorflow = need("tensorflow", f"reading the SavedModel {path.name}")
    state: dict[str, np.ndarray] = {}
    moments: dict[str, np.ndarray] = {}
    seen: dict[str, list[str]] = {}  # the layers of each type, in order
    for variable in tensorflow.saved_model.load(str(path)).variables:
        *layers_down, ending = variable.name.partition(":")[0].split("/")
        array = np.asarray(variable.numpy())
        if ending in ("mean", "variance", "count", "StateVar"):
            moments[ending] = array
        elif ending == "Variable":
            number = len(seen.get("multi_head_attention_lsa", []))
            state[f"{_nth('multi_head_attention_lsa', number)}.0"] = array
        else:
            layer, *inner = layers_down
            kind = _without_number(layer)
            layers = seen.setdefault(kind, [])
            layers += [layer] if layer not in layers else []
            parts = [_INNER[_without_number(part)] for part in inner]
            state[".".join([_nth(kind, layers.index(layer)), *parts, _ENDINGS[ending]])] = array
    if moments:
        _warn_normalization(path, moments["mean"], moments["variance"])
    return state


def _warn_normalization(path: Path, mean: np.ndarray, variance: np.ndarray) -> None:
    centre, width = (np.array2string(a.reshape(-1), precision=6, separator=", ") for a in (mean, np.sqrt(variance)))
    warnings.warn(f"{path} normalises images inside the model: pass in (image - {centre}) / {width}", stacklevel=4)


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _nth(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"
