"""Untrusted model folders: config.json is checked before anything is created from it."""

import json
import shutil
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smallvit.exporting.hub import load
from smallvit.registry import list_models
from smallvit.runs import saved
from smallvit.runs.checks import check_config, check_weights
from smallvit.runs.saved import Spec, from_pretrained
from tests.served import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    return folder


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for name in path[:-1]:
            config = config[name]
        config[path[-1]] = value

    return change


def field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return put("model", "fields", name, value=value)


def take(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for name in path[:-1]:
            config = config[name]
        del config[path[-1]]

    return change


def sizes(height: Any, width: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["model"]["image_size"] = config["preprocess"]["size"] = [height, width]

    return change


def classes(number: int) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["classes"], config["model"]["num_classes"] = [str(i) for i in range(number)], number

    return change


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no model": (take("model"), "model must have the fields"),
    "a model that is a list": (put("model", value=[1]), "model must have the fields"),
    "a model without fields": (take("model", "fields"), "model must have the fields"),
    "one field more": (put("model", "parent", value=1), "model must have the fields"),
    "a number for a name": (put("model", "name", value=3), "must be text"),
    "an unknown model": (put("model", "name", value="vit_huge_giant"), "unknown model"),
    "classes as a number": (put("classes", value=3), "must be a list of names"),
    "classes as numbers": (put("classes", value=[0, 1, 2]), "must be a list of names"),
    "classes as text": (put("classes", value="abc"), "must be a list of names"),
    "the same name twice": (put("classes", value=["a", "b", "a"]), "2 different names for 3 classes"),
    "fewer names": (put("classes", value=["a", "b"]), "num_classes=3, but 2 are named"),
    "no classes": (take("classes"), "must be a list of names"),
    "too many classes": (classes(100_001), "100,001 classes"),
    "a class more": (classes(4), "does not match|weights, but there are"),
    "classes as True": (put("model", "num_classes", value=True), "num_classes=True"),
    "a huge image": (sizes(100_000, 100_000), "from 1 to 4096"),
    "no image": (sizes(0, 12), "from 1 to 4096"),
    "a float as a side": (sizes(12.5, 12), "from 1 to 4096"),
    "text as a side": (sizes("12", 12), "from 1 to 4096"),
    "another image size": (put("preprocess", "size", value=[16, 16]), "the model takes images of"),
    "no preprocess": (take("preprocess"), "preprocess is missing"),
    "no channels": (put("preprocess", "channels", value=0), "channels=0"),
    "too many channels": (put("preprocess", "channels", value=10**9), "channels=1000000000"),
    "channels as True": (put("preprocess", "channels", value=True), "channels=True"),
    "another fit": (put("preprocess", "fit", value="stretch"), "fit='stretch'"),
    "a fit that is a list": (put("preprocess", "fit", value=["crop"]), "fit="),
    "two means": (put("preprocess", "mean", value=[0.5, 0.5]), "mean="),
    "a mean of NaN": (put("preprocess", "mean", value=[float("nan")] * 3), "mean="),
    "a mean of text": (put("preprocess", "mean", value=["0.5"] * 3), "mean="),
    "an infinite std": (put("preprocess", "std", value=[float("inf")] * 3), "std="),
    "a std of 0": (put("preprocess", "std", value=[0.2, 0, 0.2]), "must be above 0"),
    "a std of 0 in float32": (put("preprocess", "std", value=[1e-46] * 3), "at least 1e-06"),
    "a std of 400 digits": (put("preprocess", "std", value=[10**400] * 3), "std="),
    "a mean of 400 digits": (put("preprocess", "mean", value=[10**400] * 3), "mean="),
    "a mean too large for float32": (put("preprocess", "mean", value=[1e39] * 3), "mean="),
    "nested means": (put("preprocess", "mean", value=[[0.5]] * 3), "mean="),
    "a negative number of classes": (put("model", "num_classes", value=-3), "num_classes=-3"),
    "fields as a list": (put("model", "fields", value=[["dim", 16]]), "must have names"),
    "an unknown field": (field("dims", 16), "no field 'dims'"),
    "a hidden field": (field("parent", None), "no field 'parent'"),
    "text as a width": (field("dim", "16"), "dim='16' is of the wrong type"),
    "half a width": (field("dim", 16.5), "dim=16.5 is of the wrong type"),
    "a dropout of NaN": (field("dropout", float("nan")), "dropout=nan is of the wrong type"),
    "an unknown choice": (field("lsa", "always"), "lsa='always' is of the wrong type"),
    "no heads": (field("heads", 0), "heads=0 of dim_head=32: both must be at least 1"),
    "an unknown data type": (field("dtype", "float7"), "cannot be created"),
    "a huge width": (field("dim", 10**9), "more than the number of weights"),
    "a number of 5000 digits": (field("dim", int("9" * 4000)), "more than the number of weights"),
    "a large width": (field("dim", 4000), "weights, but there are"),
    "a deep model": (field("depth", 1000), "more than the number of weight arrays"),
    "a temperature of 0": (put("temperature", value=0), "temperature=0 must be a positive number"),
    "a temperature of NaN": (put("temperature", value=float("nan")), "temperature=nan"),
    "an infinite temperature": (put("temperature", value=float("inf")), "temperature=inf"),
    "a temperature of 0 in float32": (put("temperature", value=1e-46), "temperature=1e-46"),
    "a temperature of 400 digits": (put("temperature", value=10**400), "temperature=1000"),
    "a temperature as text": (put("temperature", value="1"), "temperature='1'"),
    "validation as a list": (put("validation", value=[1]), "validation must have"),
    "infinitely many images": (put("validation", value={"images": float("inf")}), "validation must have"),
    "more right than kept": (
        put("validation", value={"images": 9, "thresholds": [[0.5, 3, 4]]}),
        "do not fit 9 images",
    ),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("lie", LIES)
def test_a_configuration_that_lies(lie: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It gets one line that names the file, and no weights are read."""
    change, message = LIES[lie]
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(saved, "load_file", lambda path: pytest.fail("the weights are read"))
    with pytest.raises(ValueError, match=message) as error:
        from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(tmp_path))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format": "smallvit", "model": ' + "9" * 5000 + "}", "[]", "null", "\xff\xfe"]
)
def test_a_file_that_is_no_configuration(tiny: Path, tmp_path: Path, text: str):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json (is not valid JSON|was not written by smallvit)"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (saved.LARGEST_CONFIG + 1))
    with pytest.raises(ValueError, match="was not written by smallvit"):
        from_pretrained(tmp_path)


def test_a_huge_model_is_refused_at_once(tiny: Path, tmp_path: Path):
    """Its widths would take 4 TB, each within what the file could hold: only shapes are computed."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["fields"] |= dict(dim=4096, mlp_dim=4096, heads=1024, dim_head=4096)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    begun = time.monotonic()
    with pytest.raises(ValueError, match="weights, but there are"):
        from_pretrained(tmp_path)
    seconds, (_, most) = time.monotonic() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 20
    assert most < 50e6


def test_weights_of_another_type(tiny: Path, tmp_path: Path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    arrays = {name: array.astype(np.float64) for name, array in load_file(tiny / "model.safetensors").items()}
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is float64, not float32"):
        load(tmp_path)


@pytest.mark.parametrize("name", [name for name in list_models("*_tiny_data") if not name.startswith("sl_")])
def test_every_architecture_passes(name: str):
    """The rules accept everything that smallvit itself stores, with all fields written out."""
    model = Spec(name, 3, (32, 32), {}).create()
    known = {each.name: getattr(model, each.name) for each in fields(model) if each.name not in ("parent", "name")}
    del known["num_classes"], known["image_size"]
    stored = json.loads(json.dumps(known, default=lambda kind: np.dtype(kind).name))
    preprocess = {"size": [32, 32], "channels": 3, "fit": "crop", "mean": [0.5] * 3, "std": [0.5] * 3}
    described = {"name": name, "num_classes": 3, "image_size": [32, 32], "fields": stored}
    check_config({"model": described, "classes": ["a", "b", "c"], "preprocess": preprocess})
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32))
    check_weights(stored, [leaf.shape for leaf in jax.tree.leaves(shapes)])
