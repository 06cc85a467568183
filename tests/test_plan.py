"""The plan of a run: rates, decisions, evaluations, and the choice of the model."""

import json
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import kernels as native
from smallvit.training import RECIPES, Recipe, TrainConfig, choice, loop
from smallvit.training import plan as plans
from smallvit.training.callbacks import Callbacks
from smallvit.training.choice import choose_augmentation, choose_decay, choose_model
from smallvit.training.loop import History, Training, is_kept
from smallvit.training.mesh import make_mesh
from smallvit.training.options import RecipeOptions
from smallvit.training.plan import ENDING, MOMENTS, Plan, ending, make_plan, rate_at
from smallvit.training.progress import Bar, Reporter
from smallvit.training.resizing import mean_cost, phases
from smallvit.training.step import Metrics, State
from smallvit.training.trainer import Trainer
from tests.small import labelled, plan


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


def test_few_validation_images_do_not_end_a_run_early(tmp_path, monkeypatch):
    """The time for the test images grows with the batches, and the preparation of an early evaluation is no step."""
    data = labelled(np.arange(750) % 3)
    data = replace(data, val=replace(data.val, images=data.val.images[:30], labels=data.val.labels[:30]), test=data.val)
    trainer = object.__new__(Trainer)
    trainer.data, trainer.eval_batch_size = data, 256
    assert ending(trainer, 1.0) == ENDING + 4

    training = object.__new__(Training)
    training.folder, training.trainer, training.plan = tmp_path, trainer, plan(1000, seconds=100.0 + ENDING + 4 + 5 * 1)
    monkeypatch.setattr(training, "clock", lambda: 20.0)
    training.evaluating = 1.0
    history = History(training=10.0)  # the other ten seconds were reading, compiling and preparing evaluations
    training._decide(100, history)
    assert training.plan.decisions == ((0, 1000), (100, 900))  # 80 seconds and 5 evaluations left, 10 for 100 steps
    assert (history.decided_step, history.decided_training) == (100, 10.0)
    monkeypatch.setattr(training, "clock", lambda: 40.0)
    history.training = 30.0
    training._decide(200, history)
    assert training.plan.steps == 200 + 305  # 61 seconds and 4 evaluations left, 20 for 100 steps


SPEEDS = {  # how many times as long a step takes, from which share of the time on
    "constant": {0.0: 1.0},
    "a neighbour comes": {0.0: 1.0, 0.35: 2.0},
    "a neighbour comes and goes": {0.0: 1.0, 0.2: 2.0, 0.6: 1.0},
    "a neighbour goes": {0.0: 2.0, 0.55: 1.0},
    "a neighbour comes at the end": {0.0: 1.0, 0.93: 2.0},
    "a slower machine than measured": {0.0: 3.0},
}


@pytest.mark.parametrize("evaluations", [2.0, 20.0])
@pytest.mark.parametrize("progressive", [0.0, 0.65])
@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS.keys())
def test_a_run_takes_its_time_and_no_more(tmp_path, monkeypatch, speeds, progressive, evaluations):
    """The loop itself, with a clock that only the work moves on: 0.2 seconds for a step, 9 for all evaluations."""
    minutes, evaluating, clock = 6.0, 9.0 / evaluations, SimpleNamespace(now=0.0)

    def work(seconds: float) -> None:
        clock.now += seconds * next(
            slow for since, slow in reversed(speeds.items()) if clock.now >= since * 60 * minutes
        )

    class Timeless(Training):
        def __init__(self):
            self.config, self.folder, self.callbacks = TrainConfig(minutes=minutes), tmp_path, Callbacks([])
            self.trainer, self.plan, self.report = trainer, first, Reporter()
            self.started, self.evaluating = 0.0, evaluating

        def _evaluate(self, state, history, pace):
            work(evaluating)
            self.evaluating = evaluating
            history.rows.append({})
            history.loss, history.correct, history.steps = 0.0, 0, 0
            return {}

        def _save(self, state, history):
            pass

    metrics = Metrics(jnp.float32(1), jnp.int32(1))

    class Timed(Trainer):
        def __init__(self):
            self.data, self.eval_batch_size, self.mesh = labelled(np.arange(750) % 3), 256, make_mesh(None)
            self.recipe = replace(RECIPES["default"], progressive=progressive)

        def step(self, state, step, pace, side=1.0):
            work(0.2 * next(phase.cost for phase in phases(progressive) if phase.side == side))
            return state, metrics

    trainer = Timed()
    last = ending(trainer, evaluating)
    fitting = (60 * minutes - last - evaluations * evaluating) / (0.2 * mean_cost(progressive))
    first = plan(
        round(fitting),
        seconds=60 * minutes,
        evaluations=evaluations,
        progressive=progressive,
        evaluating=evaluating,
    )
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(loop, "Bar", lambda *_: nullcontext(SimpleNamespace(show=lambda *_: None, line=lambda _: None)))
    training = Timeless()
    history = History()
    training.run(State(jnp.int32(0), {}, {}, {}, {}), history, threading.Event())
    assert history.step == training.plan.steps
    assert 0.95 <= (clock.now + last) / (60 * minutes) <= 1.03


def test_evaluations_take_a_small_share_of_the_given_epochs(monkeypatch):
    """Few validation images are scored every epoch, many less often; never fewer than six times in six epochs."""

    def evaluations(epochs: float, validation: int) -> float:
        train = labelled(np.arange(900) % 3)
        data = replace(train, val=labelled(np.arange(validation) % 3).val)
        trainer = object.__new__(Trainer)
        trainer.data, trainer.recipe, trainer.batch_size = data, RECIPES["paper"], 10
        return make_plan(TrainConfig(epochs=epochs), trainer, 0.0).evaluations

    assert evaluations(40.0, 90) == 40
    assert evaluations(40.0, 900) == pytest.approx(0.03 * 3 * 3 * 40)
    assert [evaluations(epochs, 900) for epochs in (0.5, 3.0, 8.0)] == [1, 3, 6]
    assert evaluations(1000.0, 90) == 100


def test_a_time_that_start_and_report_take_alone_is_refused(monkeypatch):
    trainer = object.__new__(Trainer)
    trainer.data, trainer.recipe = labelled(np.arange(750) % 3), RECIPES["default"]
    trainer.batch_size, trainer.eval_batch_size = 64, 256
    monkeypatch.setattr(plans, "_measure", lambda _: (0.1, 1.0))
    fewest = (ENDING + 2) / 60  # minutes: the report, and evaluations of two splits
    planned = make_plan(TrainConfig(minutes=fewest + 0.1), trainer, time.monotonic())
    assert planned.evaluating == 1.0
    assert planned.seconds == pytest.approx(60 * (fewest + 0.1))
    assert 30 < planned.steps < 60  # 6 seconds, one of them for an evaluation
    with pytest.raises(ValueError, match=r"leave no time to train: .* take 14 s here, give at least 1 minute$"):
        make_plan(TrainConfig(minutes=fewest), trainer, time.monotonic())


def test_the_last_weights_are_kept_unless_they_are_worse_beyond_chance():
    assert is_kept(60.0, 3.0, None, last=False)
    assert is_kept(60.0, 3.0, 60.0, last=False)
    assert not is_kept(59.0, 3.0, 60.0, last=False)
    assert is_kept(55.0, 3.0, 60.0, last=True)
    assert not is_kept(53.0, 3.0, 60.0, last=True)


def test_evaluations_are_spread_evenly_and_the_last_step_is_one():
    assert [step for step in range(1, 51) if plan(50).evaluates(step)] == [10, 20, 30, 40, 50]
    assert [step for step in range(1, 8) if plan(7, evaluations=2.5).evaluates(step)] == [3, 6, 7]


def test_more_epochs_lead_to_a_larger_model_and_more_augmentation():
    assert choose_model({"hybrid_vit_small": 2.0, "hybrid_vit_base": 1.0}, 5000) == "hybrid_vit_small"
    assert choose_model({"hybrid_vit_small": 700.0, "hybrid_vit_base": 300.0}, 5000) == "hybrid_vit_base"
    assert choose_model({"hybrid_vit_small": 700.0, "hybrid_vit_base": 300.0}, 270) == "hybrid_vit_small"
    assert choose_model({"hybrid_vit_small": 100.0, "hybrid_vit_base": 30.0}, 5000) == "hybrid_vit_small"
    assert choose_model({"hybrid_vit_small": 100.0, "hybrid_vit_base": 30.0}, 18_000) == "hybrid_vit_base"
    small, base = "hybrid_vit_small", "hybrid_vit_base"
    for model in (small, base, "vit_tiny_data"):
        assert choose_augmentation(model, 3.0, 5000) == {}
        mixed, strong = (choose_augmentation(model, epochs, 5000) for epochs in (48.0, 94.0))
        assert mixed.keys() == {"cutmix", "mixup"}
        assert strong.keys() == {"cutmix", "mixup", "policy", "erasing"}
    assert choose_augmentation(small, 57.0, 5000) == choose_augmentation(small, 1000.0, 20_000) == mixed
    assert choose_augmentation(base, 57.0, 5000) == choose_augmentation(base, 1000.0, 20_000) == strong


def test_many_images_lead_to_less_weight_decay():
    recipe = RECIPES["default"]
    decay, rate = recipe.weight_decay, recipe.learning_rate
    assert choose_decay(recipe, 300) == choose_decay(recipe, 3000) == decay
    for images in (10_000, 100_000):  # in four epochs, 1 - 1/e of a weight
        steps = 4 * images / recipe.batch_size
        assert choose_decay(recipe, images) * rate * steps == pytest.approx(1, rel=0.05)
    assert choose_decay(replace(recipe, batch_size=640), 10_000) == decay  # fewer steps
    assert choose_decay(replace(recipe, learning_rate=10 * rate), 300) == pytest.approx(decay / 10)  # the same per step

    data = labelled(np.arange(12) % 3)
    chosen, _ = choice.choose(TrainConfig(epochs=1.0, in_recipe=RecipeOptions(learning_rate=10 * rate)), data)
    assert chosen.full_recipe.weight_decay == pytest.approx(decay / 10)
    chosen, _ = choice.choose(TrainConfig(epochs=1.0, in_recipe=RecipeOptions(weight_decay=0.3)), data)
    assert chosen.full_recipe.weight_decay == 0.3


@pytest.mark.parametrize(
    ("given", "augmentation"),
    [
        ({}, "flip, crop-padding 0.125, mixup 0.2, cutmix 0.3, label-smoothing 0.1"),
        ({"cutmix": 0.0, "flip": False}, "crop-padding 0.125, mixup 0.2, label-smoothing 0.1"),
        ({"cutmix": 0.9}, "flip, crop-padding 0.125, mixup 0.1, cutmix 0.9, label-smoothing 0.1"),
        ({"mixup": 1.0, "resized_crop": (0.5, 1.0)}, "resized-crop (0.5, 1.0), mixup 1, label-smoothing 0.1"),
    ],
)
def test_the_choice_says_what_is_on(given: dict[str, Any], augmentation: str):
    config = TrainConfig(model="hybrid_vit_small", epochs=20.0, in_recipe=RecipeOptions(**given))
    chosen, said = choice.choose(config, labelled(np.arange(6) % 3))
    assert said.endswith(augmentation)
    assert all(getattr(chosen.full_recipe.augment, name) == value for name, value in given.items())


@pytest.mark.skipif(native.status().instruction_set is None, reason=str(native.status()))
def test_the_choice_knows_that_there_are_kernels(monkeypatch: pytest.MonkeyPatch):
    """Without them a step takes more than twice as long, so that fewer than half as many epochs fit."""
    monkeypatch.setattr(choice, "products_per_second", lambda: 5e10)
    data = labelled(np.arange(6) % 3)

    def epochs() -> float:
        _, reason = choice.choose(TrainConfig(model="hybrid_vit_small", minutes=6.0), data)
        return float(reason.split()[1])  # about N epochs

    fast = epochs()
    with native.disabled():
        assert fast / 3 < epochs() < fast / 2


def test_the_time_to_go_is_that_of_the_steps(capsys: pytest.CaptureFixture[str]):
    row = dict(step=10, epoch=1.0, train_loss=1.0, train_top1=50.0, val_top1=40.0, images_per_second=16.0, minutes=3.0)
    Bar(Reporter(), plan(100)).line(row)  # batches of 8
    assert capsys.readouterr().out.endswith("16 images/s, 3 min 00 s so far, 45 s to go\n")


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("max_pool=maybe", "max_pool='maybe' is of the wrong type"),
        ("depth=-1", "depth=-1 is negative"),
        ("dropout=-0.1", "dropout=-0.1 is negative"),
        ("last_width=0", r"hybrid_vit_small cannot be created with last_width=0 \("),
    ],
)
def test_a_wrong_field_is_refused_before_training(field, why):
    with pytest.raises(ValueError, match=why):
        choice.choose(TrainConfig(epochs=1.0, fields=(field,)), labelled(np.arange(6) % 3))
