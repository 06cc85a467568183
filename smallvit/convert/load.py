"""Pretrained weights from files and hubs, fitted to a model: `load_weights(model, source)`."""

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from smallvit.common.extras import first_line, need
from smallvit.common.paths import by_path, nested
from smallvit.convert import keras, timm, transformers, vit_pytorch
from smallvit.convert.rules import Converted, Table, convert
from smallvit.layers import Classifier, is_table, resample_table
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
SAFE_TORCH = 2, 10  # earlier versions of `weights_only` had security holes
FACTS = ("config.json", "preprocessor_config.json")  # files beside the weights in a hub repository

# The candidate tables of each class, or functions that make one from the model. The best match for a file is used.
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
    """Loads the variables of `model` from a file or a hub.

    `source` is a .safetensors or .npz file, a .pth, .pt or .bin file (needs torch), a Keras .h5 file (needs h5py) or
    SavedModel folder (needs tensorflow), `timm:<name>` or `hf:<repository>` (both need huggingface_hub and network
    access). The parameter names and layouts of timm, transformers, vit-pytorch and smallvit are recognised. Position
    embeddings are resampled to the model's image size. A head for a different number of classes is newly initialised,
    with a warning. Any other missing, unused or wrongly shaped array is listed in a ValueError.
    """
    size = pair(model.image_size or 224)  # models that take any size have no parameters that depend on it
    shape = (*size, channels)
    arrays = fit_weights(model, read_state(source), shape, source)
    image = jnp.zeros((1, *shape), model.dtype)
    wanted = by_path(jax.eval_shape(model.init, jax.random.key(0), image))
    if fresh := sorted(wanted.keys() - arrays.keys()):
        start = by_path(jax.jit(model.init)(jax.random.key(0), image))
        arrays |= {path: np.asarray(start[path]) for path in fresh}
        warnings.warn(
            f"{source} has a different head: {', '.join(fresh)} are newly initialised; train them first", stacklevel=2
        )
    return nested({path: jnp.asarray(array, wanted[path].dtype) for path, array in arrays.items()})


def fit_weights(
    model: Classifier, state: State, shape: tuple[int, int, int], source: str | Path, *, head: bool = True
) -> dict[str, np.ndarray]:
    """Converts the arrays of `state` to our parameter paths, for images of `shape` (height, width, channels).

    Tables that depend on the grid are resampled. A head for a different number of classes is left out, and so is any
    head if `head` is false. Everything else that does not fit is listed in a ValueError that names `source`.
    """
    shapes, heads = variable_shapes(model, shape), head_paths(model, shape)
    arrays, left_over = _best_fit(model, state, shapes)
    arrays = {path: _resampled(path, array, shapes) for path, array in arrays.items()}
    fresh = {path for path in heads if not head or path not in arrays or arrays[path].shape != shapes[path]}
    shapes = {path: shape for path, shape in shapes.items() if path not in fresh}
    arrays = {path: array for path, array in arrays.items() if path not in fresh}

    problems = {
        "missing": sorted(shapes.keys() - arrays.keys()),
        "unused": left_over + sorted(arrays.keys() - shapes.keys()),
        "wrong shape": [
            f"{path} {arrays[path].shape} instead of {shape}"
            for path, shape in sorted(shapes.items())
            if path in arrays and arrays[path].shape != shape
        ],
    }
    if any(problems.values()):
        lists = "; ".join(f"{what}: {_shortened(names)}" for what, names in problems.items() if names)
        raise ValueError(f"{source} does not fit {type(model).__name__} with its current fields: {lists}")
    return arrays


def variable_shapes(model: Classifier, shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    return {path: leaf.shape for path, leaf in by_path(jax.eval_shape(model.init, jax.random.key(0), image)).items()}


def head_paths(model: Classifier, shape: tuple[int, int, int]) -> set[str]:
    """The parameters whose shape depends on the number of classes."""
    mine, other = (variable_shapes(m, shape) for m in (model, model.clone(num_classes=model.num_classes + 1)))
    return {path for path, shape in mine.items() if other[path] != shape}


def read_state(source: str | Path) -> State:
    """Reads the arrays of a file or hub repository, under their original names."""
    path = fetch(source)
    if path.is_dir():
        if not (path / "saved_model.pb").exists():
            raise ValueError(
                f"{source} is neither a run or model folder nor a Keras SavedModel: give one, or a file of weights"
            )
        return keras.read_saved_model(path)
    read = _reader(path)
    try:
        return read(path)
    except Exception as error:  # each format has error types of its own
        reason = first_line(error)
        raise ValueError(f"cannot read {source} ({reason}): it is incomplete, or not a file of weights") from None


def _reader(path: Path) -> Callable[[Path], State]:
    """The function that reads files of this format; the package that it needs is installed."""
    match path.suffix:
        case ".safetensors":
            return load_file
        case ".npz":
            return _read_npz
        case ".pth" | ".pt" | ".bin":
            return partial(_read_torch, _safe_torch(path))
        case ".h5":
            need("h5py", f"reading {path.name}")
            return keras.read_h5
        case other:
            raise ValueError(f"{path} ends in {other!r}: give a .safetensors, .npz, .pth, .pt, .bin or .h5 file")


def fetch(source: str | Path) -> Path:
    """Returns the local file or folder; a hub repository is downloaded first, with its configuration files."""
    kind, _, name = str(source).partition(":")
    if kind in ("timm", "hf") and name:
        return _download(f"timm/{name}" if kind == "timm" and "/" not in name else name)
    path = Path(source).expanduser()
    if not path.exists():
        raise ValueError(f"{source} does not exist: give a file, or timm:<name> or hf:<repository> for a hub")
    return path


def _read_npz(path: Path) -> State:
    with np.load(path) as file:
        return dict(file)


def _safe_torch(path: Path) -> Any:
    torch = need("torch", f"reading {path.name}")
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if release < SAFE_TORCH:
        needed = ".".join(map(str, SAFE_TORCH))
        raise ValueError(
            f"reading {path.name} needs torch {needed} or later, this is {torch.__version__}: in older versions a "
            "file could run code; upgrade torch, or give a .safetensors file"
        )
    return torch


def _read_torch(torch: Any, path: Path) -> State:
    state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in ("state_dict", "model"):
        state = state.get(wrapper, state)
    return {name: value.float().numpy() for name, value in state.items() if hasattr(value, "numpy")}


def _download(repository: str) -> Path:
    hub = need("huggingface_hub", f"fetching {repository}")
    try:
        weights = _first_of(hub, repository, "model.safetensors", "pytorch_model.bin")
    except Exception as error:  # the hub's many error types all mean that the file is not available
        reason = first_line(error)
        message = f"cannot fetch {repository} from the hub ({reason}): check the name and the network, or give a file"
        raise ValueError(message) from None
    for facts in FACTS:
        with suppress(Exception):  # not every repository has these
            hub.hf_hub_download(repository, facts)
    return weights


def _first_of(hub: Any, repository: str, name: str, pickled: str) -> Path:
    """Downloads `name`, or `pickled` if the hub says that the repository has no file `name`."""
    try:
        return Path(hub.hf_hub_download(repository, name))
    except hub.errors.EntryNotFoundError as error:
        if isinstance(error, hub.errors.LocalEntryNotFoundError):  # no network: the file may exist
            raise
        return Path(hub.hf_hub_download(repository, pickled))


def _best_fit(model: Classifier, state: State, shapes: Mapping[str, tuple[int, ...]]) -> Converted:
    if all(name.split("/")[0] in ("params", "batch_stats") for name in state):
        return Converted(dict(state), [])
    tables = next((TABLES[cls] for cls in type(model).__mro__ if cls in TABLES), ())
    fits = [convert(state, table(model) if callable(table) else table, shapes) for table in tables]
    if not fits:
        raise ValueError(f"no conversion table for {type(model).__name__}: give a file with smallvit's own paths")
    return min(fits, key=lambda fit: len(fit.left_over) + len(fit.arrays.keys() ^ shapes.keys()))


def _resampled(path: str, array: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    wanted = shapes.get(path, array.shape)
    if not is_table(path) or array.shape == wanted or array.ndim != len(wanted):
        return array
    return np.asarray(resample_table(path, array, (*wanted[:2], *array.shape[2:])))


def _shortened(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
