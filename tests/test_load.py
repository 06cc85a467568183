"""load_weights: files of every format, and weights that do not fit."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from smallvit import ViT, load_weights
from smallvit.common.paths import by_path
from smallvit.models import KerasViT
from tests.test_parity import SIZES, load

FIXTURES = Path(__file__).parent / "fixtures"
KERAS = dict(
    image_size=12, patch_size=4, num_classes=3, dim=8, depth=2, heads=2, dim_head=5, mlp_dim=16, head_dims=(16, 12)
)


@pytest.fixture
def timm_state() -> dict[str, np.ndarray]:
    return load("timm_vit")[0]


@pytest.mark.parametrize("name, spt, lsa", [("keras_vit", False, False), ("keras_sl_vit", True, True)])
def test_weights_of_the_keras_example(name: str, spt: bool, lsa: bool):
    model = KerasViT(**KERAS, spt=spt, lsa=lsa)
    variables = load_weights(model, FIXTURES / f"{name}.weights.h5")
    _, image, output = load(name)
    np.testing.assert_allclose(jax.jit(model.apply)(variables, image), output, atol=1e-5)


class SavedModel:
    """A fake tensorflow: the variables that it read from a real SavedModel."""

    def __init__(self, path: Path):
        with np.load(path) as file:
            names = file["names"]
            self.variables = [Variable(str(name), file[f"variable_{i}"]) for i, name in enumerate(names)]
        self.saved_model = self

    def load(self, folder: str) -> "SavedModel":
        return self


class Variable(NamedTuple):
    name: str
    value: np.ndarray

    def numpy(self) -> np.ndarray:
        return self.value


def test_a_saved_model_of_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "saved_model.pb").touch()
    monkeypatch.setitem(sys.modules, "tensorflow", SavedModel(FIXTURES / "keras_saved_model.npz"))
    model = KerasViT(**KERAS, spt=True, lsa=True)
    with pytest.warns(UserWarning, match=r"normalises images inside the model: pass in \(image - \[0\.89\d*, "):
        variables = load_weights(model, tmp_path)
    _, image, output = load("keras_saved_model")
    np.testing.assert_allclose(jax.jit(model.apply)(variables, image), output, atol=1e-5)


def test_npz_and_our_own_paths(timm_state, tmp_path: Path):
    np.savez(tmp_path / "theirs.npz", **timm_state)
    variables = load_weights(ViT(**SIZES), tmp_path / "theirs.npz")
    save_file({k: np.asarray(v) for k, v in by_path(variables).items()}, tmp_path / "ours.safetensors")
    again = load_weights(ViT(**SIZES), tmp_path / "ours.safetensors")
    jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_a_head_for_other_classes_starts_afresh(timm_state, tmp_path: Path):
    np.savez(tmp_path / "m.npz", **timm_state)
    model = ViT(**{**SIZES, "num_classes": 9})
    with pytest.warns(UserWarning, match="a different head: params/head/bias, params/head/kernel are newly"):
        variables = load_weights(model, tmp_path / "m.npz")
    assert variables["params"]["head"]["kernel"].shape == (16, 9)
    np.testing.assert_array_equal(variables["params"]["norm"]["scale"], timm_state["norm.weight"])


def test_positions_are_resampled(timm_state, tmp_path: Path):
    np.savez(tmp_path / "m.npz", **timm_state)
    model = ViT(**{**SIZES, "image_size": (24, 32)})
    variables = load_weights(model, tmp_path / "m.npz")
    assert variables["params"]["positions"]["grid"].shape == (6, 8, 16)
    assert jax.jit(model.apply)(variables, np.zeros((1, 24, 32, 3), np.float32)).shape == (1, 5)


def test_what_does_not_fit_is_listed(timm_state, tmp_path: Path):
    del timm_state["norm.bias"]
    timm_state["extra.weight"] = np.zeros(3, np.float32)
    timm_state["blocks.0.mlp.fc1.bias"] = np.zeros(7, np.float32)
    np.savez(tmp_path / "m.npz", **timm_state)
    with pytest.raises(ValueError) as error:
        load_weights(ViT(**SIZES), tmp_path / "m.npz")
    for part in (
        "missing: params/norm/bias;",
        "unused: extra.weight;",
        "params/block_0/mlp/in/bias (7,) instead of (24,)",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "source, message",
    [
        ("nowhere.safetensors", "nowhere.safetensors does not exist"),
        (__file__, "ends in '.py': give a .safetensors"),
        (
            str(FIXTURES),
            "fixtures is neither a run or model folder nor a Keras SavedModel: give one, or a file of weights",
        ),
    ],
)
def test_wrong_sources(source: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_weights(ViT(**SIZES), source)


@pytest.mark.parametrize("name", ["m.safetensors", "m.npz", "m.h5", "m.pth"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def load(path: Path, map_location: str, weights_only: bool) -> dict[str, object]:
        raise EOFError("Ran out of input")

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.10.0", load=load))
    path = tmp_path / name
    path.write_bytes(b"half of a download")
    with pytest.raises(
        ValueError, match=rf"^cannot read \S*{name} \(.+\): it is incomplete, or not a file of weights$"
    ):
        load_weights(ViT(**SIZES), path)


@pytest.mark.parametrize(
    "source, package",
    [("timm:vit_tiny", "huggingface_hub"), ("hf:a/b", "huggingface_hub"), ("m.pth", "torch"), (".", "tensorflow")],
)
def test_a_missing_package_is_named(source: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    Path("m.pth").touch()
    Path("saved_model.pb").touch()
    with pytest.raises(ValueError, match=f"needs {package}: pip install ('smallvit.hub.'|{package})$"):
        load_weights(ViT(**SIZES), source)


class NotFound(Exception):
    pass


class NotFoundHere(NotFound):
    """The hub's error without a network."""


class Hub:
    errors = SimpleNamespace(EntryNotFoundError=NotFound, LocalEntryNotFoundError=NotFoundHere)


class NoNetwork(Hub):
    @staticmethod
    def hf_hub_download(repository: str, name: str) -> str:
        raise OSError(f"no route to {repository}\nmore")


@pytest.mark.parametrize(("error", "asked"), [(NotFound, 2), (NotFoundHere, 1), (TimeoutError, 1)])
def test_a_pickle_is_fetched_only_where_there_is_nothing_else(
    error: type[Exception], asked: int, monkeypatch: pytest.MonkeyPatch
):
    names = []

    class Pickled(Hub):
        @staticmethod
        def hf_hub_download(repository: str, name: str) -> str:
            names.append(name)
            raise error(f"no {name}")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Pickled)
    with pytest.raises(ValueError, match="cannot fetch a/b from the hub"):
        load_weights(ViT(**SIZES), "hf:a/b")
    assert names == ["model.safetensors", "pytorch_model.bin"][:asked]


@pytest.mark.parametrize(("version", "read"), [("2.9.1+cpu", False), ("2.10.0", True), ("3.0.0a0+git1", True)])
def test_pickles_need_a_torch_that_reads_them_safely(
    version: str, read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def load(path: Path, map_location: str, weights_only: bool) -> dict[str, object]:
        assert weights_only
        return {}

    (tmp_path / "m.pth").touch()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version, load=load))
    message = "does not fit ViT" if read else f"needs torch 2.10 or later, this is {re.escape(version)}"
    with pytest.raises(ValueError, match=message):
        load_weights(ViT(**SIZES), tmp_path / "m.pth")


def test_a_missing_network_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", NoNetwork)
    with pytest.raises(ValueError, match=r"^cannot fetch timm/vit_x from the hub \(no route to timm/vit_x\): check"):
        load_weights(ViT(**SIZES), "timm:vit_x")


def test_a_hub_file_is_loaded(timm_state, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_file(timm_state, tmp_path / "model.safetensors")

    class Full(Hub):
        @staticmethod
        def hf_hub_download(repository: str, name: str) -> str:
            assert repository == "timm/vit_x"
            return str(tmp_path / name)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Full)
    variables = load_weights(ViT(**SIZES), "timm:vit_x")
    np.testing.assert_array_equal(variables["params"]["norm"]["scale"], timm_state["norm.weight"])
