"""The table for the Keras example's ViT (https://keras.io/examples/vision/vit_small_ds/), and its weight files.

Keras numbers layers by kind in the order of their making, the first without a number, and keeps their arrays under
numbers too: kernel then bias, scale then bias.
"""

import re
import warnings
from pathlib import Path

import numpy as np

from smallvit.common.extras import need
from smallvit.convert.rules import Kind, Shapes, Table

# Keras shifts by where the content goes, we by where it is read: its copies are ours in this order.
_COPIES = (0, 4, 2, 3, 1)


def table(depth: int) -> Table:
    """Keras' names for a model of that many blocks."""
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
    """The first axis runs over pixels, copies and channels; the copies are put in our order."""
    if f"{path.rpartition('/')[0]}/norm/scale" not in shapes:
        return array  # plain patches
    # Patches are square and copies five, so that 5 * channels is what is left of each pixel: try the usual channels.
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
    """Queries, keys and values stand apart in Keras, as (dim, heads, dim_head), and in one kernel here."""

    def kind(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
        if leaf == "0":
            return {f"kernel@{number}": array.reshape(len(array), -1)}
        return {f"bias@{number}": array.reshape(-1)}

    return kind


def heads_out(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    return {"kernel": array.reshape(-1, array.shape[-1])} if leaf == "0" else {"bias": array}


def tau(leaf: str, array: np.ndarray, path: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """Keras divides by a temperature, we multiply."""
    return {"temperature": 1 / array.reshape(1)}


def read_h5(path: Path) -> dict[str, np.ndarray]:
    """A `.weights.h5` file: "layers/dense_3/vars/0" is here "dense_3.0"."""
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
        _tell_normalization(path, moments["0"], moments["1"])
    return {name: a for name, a in state.items() if not {"normalization", "seed_generator"} & set(name.split("."))}


_ENDINGS = {"kernel": "0", "gamma": "0", "embeddings": "0", "bias": "1", "beta": "1"}
_INNER = {"dense": "projection", "layer_normalization": "layer_norm", "embedding": "position_embedding"}
_INNER |= {"query": "query_dense", "key": "key_dense", "value": "value_dense", "attention_output": "output_dense"}


def read_saved_model(path: Path) -> dict[str, np.ndarray]:
    """A SavedModel folder of Keras 2, under the names that Keras 3 would have given.

    Its variables come in the order of the layers, which is what counts: the numbers in their names depend on what
    else was made in that process, and a temperature, made outside of Keras, is just "Variable".
    """
    tensorflow = need("tensorflow", f"reading the SavedModel {path.name}")
    state: dict[str, np.ndarray] = {}
    moments: dict[str, np.ndarray] = {}
    seen: dict[str, list[str]] = {}  # the layers of a kind, in their order
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
        _tell_normalization(path, moments["mean"], moments["variance"])
    return state


def _tell_normalization(path: Path, mean: np.ndarray, variance: np.ndarray) -> None:
    centre, width = (np.array2string(a.reshape(-1), precision=6, separator=", ") for a in (mean, np.sqrt(variance)))
    warnings.warn(f"{path} normalises its images itself: give (image - {centre}) / {width}", stacklevel=4)


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _nth(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"
