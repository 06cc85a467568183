"""The contract of every architecture, for every row of the table with SPT and LSA, and for the plain initial model.

Compilation takes most of the time: each subject has few jitted calls, whose outputs are checked in numpy.
"""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import resample_positions
from smallvit.common.paths import by_path
from smallvit.registry import PRESETS
from tests.cases import CASES, Case

BATCH = 3


class Subject:
    """A row of the table: its model, variables, images and jitted calls, created once."""

    def __init__(self, case: Case, variables: Any, **fields: Any):
        self.case = case
        self.model = case.make(**fields)
        self.images = np.random.default_rng(1).standard_normal((BATCH, *case.size, case.channels), np.float32)
        self.variables = variables(self.model)
        self.traces = 0
        headless = self.model.clone(num_classes=0)

        def evaluate(variables, images):
            """The output; the head's output for the model without a head, and for all tokens."""
            self.traces += 1
            without_head = {**variables, "params": {k: v for k, v in variables["params"].items() if k != "head"}}
            pooled = headless.apply(without_head, images)
            assert pooled.ndim == 2
            again = self.model.apply(variables, pooled, method=lambda model, x: model.head(x))
            out = whole = self.model.apply(variables, images)
            if self.model.pool == "cls":
                whole = self.model.apply(
                    variables, images, method=lambda model, x: model.head(model.pooled(model.features(x)))
                )
            return out, again, whole

        def train(variables, images, key):
            """The output in training, and the gradients of parameters and images."""

            def loss(params, images):
                out, _ = self.model.apply(
                    {**variables, "params": params},
                    images,
                    train=True,
                    rngs={"dropout": key},
                    mutable=[name for name in variables if name != "params"],
                )
                target = np.arange(out.size, dtype=np.float32).reshape(out.shape)
                return jnp.square(out - target).mean(), out

            gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables["params"], images)
            return out, *gradients

        def look(variables, images):
            """The output when the maps are recorded, and the maps."""
            # The extra streams, which evaluation does not need, do no harm.
            rngs = {name: jax.random.key(1) for name in ("params", "dropout", "emb_dropout")}
            return self.model.apply(variables, images, rngs=rngs, mutable="intermediates")

        self._evaluate, self._train, self._look = jax.jit(evaluate), jax.jit(train), jax.jit(look)

    def evaluate(self, variables: Any, images: Any) -> np.ndarray:
        return np.asarray(self._evaluate(variables, images)[0])

    @cache  # noqa: B019, a few subjects that live as long as the run
    def train(self, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
        out, parameters, images = jax.device_get(self._train(self.variables, self.images, jax.random.key(seed)))
        return out, by_path(parameters), images


@cache
def subject(name: str, add_ons: str) -> Subject:
    case = CASES[name]
    if add_ons == "sl":
        return Subject(case, case.draw, spt=True, lsa=True)
    images = np.zeros((1, *case.size, case.channels), np.float32)
    return Subject(case, lambda model: jax.jit(model.init)(jax.random.key(0), images), spt=False, lsa=False)


def rows(*add_ons: str) -> list[Any]:
    return [
        pytest.param((name, each), id=f"{name}-{each}", marks=pytest.mark.xdist_group(f"{name}-{each}"))
        for name, case in CASES.items()
        for each in add_ons
        if case.both or each == "sl"
    ]


@pytest.fixture(params=rows("plain", "sl"))
def it(request: pytest.FixtureRequest) -> Subject:
    """The initial model without SPT and LSA, and the one with both."""
    return subject(*request.param)


@pytest.fixture(params=rows("sl"))
def sl(request: pytest.FixtureRequest) -> Subject:
    """For checks that SPT and LSA can only make harder."""
    return subject(*request.param)


def test_every_registered_class_has_a_row():
    rows = {case.cls for case in CASES.values() if case.both}
    assert {preset.cls for preset in PRESETS.values()} <= rows


def test_shape_and_finite(it: Subject):
    out = it.evaluate(it.variables, it.images)
    assert out.shape == (BATCH, 7)
    assert out.dtype == np.float32
    assert np.isfinite(out).all()


def test_depends_on_every_part_of_the_image(it: Subject):
    # Several keys, here and below: stochastic depth may leave a branch out for the whole batch.
    gradient = np.max([np.abs(it.train(seed)[2]) for seed in range(4)], axis=0)
    height, width = it.case.size
    for i in (0, height // 2):
        for j in (0, width // 2):
            assert gradient[:, i : i + height // 2, j : j + width // 2].max() > 1e-6


def test_evaluation_is_deterministic(it: Subject):
    np.testing.assert_array_equal(it.evaluate(it.variables, it.images), it.evaluate(it.variables, it.images))


def test_training_is_random(it: Subject):
    a, b = it.train(0)[0], it.train(1)[0]
    assert np.abs(a - b).max() > 1e-4
    np.testing.assert_array_equal(a, it._train(it.variables, it.images, jax.random.key(0))[0])


def test_images_of_a_batch_are_independent(it: Subject):
    others = it.images.copy()
    others[1] = 0.5
    out, changed = it.evaluate(it.variables, it.images), it.evaluate(it.variables, others)
    np.testing.assert_allclose(out[[0, 2]], changed[[0, 2]], atol=1e-6)
    assert np.abs(out[1] - changed[1]).max() > 1e-4


def test_every_parameter_gets_a_gradient(it: Subject):
    gradients = [it.train(seed)[1] for seed in range(4)]
    for path in gradients[0]:
        assert all(np.isfinite(gradient[path]).all() for gradient in gradients), path
        idle = it.case.idle is not None and path.startswith(it.case.idle)
        assert any(np.abs(gradient[path]).max() > 0 for gradient in gradients) != idle, path


def test_no_second_compile(it: Subject):
    it.evaluate(it.variables, it.images)
    before = it.traces
    it.evaluate(jax.tree.map(lambda x: np.asarray(x) + 1, it.variables), it.images * 2)
    assert it.traces == before


def test_bfloat16_reaches_every_layer(sl: Subject):
    model = sl.model.clone(dtype=jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), sl.images)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    _, state = jax.eval_shape(
        lambda v, x: model.apply(v, x, capture_intermediates=True, mutable="intermediates"), variables, sl.images
    )
    outputs = {
        path: leaf
        for path, (leaf, *_) in by_path(state["intermediates"]).items()
        if path.endswith("__call__") and hasattr(leaf, "dtype")
    }
    assert len(outputs) > 10
    # What works on attention maps stays in float32, as the softmax does.
    maps = re.compile(r"/(pre|post|bias)/|attend/dropout/")
    assert [path for path, leaf in outputs.items() if leaf.dtype != jnp.bfloat16 and not maps.search(path)] == []
    out = np.asarray(jax.jit(model.apply)(sl.variables, sl.images))
    assert out.dtype == jnp.bfloat16
    # bfloat16 has 8 significant bits, so each rounding is off by up to 2 ** -9 of the value. Logits of size 1 to 3 were
    # off by at most 0.02, the sum of many such roundings; twice that is allowed.
    np.testing.assert_allclose(out.astype(np.float32), sl.evaluate(sl.variables, sl.images), atol=0.04)


def test_features_and_pooled_features(sl: Subject):
    tokens = jax.eval_shape(lambda v, x: sl.model.apply(v, x, method="features"), sl.variables, sl.images)
    assert len(tokens.shape) == 3
    assert tokens.shape[0] == BATCH
    out, headless_then_head, features_then_head = sl._evaluate(sl.variables, sl.images)
    np.testing.assert_allclose(headless_then_head, out, atol=1e-5)
    np.testing.assert_allclose(features_then_head, out, atol=1e-5)


def test_attention_maps_come_out_when_asked_for(sl: Subject):
    out, state = jax.device_get(sl._look(sl.variables, sl.images))
    np.testing.assert_allclose(out, sl.evaluate(sl.variables, sl.images), atol=1e-5)
    maps = {k: v for k, (v,) in by_path(state["intermediates"]).items() if k.endswith("/attention")}
    assert maps
    for path, weights in maps.items():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5, err_msg=path)
        n, m = weights.shape[-2:]
        if sl.model.lsa and n == m > 1:
            assert np.abs(np.diagonal(weights, axis1=-2, axis2=-1)).max() == 0, path


def test_serves_at_another_image_size(sl: Subject):
    size = tuple(2 * side for side in sl.case.size)
    model = sl.model if getattr(sl.model, "image_size", None) is None else sl.model.clone(image_size=size)
    images = jax.ShapeDtypeStruct((1, *size, sl.case.channels), jnp.float32)
    if sl.case.one_size:
        with pytest.raises(ValueError, match="only positions are resampled"):
            resample_positions(sl.variables, model, images)
        return
    fitted = resample_positions(sl.variables, model, images)
    assert jax.eval_shape(model.apply, fitted, images).shape == (1, 7)


def test_a_wrong_rank_is_named(sl: Subject):
    height, width = sl.case.size
    with pytest.raises(ValueError, match=rf"shape \({BATCH}, {height}, {width}\), expected \(batch, height"):
        sl.model.apply(sl.variables, sl.images[..., 0])
