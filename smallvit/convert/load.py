"""Trained weights from elsewhere, fitted to a model: `load_weights(model, source)`."""

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
SAFE_TORCH = 2, 10  # `weights_only` had holes before
FACTS = ("config.json", "preprocessor_config.json")  # beside the weights in a repository of a hub

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
    shape = (*size, channels)
    arrays = fit_weights(model, read_state(source), shape, source)
    image = jnp.zeros((1, *shape), model.dtype)
    wanted = by_path(jax.eval_shape(model.init, jax.random.key(0), image))
    if fresh := sorted(wanted.keys() - arrays.keys()):
        start = by_path(jax.jit(model.init)(jax.random.key(0), image))
        arrays |= {path: np.asarray(start[path]) for path in fresh}
        warnings.warn(f"{source} has another head: {', '.join(fresh)} start afresh, train them first", stacklevel=2)
    return nested({path: jnp.asarray(array, wanted[path].dtype) for path, array in arrays.items()})


def fit_weights(
    model: Classifier, state: State, shape: tuple[int, int, int], source: str | Path, *, head: bool = True
) -> dict[str, np.ndarray]:
    """The arrays of `state` by our own paths, for images of `shape` (height, width, channels).

    Tables that follow the grid are resampled. A head for another number of classes is left out, and without `head` any.
    What else does not fit is listed in a ValueError, which calls the arrays `source`.
    """
    shapes, heads = variable_shapes(model, shape), head_paths(model, shape)
    arrays, left_over = _best_fit(model, state, shapes)
    arrays = {path: _resampled(path, array, shapes) for path, array in arrays.items()}
    fresh = {path for path in heads if not head or path not in arrays or arrays[path].shape != shapes[path]}
    shapes = {path: each for path, each in shapes.items() if path not in fresh}
    arrays = {path: array for path, array in arrays.items() if path not in fresh}

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
    return arrays


def variable_shapes(model: Classifier, shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    return {path: leaf.shape for path, leaf in by_path(jax.eval_shape(model.init, jax.random.key(0), image)).items()}


def head_paths(model: Classifier, shape: tuple[int, int, int]) -> set[str]:
    """The parameters that are there for the classes: with one class more, they have another shape."""
    mine, other = (variable_shapes(each, shape) for each in (model, model.clone(num_classes=model.num_classes + 1)))
    return {path for path, shape in mine.items() if other[path] != shape}


def read_state(source: str | Path) -> State:
    """The arrays of a file or of a hub's file, by the names they have there."""
    path = fetch(source)
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


def fetch(source: str | Path) -> Path:
    """The file or folder on this machine; one of a hub is downloaded, and its configuration beside it."""
    kind, _, name = str(source).partition(":")
    if kind in ("timm", "hf") and name:
        return _download(f"timm/{name}" if kind == "timm" and "/" not in name else name)
    path = Path(source).expanduser()
    if not path.exists():
        raise ValueError(f"{source} does not exist: give a file, or timm:<name> or hf:<repository> for a hub")
    return path


def _read_torch(path: Path) -> State:
    torch = need("torch", f"reading {path.name}")
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if release < SAFE_TORCH:
        needed = ".".join(map(str, SAFE_TORCH))
        raise ValueError(
            f"reading {path.name} needs torch {needed} or later, this is {torch.__version__}: before, a file could run "
            "code of its own; upgrade it, or give a .safetensors file"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in ("state_dict", "model"):
        state = state.get(wrapper, state)
    return {name: value.float().numpy() for name, value in state.items() if hasattr(value, "numpy")}


def _download(repository: str) -> Path:
    hub = need("huggingface_hub", f"fetching {repository}")
    try:
        weights = _first_of(hub, repository, "model.safetensors", "pytorch_model.bin")
    except Exception as error:  # the hub's many errors all mean that the file could not be had
        reason = first_line(error)
        line = f"cannot fetch {repository} from the hub ({reason}): check name and network, or give a file"
        raise ValueError(line) from None
    for facts in FACTS:
        with suppress(Exception):  # not every repository has them
            hub.hf_hub_download(repository, facts)
    return weights


def _first_of(hub: Any, repository: str, name: str, pickled: str) -> Path:
    """The file, or the pickled one where the hub says that there is no such file; not where it says nothing."""
    try:
        return Path(hub.hf_hub_download(repository, name))
    except hub.errors.EntryNotFoundError as error:
        if isinstance(error, hub.errors.LocalEntryNotFoundError):  # no network: there may be one
            raise
        return Path(hub.hf_hub_download(repository, pickled))


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
    if not is_table(path) or array.shape == wanted or array.ndim != len(wanted):
        return array
    return np.asarray(resample_table(path, array, (*wanted[:2], *array.shape[2:])))


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
