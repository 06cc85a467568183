"""The parts of training, each by itself: configuration, rates, weight decay, the step, the mesh, files."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import create_model
from smallvit.augment import Augment
from smallvit.common.files import read_json, write_bytes
from smallvit.data import Preprocess
from smallvit.runs.folder import create_run, locked, open_run
from smallvit.runs.prediction import make_predict
from smallvit.runs.saved import Spec, from_pretrained, save_model
from smallvit.training import RECIPES, MachineOptions, Recipe, RecipeOptions, RunOptions, TrainConfig
from smallvit.training.mesh import make_mesh
from smallvit.training.optimiser import kernels, learning_rates, optimiser
from smallvit.training.step import make_init, make_step


@pytest.fixture(autouse=True)
def as_optax_needs():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


FIELDS = dict(dim=16, depth=1, heads=2, mlp_dim=16)
PREPROCESS = Preprocess((8, 8), 3, "crop", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
PLAIN = Recipe(learning_rate=1e-2, weight_decay=0.0, batch_size=8)


def test_rates_grow_linearly_then_fall_as_a_cosine():
    rates = learning_rates(Recipe(learning_rate=1.0, weight_decay=0.0, warmup=0.1, floor=0.0), 100)
    assert rates.shape == (100,)
    np.testing.assert_allclose(rates[:11], np.arange(11) / 10, atol=1e-6)
    np.testing.assert_allclose(rates[55], 0.5 * (1 + math.cos(math.pi * 45 / 90)), atol=1e-6)
    assert rates[-1] < 0.001


def test_a_constant_rate():
    assert set(learning_rates(RECIPES["keras"], 7)) == {np.float32(1e-3)}


def test_the_papers_recipe():
    paper = RECIPES["paper"]
    rates = learning_rates(paper, 117_100)
    np.testing.assert_allclose([rates[0], rates[11_710], rates[-1]], [1e-6, 3e-3, 1e-6], rtol=1e-3)
    assert (paper.passes, paper.epochs, paper.batch_size, paper.weight_decay) == (3, 100, 128, 0.05)
    assert paper.augment == Augment(
        True, 4, policy="cifar10", erasing=0.25, mixup=0.25, cutmix=0.25, label_smoothing=0.1
    )


def test_only_kernels_decay_unless_all_do():
    params = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "positions": {"grid": jnp.ones((2, 2))}}
    assert kernels(params) == {"dense": {"kernel": True, "bias": False}, "positions": {"grid": False}}
    still = jax.tree.map(jnp.zeros_like, params)
    for decay_all in (False, True):
        update = optimiser(Recipe(learning_rate=1.0, weight_decay=0.5, decay_all=decay_all))
        updates, _ = update.update(still, update.init(params), params)
        np.testing.assert_allclose(updates["dense"]["kernel"], -0.5)
        np.testing.assert_allclose(updates["positions"]["grid"], -0.5 if decay_all else 0)


class Small:
    """A tiny model with its jitted step."""

    def __init__(
        self, recipe: Recipe, name: str = "vit_tiny_data", accumulate: int = 1, weights: object = None
    ) -> None:
        fields = FIELDS if name == "vit_tiny_data" else {}
        self.model = create_model(name, num_classes=3, image_size=8, **fields)
        update = optimiser(recipe)
        self.state = jax.jit(make_init(self.model, recipe, update, (8, 8, 3)))(jax.random.key(0))
        self.step = jax.jit(make_step(self.model, recipe, update, PREPROCESS, weights, accumulate))
        draw = np.random.default_rng(0)
        self.labels = (np.arange(8) % 3).astype(np.int32)
        self.images = (draw.integers(0, 80, (8, 8, 8, 3)) + 80 * self.labels[:, None, None, None]).astype(np.uint8)

    def run(self, steps: int, rate: float = 1e-2):
        state, losses = self.state, []
        for _ in range(steps):
            state, metrics = self.step(state, self.images, self.labels, jax.random.key(1), np.float32(rate))
            losses.append(float(metrics.loss))
        return state, losses, metrics


def test_it_learns_and_the_average_follows():
    state, losses, metrics = Small(replace(PLAIN, ema=0.9)).run(30)
    assert losses[0] > 0.9
    assert losses[-1] < 0.1
    assert int(metrics.correct) == 8
    assert int(state.step) == 30
    young, old = (float(jnp.abs(x["head"]["kernel"]).mean()) for x in (state.average, state.params))
    assert young != old
    assert abs(young - old) < 0.3 * old


def test_the_average_starts_quickly():
    small = Small(replace(PLAIN, ema=0.999))
    state, _, _ = small.run(1)
    # decay 1/10 at the first step
    expected = 0.1 * small.state.params["head"]["bias"] + 0.9 * state.params["head"]["bias"]
    np.testing.assert_allclose(state.average["head"]["bias"], expected, rtol=1e-5)


def test_a_batch_in_parts_is_the_same_batch():
    whole, _, _ = Small(PLAIN).run(2)
    parts, _, _ = Small(PLAIN, accumulate=4).run(2)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_classes_can_be_weighed():
    _, (plain, *_), _ = Small(PLAIN).run(1)
    _, (double, *_), _ = Small(PLAIN, weights=jnp.full(3, 2.0)).run(1)
    np.testing.assert_allclose(double, 2 * plain, rtol=1e-5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TrainConfig(minutes=1.0, epochs=1.0), "both minutes and epochs"),
        (lambda: TrainConfig(minutes=0.0), "minutes=0.0 must be positive"),
        (lambda: TrainConfig(epochs=-1.0), "epochs=-1.0 must be positive"),
        (lambda: TrainConfig(fields=("dim",)), "field 'dim' must look like dim=96"),
        (lambda: TrainConfig(machine=MachineOptions(accumulate=0)), "accumulate=0 must be at least 1"),
        (lambda: TrainConfig(in_recipe=RecipeOptions(learning_rate=0.0)), "learning_rate=0.0 must be positive"),
        (lambda: TrainConfig(in_recipe=RecipeOptions(ema=1.0)), "ema=1.0 must be at least 0 and below 1"),
        (lambda: TrainConfig(in_recipe=RecipeOptions(batch_size=7, repeats=2)), "divisible by repeats=2"),
        (lambda: make_mesh("data=2"), "mesh 'data=2' is for 2 devices, but there are 1"),
        (lambda: make_mesh("model=1"), "must look like data=4,fsdp=2"),
    ],
)
def test_bad_configurations(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configuration_survives_json():
    config = TrainConfig(
        "photos",
        fields=("dim=96", "spt=false"),
        image_size=(32, 64),
        minutes=2.5,
        in_recipe=RecipeOptions(flip=False, batch_size=16),
        run=RunOptions(cache_dir=Path("/tmp/x")),
    )
    again = TrainConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.full_recipe.batch_size == 16
    assert not again.full_recipe.augment.flip
    assert again.model_fields == {"dim": 96, "spt": False}


def test_a_run_folder_is_made_once(tmp_path: Path):
    first, second = (create_run(tmp_path, None, "x", {}) for _ in range(2))
    assert (first.name, second.name) == ("x", "x-2")
    with pytest.raises(ValueError, match="exists: choose another --name"):
        create_run(tmp_path, "x", "y", {})
    with locked(first), pytest.raises(ValueError, match="in use by another process"), locked(first):
        pass


def test_only_an_unfinished_run_is_gone_on_with(tmp_path: Path):
    with pytest.raises(ValueError, match="is no folder"):
        open_run(tmp_path / "none")
    with pytest.raises(ValueError, match="is no run of ours"):
        open_run(tmp_path)
    run = create_run(tmp_path, "x", "", {"a": 1})
    assert open_run(run) == {"a": 1}
    (run / "result.json").write_text("{}")
    with pytest.raises(ValueError, match="is finished"):
        open_run(run)


def test_a_file_is_whole_or_not_there(tmp_path: Path):
    path = tmp_path / "x.json"
    write_bytes(path, b'{"a": 1}')
    with pytest.raises(TypeError):
        write_bytes(path, "no bytes")  # pyright: ignore
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is no valid JSON"):
        read_json(path)


def test_a_model_folder_says_all_that_is_needed(tmp_path: Path):
    spec = Spec("sl_vit_tiny_data", 3, (8, 8), {**FIELDS, "dtype": "bfloat16"})
    model = spec.create()
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    save_model(tmp_path / "run/model", spec, variables, ("a", "b", "c"), PREPROCESS)
    images = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3)).astype(np.uint8)
    expected = jax.jit(make_predict(model, PREPROCESS))(variables, images)
    for folder in (tmp_path / "run", tmp_path / "run/model"):
        saved = from_pretrained(folder)
        assert (saved.classes, saved.preprocess, saved.spec) == (("a", "b", "c"), PREPROCESS, spec)
        np.testing.assert_array_equal(
            jax.jit(make_predict(saved.model, saved.preprocess))(saved.variables, images), expected
        )

    weights = tmp_path / "run/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        from_pretrained(tmp_path / "run")
    with pytest.raises(ValueError, match="holds no model"):
        from_pretrained(tmp_path)
