"""The parts of training, one by one: configuration, rates, weight decay, the step, the mesh, files."""

import json
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from optax.contrib import scale_by_muon

from smallvit import create_model
from smallvit import kernels as native
from smallvit.augment import Augment, augment_batch
from smallvit.common.files import read_json, write_bytes
from smallvit.common.paths import by_path
from smallvit.data import Dataset, Preprocess, Split
from smallvit.runs.folder import create_run, locked, open_run
from smallvit.runs.prediction import make_predict
from smallvit.runs.saved import Spec, from_pretrained, save_model
from smallvit.training import RECIPES, MachineOptions, Recipe, RecipeOptions, RunOptions, TrainConfig, choice
from smallvit.training.choice import choose_augmentation, choose_model
from smallvit.training.mesh import make_mesh
from smallvit.training.optimiser import _as_matrices, kernels, optimiser
from smallvit.training.plan import MOMENTS, Plan, rate_at
from smallvit.training.step import STILL, Pace, make_init, make_step
from smallvit.training.trainer import Trainer, _class_weights


@pytest.fixture(autouse=True)
def as_optax_needs():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


FIELDS = dict(dim=16, depth=1, heads=2, mlp_dim=16)
PREPROCESS = Preprocess((8, 8), 3, "crop", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
PLAIN = Recipe(learning_rate=1e-2, weight_decay=0.0, batch_size=8)


def plan(steps: int, **fields: object) -> Plan:
    return Plan(
        **{**dict(batch_size=8, epoch=10.0, evaluations=5.0, seconds=None, data="", decisions=((0, steps),)), **fields}
    )


def test_rates_grow_linearly_then_fall():
    recipe = Recipe(learning_rate=1.0, weight_decay=0.0, warmup=0.1)
    np.testing.assert_allclose(
        [rate_at(recipe, p) for p in (0.0, 0.05, 0.1, 0.55, 1.0)], [0, 0.5, 1, 0.5, 0], atol=1e-9
    )
    linear = replace(recipe, schedule="linear")
    np.testing.assert_allclose([rate_at(linear, p) for p in (0.05, 0.1, 0.325, 1.0)], [0.5, 1, 0.75, 0], atol=1e-9)
    assert rate_at(replace(recipe, floor=0.1), 1.0) == pytest.approx(0.1)


def test_a_constant_rate():
    assert {rate_at(RECIPES["keras"], p) for p in (0.0, 0.3, 1.0)} == {1.0}


def test_weight_decay_is_a_share_of_the_rate():
    recipe = Recipe(learning_rate=1e-3, weight_decay=0.8, schedule="linear")
    for step in (0, 5, 9):
        pace = plan(10).pace(recipe, step)
        assert pace.decay == pytest.approx(0.8 * 1e-3 * pace.rate)


def test_the_horizon_of_the_average_follows_the_length_of_the_run():
    recipe = Recipe(learning_rate=1e-3, weight_decay=0.0, ema=0.05)
    assert plan(1000).pace(recipe, 0).ema == pytest.approx(1 - 1 / 50)
    assert plan(10).pace(recipe, 0).ema == 0


def test_a_decision_changes_the_pace_and_nothing_before_it():
    first = plan(100, seconds=60.0)
    later = first.decided(50, 25)
    assert (later.steps, later.progress(50), later.progress(75)) == (75, 0.5, 1.0)
    assert [later.progress(step) for step in range(51)] == [first.progress(step) for step in range(51)]
    assert later.progress(51) == pytest.approx(0.52)
    again = later.decided(60, 30)
    assert (again.steps, again.progress(90)) == (90, pytest.approx(1.0))
    assert again.progress(60) == pytest.approx(0.7)
    assert Plan.from_json(json.loads(json.dumps(again.to_json()))) == again


def test_a_run_with_a_time_limit_decides_at_few_moments():
    timed = plan(1000, seconds=60.0)
    moments = [step for step in range(1, 1001) if timed.decides(step)]
    assert moments == [round(1000 * moment) for moment in MOMENTS]
    assert not any(plan(1000).decides(step) for step in range(1, 1001))
    assert not timed.decided(100, 900).decides(100)  # it is decided: a resumed run follows


def test_evaluations_are_spread_evenly_and_the_last_step_is_one():
    assert [step for step in range(1, 51) if plan(50).evaluates(step)] == [10, 20, 30, 40, 50]
    assert [step for step in range(1, 8) if plan(7, evaluations=2.5).evaluates(step)] == [3, 6, 7]


def test_more_epochs_lead_to_a_larger_model_and_more_augmentation():
    assert choose_model({"hybrid_vit_tiny": 3.0, "hybrid_vit_small": 2.0, "hybrid_vit_base": 1.0}) == "hybrid_vit_tiny"
    assert (
        choose_model({"hybrid_vit_tiny": 900.0, "hybrid_vit_small": 700.0, "hybrid_vit_base": 300.0})
        == "hybrid_vit_base"
    )
    assert (
        choose_model({"hybrid_vit_tiny": 300.0, "hybrid_vit_small": 190.0, "hybrid_vit_base": 98.0})
        == "hybrid_vit_small"
    )
    assert choose_augmentation(3.0) == {}
    assert "policy" not in choose_augmentation(48.0)
    assert "policy" in choose_augmentation(94.0)
    assert {"cutmix", "policy"} <= choose_augmentation(1000.0).keys()


@pytest.mark.skipif(native.status().instruction_set is None, reason=str(native.status()))
def test_the_choice_knows_that_there_are_kernels(monkeypatch: pytest.MonkeyPatch):
    """Without them a step takes twice as long, so that half as many epochs fit."""
    monkeypatch.setattr(choice, "products_per_second", lambda: 5e10)
    data = labelled(np.arange(6) % 3)

    def epochs() -> float:
        _, reason = choice.choose(TrainConfig(model="hybrid_vit_tiny", minutes=6.0), data)
        return float(reason.split()[1])  # about N epochs

    fast = epochs()
    with native.disabled():
        assert epochs() == pytest.approx(fast / 2, rel=0.01)  # printed with three digits


def test_the_papers_recipe():
    paper = RECIPES["paper"]
    rates = [paper.learning_rate * rate_at(paper, progress) for progress in (0.0, 0.1, 1.0)]
    np.testing.assert_allclose(rates, [1e-6, 3e-3, 1e-6], rtol=1e-3)
    assert (paper.passes, paper.epochs, paper.batch_size, paper.weight_decay) == (3, 100, 128, 0.05)
    assert paper.augment == Augment(
        True, 4, policy="imagenet", erasing=0.25, mixup=0.25, cutmix=0.25, label_smoothing=0.1, fill="black"
    )


def test_the_papers_recipe_has_the_policy_of_the_data():
    data, config = labelled(np.arange(3)), TrainConfig(recipe="paper")
    for policy in ("cifar10", "svhn", "imagenet"):
        assert config.recipe_for(replace(data, policy=policy)).augment.policy == policy
    said = TrainConfig(recipe="paper", in_recipe=RecipeOptions(policy="none"))
    assert said.recipe_for(replace(data, policy="svhn")).augment.policy == "none"
    assert TrainConfig().recipe_for(replace(data, policy="svhn")).augment.policy == "none"


def test_kerass_recipe_decays_as_its_card():
    keras = RECIPES["keras"]
    np.testing.assert_allclose([plan(50).pace(keras, step).decay for step in range(50)], 1e-4, rtol=1e-6)
    assert keras.decay_all


def test_only_kernels_decay_unless_all_do():
    params = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "positions": {"grid": jnp.ones((2, 2))}}
    assert kernels(params) == {"dense": {"kernel": True, "bias": False}, "positions": {"grid": False}}
    for decay_all in (False, True):
        small = Small(Recipe(learning_rate=1.0, weight_decay=0.5, decay_all=decay_all))
        state, _, _ = small.run(1, rate=0.0, decay=0.5)
        before = by_path(small.state.params)
        for path, leaf in by_path(state.params).items():
            factor = 0.5 if decay_all or path.endswith("/kernel") else 1.0
            np.testing.assert_allclose(leaf, factor * before[path], atol=1e-6, err_msg=path)


def test_muon_trains_the_hidden_matrices_and_adam_the_rest():
    shapes = {
        "head": {"kernel": (32, 20), "bias": (20,)},
        "block": {"kernel": (32, 64)},
        "conv": {"kernel": (3, 3, 16, 32)},
        "few": {"kernel": (3, 3, 1, 16)},
        "norm": {"scale": (32,)},
    }
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(lambda shape: jnp.asarray(draw(size=shape)), shapes, is_leaf=lambda x: isinstance(x, tuple))
    update = optimiser(Recipe(learning_rate=1e-3, weight_decay=0.0, optimiser="muon", matrix_rate=0.1))
    updates, _ = update.update(params, update.init(params), params)
    for name in ("block", "conv"):  # orthogonal: all singular values are about the same
        matrix = np.asarray(updates[name]["kernel"]).reshape(-1, params[name]["kernel"].shape[-1])
        values = np.linalg.svd(matrix, compute_uv=False) / (0.1 * max(1, matrix.shape[1] / matrix.shape[0]) ** 0.5)
        assert 0.6 < values.min() < values.max() < 1.3
    for path, leaf in by_path({name: updates[name] for name in ("head", "few", "norm")}).items():
        np.testing.assert_allclose(np.abs(leaf), 1e-3, rtol=1e-3, err_msg=path)  # Adam's first step


def test_muon_is_that_of_optax():
    shapes = {"a": (32, 64), "b": (64, 32), "c": (3, 3, 16, 32), "d": (32, 64), "e": (20, 20), "flat": (32, 64)}
    key, names = jax.random.key(0), list(shapes)
    recipe = Recipe(learning_rate=1e-3, weight_decay=0.0, optimiser="muon", matrix_rate=1.0)
    ours, optaxs = optimiser(recipe), scale_by_muon(weight_dimension_numbers=_as_matrices)
    params = {name: {"kernel": jnp.zeros(shapes[name])} for name in names}
    state, theirs = ours.init(params), optaxs.init(params)
    for step in range(2):
        keys = jax.random.split(jax.random.fold_in(key, step), len(names))
        grads = {
            name: {"kernel": jax.random.normal(each, shapes[name])} for name, each in zip(names, keys, strict=True)
        }
        grads["flat"]["kernel"] = jnp.outer(grads["flat"]["kernel"][:, 0], jnp.ones(64))  # of rank 1
        updates, state = ours.update(grads, state, params)
        expected, theirs = optaxs.update(grads, theirs, params)
    for name in names:
        wanted = np.asarray(expected[name]["kernel"])
        wider = max(1.0, wanted.shape[-1] ** 2 / wanted.size) ** 0.5
        # Singular values of 0 amplify rounding errors.
        np.testing.assert_allclose(updates[name]["kernel"], -wider * wanted, atol=2e-4 if name == "flat" else 1e-5)


@pytest.mark.skipif(not native.usable(), reason=str(native.status()))
@pytest.mark.parametrize("fields", [{}, {"layer_decay": 0.7, "decay_all": True, "ema": 0.0}, {"freeze": "backbone"}])
def test_a_step_with_update_kernels_is_that_of_optax(monkeypatch, fields):
    recipe = replace(RECIPES["default"], batch_size=8, clip=0.5, **fields)
    small = Small(recipe, "hybrid_vit_tiny")
    ours, _, _ = small.run(3, decay=0.01)
    batch = small.images, small.labels, jax.random.key(1), STILL, PREPROCESS.normalisation
    text = str(jax.make_jaxpr(small.step)(small.state, *batch))
    assert all(f"smallvit_{name}" in text for name in ("clip", "adam", "weighted_sums"))
    assert ("smallvit_muon" in text) == (recipe.freeze == "none")
    monkeypatch.setattr(native, "takes_arrays", lambda *_: False)
    theirs, _, _ = Small(recipe, "hybrid_vit_tiny").run(3, decay=0.01)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=jax.tree_util.keystr(path))


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

    def run(self, steps: int, rate: float = 1.0, decay: float = 0.0, ema: float = 0.9):
        state, losses, pace = self.state, [], Pace(np.float32(rate), np.float32(decay), np.float32(ema))
        batch = self.images, self.labels, jax.random.key(1), pace, PREPROCESS.normalisation
        for _ in range(steps):
            state, metrics = self.step(state, *batch)
            losses.append(float(metrics.loss))
        return state, losses, metrics


def test_it_learns_and_the_average_follows():
    state, losses, metrics = Small(replace(PLAIN, ema=0.9)).run(30)
    assert losses[0] > 0.9
    assert losses[-1] < 0.1
    assert int(metrics.correct) == 8
    assert int(state.step) == 30
    young, old = (float(jnp.abs(x["head"]["kernel"]).mean()) for x in (state.average["params"], state.params))
    assert young != old
    assert abs(young - old) < 0.3 * old


def test_the_average_starts_quickly():
    small = Small(replace(PLAIN, ema=0.999))
    state, _, _ = small.run(1, ema=0.999)
    # decay 1/10 at the first step
    expected = 0.1 * small.state.params["head"]["bias"] + 0.9 * state.params["head"]["bias"]
    np.testing.assert_allclose(state.average["params"]["head"]["bias"], expected, rtol=1e-5)


def test_a_batch_in_parts_is_the_same_batch():
    whole, _, _ = Small(PLAIN).run(2)
    parts, _, _ = Small(PLAIN, accumulate=4).run(2)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("augment", [Augment(label_smoothing=0.1), Augment(label_smoothing=0.1, mixup=1.0)])
def test_balance_weighs_each_image_by_its_class(augment):
    """The weight depends on the image's class, not on the share of every class in smoothed labels."""
    recipe, counts = replace(PLAIN, augment=augment), np.array([3, 3, 2])
    weights = _class_weights(replace(recipe, balance=True), labelled(np.repeat([0, 1, 2], 10 * counts)))
    assert weights is not None
    np.testing.assert_allclose(weights, 8 / (3 * counts), rtol=1e-6)
    weights = jnp.array([0.4, 1.0, 50.0])
    small = Small(recipe, weights=weights)
    _, (loss, *_), _ = small.run(1)

    key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(1), 0))
    batch = key, jnp.asarray(small.images), jnp.asarray(small.labels), 3
    x, targets = augment_batch(*batch, augment, PREPROCESS.normalise)
    _, shown = augment_batch(*batch, replace(augment, label_smoothing=0.0), PREPROCESS.normalise)
    logits = small.model.apply({"params": small.state.params}, x, train=True, rngs={"dropout": dropout_key})
    each = -(targets * jax.nn.log_softmax(logits)).sum(1)
    np.testing.assert_allclose(loss, (each * (shown @ weights)).mean(), rtol=1e-4)


@pytest.mark.usefixtures("as_a_user")  # a trainer has shapes where the step has arrays
def test_statistics_of_a_young_model_belong_to_its_weights():
    """In short runs, running statistics lag behind fast-changing weights, and evaluation is at chance."""
    labels = (np.arange(32) % 3).astype(np.int32)
    draw = np.random.default_rng(0).integers(0, 80, (32, 16, 16, 3))
    images = (draw + 80 * labels[:, None, None, None]).astype(np.uint8)
    split = Split(images, labels, [""] * 32)
    data = Dataset("made up", ("a", "b", "c"), split, split, None, replace(PREPROCESS, size=(16, 16)), ())
    fields = dict(widths=(8, 8, 16), strides=(1, 2, 2), conv_depth=1, depth=1, heads=2, mlp_dim=16)
    model = create_model("hybrid_vit_tiny", num_classes=3, image_size=16, **fields)
    recipe = replace(RECIPES["default"], batch_size=32)
    trainer = Trainer(model, recipe, data, make_mesh(None), 32, 0, accumulate=1, remat=False)
    state, pace = trainer.init(), Pace(np.float32(1), np.float32(0.1), np.float32(0.5))
    for step in range(12):
        state, _ = trainer.step(state, step, pace)

    settled = trainer.settled(state, 12)
    jax.tree.map(np.testing.assert_array_equal, settled.variables["params"], state.average["params"])
    x = jnp.asarray(data.preprocess.normalise(images))
    own, _ = model.apply(settled.variables, x, train=True, mutable=["batch_stats"])  # by the batch's own statistics
    used = model.apply(settled.variables, x)
    before = model.apply(state.variables, x)
    assert np.abs(used - own).mean() < 0.3 * np.abs(before - own).mean()
    assert trainer.settled(state, 10_000) is state
    trainer.step(state, 12, pace)  # it is not used up


def labelled(labels: np.ndarray) -> Dataset:
    split = Split(np.zeros((len(labels), 8, 8, 3), np.uint8), labels.astype(np.int32), [""] * len(labels))
    return Dataset("made up", ("a", "b", "c"), split, split, None, PREPROCESS, ())


@pytest.mark.usefixtures("as_a_user")
def test_programs_are_for_any_images_of_the_same_shape():
    """So that they can be compiled before the images are decoded, and kept for other data."""
    model = create_model("vit_tiny_data", num_classes=3, image_size=8, **FIELDS)
    blank = labelled(np.arange(48) % 3)
    trainer = Trainer(model, replace(PLAIN, batch_size=16), blank, make_mesh(None), 16, 0, accumulate=1, remat=False)
    images = np.random.default_rng(0).integers(0, 256, (48, 8, 8, 3), np.uint8)
    train = replace(blank.train, images=images)
    dark, bright = (
        replace(blank, train=train, val=train, preprocess=replace(PREPROCESS, mean=(mean,) * 3)) for mean in (0.1, 0.9)
    )
    states = []
    for data in (dark, bright):
        assert trainer.takes(data)
        trainer.data = data
        state, _ = trainer.step(trainer.init(), 0, Pace(np.float32(1), np.float32(0), np.float32(0)))
        states.append((state, trainer.evaluate(state, data.val).loss))
    assert trainer._step._cache_size() == trainer._predict._cache_size() == 1
    assert states[0][1] != states[1][1]
    fewer = labelled(np.arange(47) % 3)
    assert not trainer.takes(fewer)  # to evaluate; there are enough to train on
    assert trainer.takes(replace(fewer, val=blank.val))
    assert not trainer.takes(replace(labelled(np.arange(15) % 3), val=blank.val))


def test_balance_needs_images_of_every_class():
    with pytest.raises(ValueError, match=r"there are no images of 'b' to train on, so --balance cannot"):
        _class_weights(replace(PLAIN, balance=True), labelled(np.array([0, 2, 2])))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TrainConfig(minutes=1.0, epochs=1.0), "both minutes and epochs"),
        (lambda: TrainConfig(minutes=0.0), "minutes=0.0 must be positive"),
        (lambda: TrainConfig(epochs=-1.0), "epochs=-1.0 must be positive"),
        (lambda: TrainConfig(fields=("dim",)), "field 'dim' must have the form NAME=VALUE"),
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
        drop_path=0.2,
        in_recipe=RecipeOptions(flip=False, batch_size=16, resized_crop=(0.5, 1.0)),
        run=RunOptions(cache_dir=Path("/tmp/x")),
    )
    again = TrainConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.full_recipe.batch_size == 16
    assert not again.full_recipe.augment.flip
    assert again.model_fields == {"dim": 96, "spt": False, "drop_path": 0.2}


@pytest.mark.parametrize("recipe", ["default", "finetune", "paper", "keras"])
def test_images_are_mirrored_where_the_data_allows(recipe):
    photos, digits = labelled(np.arange(3)), replace(labelled(np.arange(3)), mirrors=False)
    config = TrainConfig(recipe=recipe)
    assert config.recipe_for(photos) == RECIPES[recipe]
    assert config.recipe_for(digits).augment == replace(RECIPES[recipe].augment, flip=False)
    said = replace(config, in_recipe=RecipeOptions(flip=True, batch_size=9))
    assert said.recipe_for(digits) == replace(RECIPES[recipe], batch_size=9)


def test_every_augmentation_has_an_option_of_its_name():
    known = {each.name for each in fields(Recipe)} | {each.name for each in fields(Augment)}
    options = {each.name for each in fields(RecipeOptions)}
    assert {each.name for each in fields(Augment)} <= options <= known
    args = "--magnitude 7 --num-ops 3 --crop-padding 0.1 --scale 0.5 1 --color-jitter 0.4 --rotation 0.1 --zoom 0.2"
    config = tyro.cli(
        tyro.conf.OmitArgPrefixes[TrainConfig], args=[*args.split(), "--alpha", "0.8", "--drop-path", "0.1"]
    )
    assert config.full_recipe.augment == replace(
        RECIPES["default"].augment,
        **dict(magnitude=7, num_ops=3, crop_padding=0.1, resized_crop=(0.5, 1.0), colour=0.4, rotation=0.1, zoom=0.2),
        alpha=0.8,
    )
    assert config.model_fields == {"drop_path": 0.1}


def test_a_run_folder_is_made_once(tmp_path: Path):
    first, second = (create_run(tmp_path, None, "x", {}) for _ in range(2))
    assert (first.name, second.name) == ("x", "x-2")
    with pytest.raises(ValueError, match="exists: choose another --name"):
        create_run(tmp_path, "x", "y", {})
    with locked(first), pytest.raises(ValueError, match="in use by another process"), locked(first):
        pass


def test_only_an_unfinished_run_is_gone_on_with(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no such folder"):
        open_run(tmp_path / "none")
    with pytest.raises(ValueError, match="is not a run folder"):
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
    with pytest.raises(ValueError, match=r"x\.json is not valid JSON"):
        read_json(path)


def test_a_model_folder_says_all_that_is_needed(tmp_path: Path):
    spec = Spec("sl_vit_tiny_data", 3, (8, 8), {**FIELDS, "dtype": "bfloat16"})
    model = spec.create()
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    save_model(tmp_path / "run/model", spec, variables, ("a", "b", "c"), PREPROCESS)
    images = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3)).astype(np.uint8)
    expected = jax.jit(make_predict(model, PREPROCESS))(variables, images, PREPROCESS.normalisation)
    for folder in (tmp_path / "run", tmp_path / "run/model"):
        saved = from_pretrained(folder)
        assert (saved.classes, saved.preprocess, saved.spec) == (("a", "b", "c"), PREPROCESS, spec)
        np.testing.assert_array_equal(
            jax.jit(make_predict(saved.model, saved.preprocess))(
                saved.variables, images, saved.preprocess.normalisation
            ),
            expected,
        )

    weights = tmp_path / "run/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        from_pretrained(tmp_path / "run")
    with pytest.raises(ValueError, match="holds no model"):
        from_pretrained(tmp_path)
