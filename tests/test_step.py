"""The training step: gradients, average, class weights, statistics."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import create_model
from smallvit.augment import Augment, augment_batch
from smallvit.data import Dataset, Split
from smallvit.training import RECIPES
from smallvit.training.mesh import make_mesh
from smallvit.training.step import Pace
from smallvit.training.trainer import Trainer, _class_weights
from tests.small import FIELDS, PLAIN, PREPROCESS, Small, labelled

pytestmark = pytest.mark.usefixtures("as_optax_needs")


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
    fields = dict(widths=(8, 8, 16), strides=(1, 2, 2), conv_depth=1, depth=1, heads=2, mlp_dim=16, last_width=16)
    model = create_model("hybrid_vit_small", num_classes=3, image_size=16, **fields)
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
    assert trainer._steps[1.0]._cache_size() == trainer._predict._cache_size() == 1
    assert states[0][1] != states[1][1]
    others = replace(blank, train=replace(blank.train, names=["other"] * 48))
    assert trainer.takes(others)
    assert not trainer.takes(replace(others, larger=np.zeros((96, 16, 16, 3), np.uint8)))
    fewer = labelled(np.arange(47) % 3)
    assert not trainer.takes(fewer)  # to evaluate; there are enough to train on
    assert trainer.takes(replace(fewer, val=blank.val))
    assert not trainer.takes(replace(labelled(np.arange(15) % 3), val=blank.val))


def test_balance_needs_images_of_every_class():
    with pytest.raises(ValueError, match=r"there are no images of 'b' to train on, so --balance cannot"):
        _class_weights(replace(PLAIN, balance=True), labelled(np.array([0, 2, 2])))
