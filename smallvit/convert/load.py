"""Trained weights from elsewhere, fitted to a model: `load_weights(model, source)`."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smallvit.common.extras import first_line, need
from smallvit.common.paths import by_path, nested
from smallvit.convert import keras, timm, transformers, vit_pytorch
from smallvit.convert.rules import Converted, Table, convert
from smallvit.layers import Classifier
from smallvit.models import (
    CaiT,
    CrossViT,
    CvT,
    DeepViT,
    KerasViT,
    LeViT,
    NesT,
    PiT,
    RegionViT,
    SimpleViT,
    Swin,
    TwinsSVT,
    ViT,
)
from smallvit.ops import pair

State = Mapping[str, np.ndarray]

# The tables that may fit a class, or what makes one from the model; the one that explains a file best is taken.
TABLES: dict[type[Classifier], tuple[Table | Callable[[Any], Table], ...]] = {
    ViT: (timm.VIT, vit_pytorch.VIT, vit_pytorch.VIT_FOR_SMALL_DATASET, vit_pytorch.VIT_WITH_PATCH_MERGER),
    SimpleViT: (vit_pytorch.SIMPLE_VIT,),
    CaiT: (timm.CAIT,),
    CrossViT: (timm.CROSSVIT,),
    CvT: (transformers.CVT,),
    DeepViT: (vit_pytorch.DEEPVIT,),
    KerasViT: (lambda model: keras.table(model.depth),),
    LeViT: (timm.LEVIT,),
    NesT: (lambda model: timm.nest(model.dim // model.heads),),
    PiT: (timm.PIT,),
    RegionViT: (vit_pytorch.REGION_VIT,),
    Swin: (timm.SWIN,),
    TwinsSVT: (timm.TWINS_SVT,),
}


def load_weights(model: Classifier, source: str | Path, *, channels: int = 3) -> dict[str, Any]:
    """The variables of `model`, from a file or a hub.

    `source` is a .safetensors or .npz file, a .pth, .pt or .bin file (needs torch), a .h5 file (needs h5py) or a
    SavedModel folder (needs tensorflow) of Keras, `timm:<name>` or `hf:<repository>` (needs huggingface_hub and a
    network). Names and layouts of timm, transformers and vit-pytorch are recognised, and so are our own. Positions are
    resampled to the model's image size, and a head for another number of classes starts afresh, with a warning;
    anything else that is missing, left over or of another shape is listed in a ValueError.
    """
    size = pair(model.image_size or 224)  # those that take any size have no parameters that depend on it
    image = jnp.zeros((1, *size, channels), model.dtype)
    wanted = by_path(jax.eval_shape(model.init, jax.random.key(0), image))
    shapes = {path: leaf.shape for path, leaf in wanted.items()}
    arrays, left_over = _best_fit(model, read_state(source), shapes)

    arrays = {path: _resampled(path, array, shapes) for path, array in arrays.items()}
    heads = {path for path in shapes if "head" in path.split("/")[1] and not path.startswith("params/head_mlp")}
    fresh = sorted(path for path in heads if path in arrays and arrays[path].shape != shapes[path])
    fresh += sorted(path for path in heads - arrays.keys())
    if fresh:
        start = by_path(jax.jit(model.init)(jax.random.key(0), image))
        arrays |= {path: np.asarray(start[path]) for path in fresh}
        warnings.warn(f"{source} has another head: {', '.join(fresh)} start afresh, train them first", stacklevel=2)

    problems = {
        "missing": sorted(shapes.keys() - arrays.keys()),
        "left over": left_over + sorted(arrays.keys() - shapes.keys()),
        "of another shape": [
            f"{path} {arrays[path].shape} instead of {shape}"
            for path, shape in sorted(shapes.items())
            if path in arrays and arrays[path].shape != shape
        ],
    }
    if any(problems.values()):
        lists = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
        raise ValueError(f"{source} does not fit {type(model).__name__} with these fields: {lists}")
    return nested({path: jnp.asarray(array, wanted[path].dtype) for path, array in arrays.items()})


def read_state(source: str | Path) -> State:
    """The arrays of a file or of a hub's file, by the names they have there."""
    kind, _, name = str(source).partition(":")
    if kind in ("timm", "hf") and name:
        return read_state(_download(f"timm/{name}" if kind == "timm" and "/" not in name else name))
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{source} does not exist: give a file, or timm:<name> or hf:<repository> for a hub")
    if path.is_dir():
        return keras.read_saved_model(path)
    match path.suffix:
        case ".safetensors":
            from safetensors.numpy import load_file

            return load_file(path)
        case ".npz":
            with np.load(path) as file:
                return dict(file)
        case ".pth" | ".pt" | ".bin":
            return _read_torch(path)
        case ".h5":
            return keras.read_h5(path)
        case other:
            raise ValueError(f"{source} ends in {other!r}: give a .safetensors, .npz, .pth, .pt, .bin or .h5 file")


def _read_torch(path: Path) -> State:
    torch = need("torch", f"reading {path.name}")
    state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in ("state_dict", "model"):
        state = state.get(wrapper, state)
    return {name: value.float().numpy() for name, value in state.items() if hasattr(value, "numpy")}


def _download(repository: str) -> Path:
    hub = need("huggingface_hub", f"fetching {repository}")
    for name in ("model.safetensors", "pytorch_model.bin"):
        try:
            return Path(hub.hf_hub_download(repository, name))
        except Exception as error:  # the hub's many errors all mean that the file could not be had
            reason = first_line(error)
    raise ValueError(f"cannot fetch {repository} from the hub ({reason}): check name and network, or give a file")


def _best_fit(model: Classifier, state: State, shapes: Mapping[str, tuple[int, ...]]) -> Converted:
    if all(name.split("/")[0] in ("params", "batch_stats") for name in state):
        return Converted(dict(state), [])
    tables = next((TABLES[cls] for cls in type(model).__mro__ if cls in TABLES), ())
    fits = [convert(state, table(model) if callable(table) else table, shapes) for table in tables]
    if not fits:
        raise ValueError(f"no other zoo's names are known for {type(model).__name__}: give a file with our own paths")
    return min(fits, key=lambda fit: len(fit.left_over) + len(fit.arrays.keys() ^ shapes.keys()))


def _resampled(path: str, array: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    wanted = shapes.get(path, array.shape)
    if not path.endswith("/grid") or array.shape == wanted or array.ndim != len(wanted):
        return array
    return np.asarray(jax.image.resize(jnp.asarray(array), (*wanted[:2], *array.shape[2:]), "bicubic"))


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
