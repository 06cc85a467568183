"""Progressive resizing: the phases of a run, the step on smaller images, and how a run goes on after a stop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import smallvit
from smallvit import create_model, resample_positions
from smallvit.data import Preprocess
from smallvit.training import RecipeOptions, TrainConfig, choice, loop
from smallvit.training.callbacks import Callback
from smallvit.training.optimiser import optimiser
from smallvit.training.resizing import mean_cost, phases, shrink, smaller
from smallvit.training.step import Pace, make_init, make_step
from tests.small import PLAIN, labelled, plan

FIELDS: dict[str, Any] = dict(widths=(8, 8, 16), conv_depth=0, depth=1, heads=2, mlp_dim=16, last_width=16)


def test_images_grow_in_three_phases():
    timed = plan(1000, progressive=0.5)
    assert [timed.side(step) for step in (0, 199, 200, 499, 500, 999)] == [0.5, 0.5, 0.75, 0.75, 1.0, 1.0]
    assert {plan(1000).side(step) for step in range(1000)} == {1.0}
    assert timed.decided(300, 100).side(320) == 0.75  # 0.3 of the run is done; after 28.6 steps, 0.5
    assert timed.decided(300, 100).side(330) == 1.0


def test_work_counts_steps_by_their_cost():
    small, middle, whole = (phase.cost for phase in phases(0.5))
    timed = plan(1000, progressive=0.5)
    assert (
        timed.work(0, 1000) == pytest.approx(1000 * mean_cost(0.5)) == pytest.approx(200 * small + 300 * middle + 500)
    )
    assert timed.work(100, 300) == pytest.approx(100 * small + 100 * middle)
    assert timed.work(600, 700) == 100 * whole
    assert plan(1000).work(100, 300) == 200
    for step in (0, 100, 300, 600):
        left = timed.steps_for(0.5 * timed.work(step, 1000), step)  # at half the speed, half of the steps are left
        decided = timed.decided(step, left)
        assert left == (1000 - step) / 2
        assert decided.work(step, decided.steps) == pytest.approx(0.5 * timed.work(step, 1000), abs=1)


def test_it_is_planned_for_our_default_alone():
    def chosen(side: int, **given: Any) -> tuple[float, str]:
        data = labelled(np.arange(6) % 3)
        data = replace(data, preprocess=replace(data.preprocess, size=(side, side)))
        config, said = choice.choose(TrainConfig(epochs=20.0, **given), data)
        return config.full_recipe.progressive, said

    progressive, said = chosen(28)
    assert progressive == choice.PROGRESSIVE
    assert "65% of the steps on smaller images" in said
    assert chosen(64, model="hybrid_vit_base")[0] == choice.PROGRESSIVE
    assert "smaller" not in chosen(24)[1]
    for off in (
        chosen(24),
        chosen(64, model="vit_tiny_data"),
        chosen(64, recipe="paper"),
        chosen(64, in_recipe=RecipeOptions(progressive=0.0)),
    ):
        assert off[0] == 0
    assert chosen(64, model="vit_tiny_data", in_recipe=RecipeOptions(progressive=0.3))[0] == 0.3


@pytest.mark.usefixtures("as_optax_needs")
@pytest.mark.parametrize(("name", "fields"), [("hybrid_vit_small", FIELDS), ("vit_tiny_data", dict(dim=16, depth=1))])
def test_a_step_on_smaller_images_is_one_of_the_model_for_them(name: str, fields: dict[str, Any]):
    """Its loss is that of the resampled weights on shrunk images, and it trains the weights of the whole model."""
    preprocess = Preprocess((32, 32), 3, "crop", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    model = create_model(name, num_classes=3, image_size=32, **fields)
    small = smaller(model, (32, 32), 3, 0.75)
    assert small.image_size == (24, 24)
    update = optimiser(PLAIN)
    state = jax.jit(make_init(model, PLAIN, update, (32, 32, 3)))(jax.random.key(0))
    images = np.random.default_rng(0).integers(0, 255, (8, 32, 32, 3)).astype(np.uint8)
    labels = (np.arange(8) % 3).astype(np.int32)
    step = jax.jit(make_step(model, PLAIN, update, preprocess, small=small))
    pace = Pace(np.float32(1), np.float32(0), np.float32(0))
    after, metrics = step(state, images, labels, jax.random.key(1), pace, preprocess.normalisation)

    x = shrink(jnp.asarray(preprocess.normalise(images)), small)
    assert x.shape == (8, 24, 24, 3)
    variables = resample_positions({"params": state.params, **state.others}, small, x)
    logits, _ = small.apply(
        variables, x, train=True, rngs={"dropout": jax.random.key(2)}, mutable=["batch_stats"]
    )  # without dropout, the key does not matter
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    np.testing.assert_allclose(metrics.loss, expected, rtol=1e-4)
    moved = jax.tree.map(lambda old, new: bool((old != new).any()), state.params, after.params)
    assert moved["positions"]["grid"]
    assert after.params["positions"]["grid"].shape == state.params["positions"]["grid"].shape


def test_a_smaller_image_has_the_same_colours():
    image = np.zeros((1, 32, 32, 3), np.float32)
    image[:, :16] = (1.0, 0.5, 0.2)
    small = shrink(jnp.asarray(image), create_model("hybrid_vit_small", num_classes=2, image_size=16))
    np.testing.assert_allclose(small[0, :7], np.broadcast_to((1.0, 0.5, 0.2), (7, 16, 3)), rtol=1e-5)
    np.testing.assert_allclose(small.mean((1, 2)), image.mean((1, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "side", "reason"),
    [
        ("hybrid_vit_small", 16, r"images of 16 x 16 pixels are small already"),
        ("nest_tiny", 224, r"a grid of 42 x 42 patches is not divisible"),
    ],
)
def test_where_it_is_impossible_one_line_says_so(name: str, side: int, reason: str):
    model = create_model(name, num_classes=3, image_size=side)
    with pytest.raises(ValueError, match=reason) as error:
        smaller(model, (side, side), 3, 0.75)
    assert str(error.value).endswith("; --progressive makes images smaller: leave it out")


class Broken(Callback):
    def step(self, step: int, loss: float) -> None:
        if step == 7:
            raise RuntimeError("stopped")


@pytest.mark.usefixtures("as_a_user", "as_optax_needs")
def test_a_run_goes_on_in_its_phase(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Bit for bit, with images of three sizes; it is stopped among the second."""
    monkeypatch.setattr(loop, "finish", lambda *_: {"val_top1": 50.0, "test_top1": None})
    settings: dict[str, Any] = dict(
        model="hybrid_vit_small", fields=FIELDS, image_size=28, batch_size=16, epochs=4, progressive=0.8, runs=tmp_path
    )
    whole = Path(smallvit.train(photos, **settings, name="whole")["folder"])
    with pytest.raises(RuntimeError, match="stopped"):
        smallvit.train(photos, **settings, name="stopped", checkpoint_seconds=0.0, callbacks=[Broken()])
    smallvit.train(resume=tmp_path / "stopped")
    assert "resuming at step" in (tmp_path / "stopped/log.txt").read_text()
    weights = [(folder / "model/model.safetensors").read_bytes() for folder in (whole, tmp_path / "stopped")]
    assert weights[0] == weights[1]
