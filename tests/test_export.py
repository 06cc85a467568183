"""Exported models: every architecture, read back and compared; user mistakes."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import smallvit
from smallvit.data import Preprocess
from smallvit.exporting import compression, formats
from smallvit.runs.prediction import Predictor
from smallvit.runs.saved import Saved, Spec, save_model
from smallvit.runs.scores import softmax
from tests.cases import CASES, Case
from tests.runs import required, run_command

SPEC = Spec("sl_vit_tiny_data", 3, (8, 12), dict(dim=16, depth=1, heads=2, mlp_dim=16, patch_size=4))
PREPROCESS = Preprocess((8, 12), 3, "pad", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
# One row a class, and the ways of the ViT that have layers of their own.
ROWS = {case.cls: name for name, case in reversed(CASES.items())}
MOVES = {"Transpose", "Reshape"}
ARCHITECTURES = sorted({*ROWS.values(), "vit_parallel", "vit_merger"})


def images(number: int = 5) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (number, 8, 12, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    variables = jax.jit(SPEC.create().init)(jax.random.key(0), jnp.zeros((1, 8, 12, 3)))
    save_model(folder, SPEC, variables, ("a", "b", "c"), PREPROCESS)
    return folder


def saved(case: Case) -> Saved:
    model = case.make(spt=True, lsa=True)
    variables = case.draw(model)
    preprocess = Preprocess(case.size, case.channels, "crop", (0.5,) * case.channels, (0.25,) * case.channels)
    spec = Spec(case.cls.__name__, 7, case.size, {})
    return Saved(model, variables, tuple("abcdefg"), preprocess, spec)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stablehlo_of_every_architecture(name: str):
    assert formats.convert(saved(CASES[name]), "stablehlo")


# Every architecture can; a row that could not would be named here, with the operation that ONNX lacks.
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_onnx_of_every_architecture(name: str):
    required("jax2onnx")
    required("onnxruntime")
    assert formats.convert(saved(CASES[name]), "onnx")


def test_a_stablehlo_file_predicts_alone(folder: Path, tmp_path: Path):
    path = smallvit.export(folder, "stablehlo", tmp_path / "out" / "m.stablehlo")
    program = jax.export.deserialize(bytearray(path.read_bytes()))
    assert program.platforms == ("cpu", "cuda", "tpu")
    probabilities = jax.nn.softmax(program.call(images()), axis=-1)
    np.testing.assert_allclose(probabilities, Predictor(folder)(images()), atol=1e-5)
    assert "temperature" not in json.loads((tmp_path / "out" / "m.stablehlo.json").read_text())  # it has none
    facts = json.loads((tmp_path / "out" / "m.stablehlo.json").read_text())
    assert facts["classes"] == ["a", "b", "c"]
    assert Preprocess.from_json(facts["preprocess"]) == PREPROCESS
    assert facts["input"] == {"name": "images", "type": "uint8", "shape": ["batch", 8, 12, 3]}
    assert facts["output"] == {"name": "logits", "type": "float32", "shape": ["batch", 3]}


def test_an_onnx_file_predicts_alone(folder: Path, tmp_path: Path):
    required("jax2onnx")
    onnxruntime = required("onnxruntime")
    session = onnxruntime.InferenceSession(smallvit.export(folder, "onnx", tmp_path / "m.onnx"))
    (logits,) = session.run(None, {"images": images()})
    np.testing.assert_allclose(jax.nn.softmax(logits, axis=-1), Predictor(folder)(images()), atol=1e-5)
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == ["a", "b", "c"]
    assert Preprocess.from_json(json.loads(metadata["preprocess"])) == PREPROCESS


def test_batch_norm_is_part_of_the_convolutions_of_an_onnx_file(tmp_path: Path):
    required("jax2onnx")
    onnx = required("onnx")
    nodes = onnx.load_from_string(formats.convert(saved(CASES["hybrid_vit"]), "onnx")).graph.node
    outputs = {node.output[0] for node in nodes if node.op_type == "Conv"}
    assert len(outputs) >= 4
    for _ in range(2):  # what follows, apart from the order of the axes and the shape
        outputs |= {node.output[0] for node in nodes if node.op_type in MOVES and node.input[0] in outputs}
    following = {node.op_type for node in nodes if outputs & {*node.input}} - MOVES
    assert following <= {"Add"}


def test_safetensors_have_weights_and_facts_in_one_file(folder: Path, tmp_path: Path):
    path = smallvit.export(folder, "safetensors", tmp_path / "m.safetensors")
    with safe_open(path, "numpy") as file:
        assert json.loads(file.metadata()["config"]) == json.loads((folder / "config.json").read_text())
    model = SPEC.create()
    variables = smallvit.load_weights(model, path)
    jax.tree.map(np.testing.assert_array_equal, variables, smallvit.load(folder).variables)


def test_what_is_trained_in_bfloat16_is_exported_in_float32(folder: Path, tmp_path: Path):
    whole = smallvit.load(folder)
    half = Saved(whole.model.clone(dtype=jnp.bfloat16), whole.variables, whole.classes, whole.preprocess, whole.spec)
    program = jax.export.deserialize(bytearray(formats.convert(half, "stablehlo")))
    probabilities = jax.nn.softmax(program.call(images()), axis=-1)
    np.testing.assert_allclose(probabilities, Predictor(whole)(images()), atol=1e-5)


@pytest.mark.usefixtures("as_a_user")
def test_an_export_that_is_not_equal_is_not_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read = formats._read_safetensors
    monkeypatch.setattr(
        formats, "_read_safetensors", lambda *args: lambda images: read(*args)(images) + np.float32(1e-2)
    )
    with pytest.raises(ValueError, match=r"differs from the model by 0\.01, more than 0\.0001: nothing was written"):
        smallvit.export(folder, "safetensors", tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("as_a_user")
def test_what_a_converter_cannot_do_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise NotImplementedError("\nno such operation\nand much more")

    monkeypatch.setattr(formats, "_read_safetensors", fail)
    with pytest.raises(ValueError, match=r"^sl_vit_tiny_data cannot be exported to safetensors \(no such operation\)$"):
        smallvit.export(folder, "safetensors", tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("opset", [18, 21])
def test_an_onnx_file_of_another_opset(opset: int, folder: Path, tmp_path: Path):
    required("jax2onnx")
    onnx, onnxruntime = required("onnx"), required("onnxruntime")
    path = smallvit.export(folder, "onnx", tmp_path / "m.onnx", opset=opset)
    assert [each.version for each in onnx.load(path).opset_import if each.domain == ""] == [opset]
    (logits,) = onnxruntime.InferenceSession(path).run(None, {"images": images()})
    np.testing.assert_allclose(jax.nn.softmax(logits, axis=-1), Predictor(folder)(images()), atol=1e-5)


@pytest.mark.xdist_group("train_run")
@pytest.mark.parametrize("option", [{"quantize": "int8"}, {"half": True}])
def test_a_compressed_onnx_file(option: dict, reference: Path, photos: Path, tmp_path: Path):
    required("jax2onnx")
    onnx, onnxruntime = required("onnx"), required("onnxruntime")
    path = smallvit.export(reference, "onnx", tmp_path / "m.onnx", **option)
    weights = {each.data_type for each in onnx.load(path).graph.initializer if np.prod(each.dims) > 100}
    kinds = onnx.TensorProto
    assert (kinds.INT8 if "quantize" in option else kinds.FLOAT16) in weights
    stored = json.loads((tmp_path / "m.onnx.json").read_text())
    assert stored["compression"] == ("int8" if "quantize" in option else "half")
    measured = stored["measured"]
    assert (measured["part"], measured["images"]) == ("test", 6)
    assert measured["float32"]["top1"] == json.loads((reference / "result.json").read_text())["test_top1"]
    assert measured["compressed"]["bytes"] == path.stat().st_size
    session = onnxruntime.InferenceSession(path)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == stored["classes"]
    predictor = Predictor(reference)
    seen = np.stack([predictor.decode(file) for file in sorted(photos.rglob("*.png"))])
    (logits,) = session.run(["logits"], {"images": seen})
    assert logits.dtype == np.float32
    np.testing.assert_allclose(softmax(logits / np.float32(stored["temperature"])), predictor(seen), atol=0.05)


def test_what_compression_costs_is_said():
    before = {"top1": 80.0, "images_per_second": 100.0, "bytes": 2**20}
    after = {"top1": 70.0, "images_per_second": 50.0, "bytes": 2**18}
    lines = compression.describe({"part": "test", "images": 50, "float32": before, "compressed": after})
    assert lines[0] == "accuracy 80.00 -> 70.00 % on 50 test images"
    assert lines[3].startswith("warning: this costs 10.0 points of accuracy, 5 of 50 images;")
    assert lines[4].startswith("not faster on this machine")
    assert len(compression.describe({"part": "test", "images": 50, "float32": after, "compressed": before})) == 3


MISTAKES: dict[str, tuple[list[str], str]] = {
    "opset of another format": (
        ["{model}", "--format", "stablehlo", "--opset", "18"],
        "opset, quantize and half are for onnx",
    ),
    "opset": (["{model}", "--format", "onnx", "--opset", "3"], "opset=3 must be at least 18"),
    "both": (["{model}", "--format", "onnx", "--half", "--quantize", "int8"], "quantize and half exclude each other"),
    "no images to calibrate on": (
        ["{model}", "--format", "onnx", "--quantize", "int8"],
        "int8 is measured on the run's data, which is missing: leave it out",
    ),
    "no folder": (["{tmp}/none", "--format", "onnx"], "{tmp}/none: there is no such folder"),
    "a folder without a model": (["{tmp}", "--format", "stablehlo"], "{tmp} holds no model"),
    "ending": (
        ["{model}", "--format", "onnx", "--out", "{tmp}/m.bin"],
        "{tmp}/m.bin must end in .onnx",
    ),
    "out is a folder": (
        ["{model}", "--format", "safetensors", "--out", "{tmp}/folder.safetensors"],
        "{tmp}/folder.safetensors is a folder",
    ),
    "below a file": (
        ["{model}", "--format", "safetensors", "--out", "{tmp}/file/m.safetensors"],
        "cannot write to {tmp}/file",
    ),
    "no onnx": (
        ["{model}", "--format", "onnx", "--out", "{tmp}/m.onnx"],
        "export to onnx needs jax2onnx: pip install 'smallvit[onnx]'",
    ),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(
    mistake: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    args, message = MISTAKES[mistake]
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setitem(sys.modules, "jax2onnx", None)  # as if not installed
    args = [arg.format(tmp=tmp_path, model=folder) for arg in args]
    assert run_command(monkeypatch, tmp_path, "export", *args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("smallvit: ")
    assert message.format(tmp=tmp_path) in line
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_writes_into_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_command(monkeypatch, tmp_path, "export", folder, "--format", "safetensors") == 0
    assert capsys.readouterr().out.startswith(f"{folder}/export/model.safetensors (")
    assert sorted(path.name for path in (folder / "export").iterdir()) == [
        "model.safetensors",
        "model.safetensors.json",
    ]
