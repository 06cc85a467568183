"""Starting from pretrained weights: what is kept, fitted, newly initialised and frozen."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import smallvit
from smallvit import create_model
from smallvit.common.paths import by_path
from smallvit.convert.load import fit_weights, head_paths
from smallvit.data import Dataset, Preprocess, Split, load_data
from smallvit.layers import resample_table
from smallvit.runs.saved import Spec, from_pretrained, save_model
from smallvit.training import RECIPES, Recipe, RecipeOptions, TrainConfig, loop, preparation
from smallvit.training.callbacks import Callback
from smallvit.training.mesh import make_mesh
from smallvit.training.optimiser import layer_rates
from smallvit.training.start import IMAGENET, read_start
from smallvit.training.step import Pace, layer_scales
from smallvit.training.trainer import Trainer
from tests.cases import CASES

pytestmark = pytest.mark.usefixtures("as_optax_needs", "as_a_user")  # a user may give shapes where the step has arrays

FIELDS: dict[str, Any] = dict(dim=16, depth=2, heads=2, mlp_dim=16)
SPEC = Spec("vit_tiny_data", 3, (12, 12), FIELDS)
COLOURS = ("blue", "green", "red")
MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch):
    """Skips pictures and report, which take longer than these runs."""
    monkeypatch.setattr(loop, "finish", lambda *_: {"val_top1": 0.0})


def saved(folder: Path, spec: Spec = SPEC, classes: tuple[str, ...] = COLOURS) -> Path:
    variables = jax.jit(spec.create().init)(jax.random.key(5), jnp.zeros((1, *spec.image_size, 3)))
    save_model(folder, spec, variables, classes, Preprocess(spec.image_size, 3, "crop", MEAN, STD))
    return folder


def halves() -> list[Dataset]:
    """The embedded data set's classes 0 to 4, and a few images of 5 to 9."""
    whole = load_data()
    found = []
    for first, most in ((0, 600), (5, 24)):
        parts = {}
        for part, number in (("train", most), ("val", 80)):
            split = getattr(whole, part)
            rows = np.concatenate([np.flatnonzero(split.labels == first + k)[:number] for k in range(5)])
            parts[part] = Split(split.images[rows], split.labels[rows] - first, [str(row) for row in rows])
        classes = whole.classes[first : first + 5]
        found.append(replace(whole, classes=classes, **parts, test=None))
    return found


def trained(trainer: Trainer, data: Dataset, steps: int, given: dict[str, np.ndarray] | None = None) -> Any:
    trainer.data = data  # the compiled step serves both
    state = trainer.init(given)
    for step in range(steps):
        rate = np.float32(min((step + 1) / 10, 1 - step / steps))
        state, _ = trainer.step(state, step, Pace(rate, np.float32(0), np.float32(0.5)))
    return trainer.variables(state), trainer.evaluate(state, data.val).top1


def test_trained_weights_beat_a_fresh_start_at_equal_steps():
    first, second = halves()
    model = create_model("vit_tiny_data", num_classes=5, image_size=28, **{**FIELDS, "dim": 32})
    recipe = replace(RECIPES["finetune"], layer_decay=0.9)
    trainer = Trainer(model, recipe, first, make_mesh(), 40, 0, accumulate=1, remat=False)
    variables, _ = trained(trainer, first, 400)
    body = {path: array for path, array in by_path(variables).items() if "head" not in path}
    _, fresh = trained(trainer, second, 60)
    _, started = trained(trainer, second, 60, body)
    assert started > fresh + 6, (started, fresh)


class StopAt(Callback):
    def __init__(self, step: int):
        self.at = step

    def step(self, step: int, loss: float) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("without_report")
@pytest.mark.filterwarnings("default")
def test_a_run_starts_from_a_model_and_resumes_without_it(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = saved(tmp_path / "source")
    options: dict[str, Any] = dict(init=source, epochs=2, batch_size=16, runs=tmp_path)
    smallvit.train(photos, name="whole", **options)
    printed = capsys.readouterr().out
    assert "its head is kept: the classes are the same" in printed
    assert "images are resized to 12 x 12" in printed
    assert "mean 0.1 0.2 0.3 and std 0.4 0.5 0.6, those of the source" in printed
    assert "recipe finetune" in printed
    model = json.loads((tmp_path / "whole/model/config.json").read_text())
    assert (model["preprocess"]["mean"], model["preprocess"]["std"]) == (list(MEAN), list(STD))
    assert (model["model"]["name"], model["model"]["fields"]) == ("vit_tiny_data", FIELDS)

    with pytest.raises(smallvit.Stopped):
        smallvit.train(photos, name="stopped", callbacks=[StopAt(3)], **options)
    shutil.rmtree(source)
    smallvit.train(resume=tmp_path / "stopped")
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1]

    # Its own images are still known: the stored digest is that of the source's normalisation.
    from smallvit.runs.source import own_images

    held = own_images(tmp_path / "whole", smallvit.load(tmp_path / "whole"))
    assert not any("warning" in note for note in held.notes)


def test_the_first_state_is_the_source(tmp_path: Path):
    data = halves()[0]
    spec = Spec("vit_tiny_data", 5, (28, 28), FIELDS)
    source = read_start(str(saved(tmp_path / "source", spec, data.classes)))
    data = data.normalised(MEAN, STD)  # grey images become coloured ones
    assert data.train.images.shape[1:] == (28, 28, 3)
    recipe = replace(RECIPES["finetune"], ema=0.1)
    trainer = Trainer(spec.create(), recipe, data, make_mesh(), 8, 0, accumulate=1, remat=False)
    for classes, kept in ((data.classes, True), (data.classes[::-1], False)):
        arrays, line = source.arrays(spec.create(), (28, 28, 3), classes)
        state = trainer.init(arrays)
        weights = load_file(tmp_path / "source/model.safetensors")
        for variables in ({"params": state.params}, state.average):
            same = {path for path, array in by_path(variables).items() if np.array_equal(array, weights[path])}
            # A bias that starts at 0 is the same either way.
            assert same | {"params/head/bias"} == weights.keys() - (set() if kept else {"params/head/kernel"})
        assert ("its head is kept" if kept else "the head is newly initialised, for 5 classes") in line


def test_another_image_size_keeps_the_patches_of_the_source(tmp_path: Path):
    source = read_start(str(saved(tmp_path / "source")))
    config, lines = source.settle(TrainConfig(image_size=24, fields=("dropout=0.1",)))
    assert config.model_fields == {**FIELDS, "patch_size": (3, 3), "dropout": 0.1}
    assert len(lines) == 1
    model = create_model("vit_tiny_data", num_classes=3, image_size=24, **config.model_fields)
    arrays, _ = source.arrays(model, (24, 24, 3), COLOURS)
    assert arrays["params/positions/grid"].shape == (8, 8, 16)
    again = from_pretrained(saved(tmp_path / "larger", Spec("vit_tiny_data", 3, (24, 24), config.model_fields)))
    assert again.spec.fields == config.model_fields
    hash(again.model)  # a field that is a list would raise
    with pytest.raises(ValueError, match=r"is a vit_tiny_data, not a swin_tiny: leave out --model"):
        source.settle(TrainConfig(model="swin_tiny"))
    wide, _ = source.settle(TrainConfig(fields=("dim=32",)))
    model = create_model("vit_tiny_data", num_classes=3, image_size=12, **wide.model_fields)
    with pytest.raises(ValueError, match=r"source does not fit ViT .* wrong shape: .*; give the --model and"):
        source.arrays(model, (12, 12, 3), COLOURS)


def test_weights_of_another_library(tmp_path: Path):
    from tests.test_parity import load

    folder = tmp_path / "timm"
    folder.mkdir()
    save_file(load("timm_vit")[0], folder / "model.safetensors")
    with pytest.raises(ValueError, match="does not say which model it is: give it with --model"):
        read_start(str(folder / "model.safetensors")).settle(TrainConfig())
    given = TrainConfig(model="vit_tiny_patch16")
    config, lines = read_start(str(folder / "model.safetensors")).settle(given)
    assert (config.image_size, config.mean, config.std) == ((224, 224), *IMAGENET)
    assert "resized to 224 x 224, the size of vit_tiny_patch16, since the source has none" in lines[0]
    assert "those of ImageNet" in lines[1]
    facts = {"architecture": "vit", "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.2] * 3, "input_size": [3, 16, 24]}}
    (folder / "config.json").write_text(json.dumps(facts))
    config, lines = read_start(str(folder / "model.safetensors")).settle(given)
    assert f"resized to 16 x 24, the size of {folder / 'model.safetensors'}" in lines[0]
    assert (config.image_size, config.mean, config.std) == ((16, 24), (0.5,) * 3, (0.2,) * 3)
    assert TrainConfig.from_json(config.to_json()) == config
    said = replace(given, mean=(0.0,) * 3, std=(1.0,) * 3, image_size=32)
    assert read_start(str(folder / "model.safetensors")).settle(said) == (said, [])


@pytest.mark.parametrize(
    "facts",
    [
        *({"mean": [0.5] * 3, "std": std} for std in ([0.0] * 3, [[0.5]] * 3, ["0.5"] * 3, [float("nan")] * 3, [0.5])),
        {"mean": [10**400] * 3, "std": [0.5] * 3},
        *({"image_size": size} for size in (-1, 1.5, True, "12", 10**9, [3, "12", "12"], [[12, 12]], {"height": 12})),
    ],
)
def test_a_configuration_of_another_library_that_lies_is_one_line(facts: dict[str, Any], tmp_path: Path):
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**facts, "pretrained_cfg": [1]}))
    start = read_start(str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match=r"the configuration beside .* cannot be used: [^\n]*$"):
        start.settle(TrainConfig(model="vit_tiny_data"))


def test_grey_weights_do_not_take_coloured_images(photos: Path, tmp_path: Path):
    config = TrainConfig(str(photos), model="vit_tiny_data", init="x", mean=(0.5,), std=(0.5,), image_size=12)
    with pytest.raises(ValueError, match="x was trained on grey images, those of photos are coloured"):
        preparation.scan(config)


@pytest.mark.parametrize("name", ["swin", "levit"])
def test_tables_of_offsets_and_distances_follow_the_window(name: str):
    case = CASES[name]
    small = case.make()
    changes: dict[str, Any] = dict(window_size=8, image_size=32) if name == "swin" else dict(image_size=(96, 128))
    large, size = case.make(**changes), (32, 32) if name == "swin" else (96, 128)
    state = {path: np.asarray(leaf) for path, leaf in by_path(case.draw(small)).items()}
    arrays = fit_weights(large, state, (*size, 3), "a file", head=False)
    resized = [path for path in arrays if arrays[path].shape != state[path].shape]
    assert resized
    assert all(path.endswith(("bias/grid", "bias/distances")) for path in resized)
    assert head_paths(large, (*size, 3)) == state.keys() - arrays.keys()


def test_the_middle_of_a_table_stays_its_middle():
    offsets = np.abs(np.arange(7) - 3.0)
    table = (offsets[:, None] + offsets[None])[..., None].astype(np.float32)
    larger = np.asarray(resample_table("bias/grid", table, (15, 15, 1)))[..., 0]
    assert np.unravel_index(larger.argmin(), larger.shape) == (7, 7)
    np.testing.assert_allclose(larger, larger[::-1, ::-1], atol=1e-5)
    distances = (np.arange(6.0)[:, None] + np.arange(6.0)[None])[..., None].astype(np.float32)
    wider = np.asarray(resample_table("bias/distances", distances, (11, 11, 1)))[..., 0]
    assert wider.argmin() == 0
    assert wider[0, 0] == pytest.approx(0, abs=0.4)
    np.testing.assert_allclose(np.diff(wider[2:9, 0]), 11 / 21, atol=0.05)


def test_blocks_near_the_image_learn_slower():
    order = [
        "patches/kernel",
        "block_0/a/bias",
        "peg/kernel",
        "block_1/b/bias",
        "block_1/c/bias",
        "norm/bias",
        "head/x",
    ]
    assert layer_rates(order, 0.5) == dict(zip(order, [0.125, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0], strict=True))
    nested_ = ["stage_0/block_0/x", "stage_1/down/x", "stage_1/block_0/x", "head/x"]
    assert [*layer_rates(nested_, 0.5).values()] == [0.25, 0.25, 0.5, 1.0]


@pytest.mark.parametrize("name", ["vit", "swin", "levit", "regionvit", "crossvit"])
def test_every_architecture_has_depths(name: str):
    case = CASES[name]
    model = case.make()
    scales = by_path(layer_scales(model, replace(RECIPES["finetune"], layer_decay=0.9), (*case.size, case.channels)))
    assert {scale for path, scale in scales.items() if path.startswith("head")} == {1.0}
    assert len({*scales.values()}) >= 3
    assert min(scales.values()) < 0.9
    first = [path for path in scales if path.split("/")[0] in ("patches", "stem_0", "regions", "sm_patches")]
    assert first
    assert all(scales[path] == min(scales.values()) for path in first)


def test_a_frozen_backbone_stays_to_the_bit():
    data = halves()[0]
    model = create_model("hybrid_vit_small", num_classes=5, image_size=28)
    recipe = replace(RECIPES["finetune"], freeze="backbone", batch_size=8)
    trainer = Trainer(model, recipe, data, make_mesh(), 8, 0, accumulate=1, remat=False)
    state = trainer.init()
    before = by_path({"params": state.params, **state.others})
    before = {path: np.asarray(array) for path, array in before.items()}
    for step in range(2):
        state, _ = trainer.step(state, step, Pace(np.float32(1), np.float32(0.1), np.float32(0.3)))
    for variables in ({"params": state.params, **state.others}, state.average):
        after = by_path(variables)
        moved = {path for path in before if not np.array_equal(before[path], after[path])}
        assert moved == {"params/head/bias", "params/head/kernel"}
    assert any(path.startswith("batch_stats") for path in before)
    sizes = [leaf.size for leaf in jax.tree.leaves(state.moments)]
    assert sum(sizes) < 3 * (before["params/head/kernel"].size + 10)


def test_mistakes_are_one_line(tmp_path: Path):
    for make, message in (
        (lambda: TrainConfig(in_recipe=RecipeOptions(freeze="backbone")), "give them with --init"),
        (lambda: TrainConfig(mean=(0.5,)), "mean and std belong together"),
        (lambda: TrainConfig(std=(0.0,), mean=(0.5,)), r"std=\(0.0,\) must be positive"),
        (lambda: Recipe(1.0, 0.0, layer_decay=0.0), "layer_decay=0.0 must be above 0"),
        (lambda: read_start(str(tmp_path / "no")), "does not exist: give a file"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
