"""What every architecture promises, for every row of the table, plain and with SPT and LSA."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit.paths import by_path
from smallvit.registry import PRESETS
from tests.cases import CASES, Case

ADD_ONS = {"plain": {"spt": False, "lsa": False}, "sl": {"spt": True, "lsa": True}}
BATCH = 3


class Subject:
    """A row of the table, made once: its model, variables, images and jitted calls."""

    def __init__(self, case: Case, **fields: Any):
        self.case = case
        self.model = case.make(**fields)
        self.images = jax.random.normal(jax.random.key(1), (BATCH, *case.size, case.channels))
        self.variables = jax.jit(self.model.init)(jax.random.key(0), self.images)
        self.traces = 0

        def evaluate(variables, images):
            self.traces += 1
            return self.model.apply(variables, images)

        def train(variables, images, key):
            collections = [name for name in variables if name != "params"]
            return self.model.apply(variables, images, train=True, rngs={"dropout": key}, mutable=collections)[0]

        def gradient(variables, images, key):
            def loss(params):
                out = train({**variables, "params": params}, images, key)
                return jnp.square(out - jnp.arange(out.size).reshape(out.shape).astype(out.dtype)).mean()

            return jax.grad(loss)(variables["params"])

        self.evaluate, self.train, self.gradient = jax.jit(evaluate), jax.jit(train), jax.jit(gradient)


@cache
def subject(name: str, add_ons: str) -> Subject:
    return Subject(CASES[name], **ADD_ONS[add_ons])


@pytest.fixture(
    params=[
        pytest.param((name, add_ons), id=f"{name}-{add_ons}", marks=pytest.mark.xdist_group(f"{name}-{add_ons}"))
        for name in CASES
        for add_ons in ADD_ONS
    ]
)
def it(request: pytest.FixtureRequest) -> Subject:
    return subject(*request.param)


def test_every_registered_class_has_a_row():
    assert {preset.cls for preset in PRESETS.values()} <= {case.cls for case in CASES.values()}


def test_shape_and_finite(it: Subject):
    out = it.evaluate(it.variables, it.images)
    assert out.shape == (BATCH, 7)
    assert out.dtype == jnp.float32
    assert jnp.isfinite(out).all()


def test_depends_on_every_part_of_the_image(it: Subject):
    gradient = jax.jit(jax.grad(lambda image: jnp.square(it.model.apply(it.variables, image)).sum()))(it.images)
    height, width = it.case.size
    quarters = [gradient[:, i : i + height // 2, j : j + width // 2] for i in (0, height // 2) for j in (0, width // 2)]
    assert all(jnp.abs(quarter).max() > 1e-6 for quarter in quarters)


def test_evaluation_is_deterministic_and_ignores_rngs(it: Subject):
    rngs = {"params": jax.random.key(1), "dropout": jax.random.key(2), "emb_dropout": jax.random.key(3)}
    out = it.evaluate(it.variables, it.images)
    again = jax.jit(lambda v, x: it.model.apply(v, x, rngs=rngs))(it.variables, it.images)
    np.testing.assert_array_equal(out, again)


def test_training_is_random(it: Subject):
    a, b, again = (it.train(it.variables, it.images, jax.random.key(seed)) for seed in (0, 1, 0))
    assert (jnp.abs(a - b).max() > 1e-4) == it.case.random
    np.testing.assert_array_equal(a, again)


def test_images_of_a_batch_are_independent(it: Subject):
    out = it.evaluate(it.variables, it.images)
    changed = it.evaluate(it.variables, it.images.at[1].set(0.5))
    np.testing.assert_allclose(out[0], changed[0], atol=1e-6)
    np.testing.assert_allclose(out[2], changed[2], atol=1e-6)
    assert jnp.abs(out[1] - changed[1]).max() > 1e-4


def test_every_parameter_gets_a_gradient(it: Subject):
    # Several keys: stochastic depth may leave a branch out for the whole batch.
    keys = jax.random.split(jax.random.key(5), 4)
    gradients = [by_path(it.gradient(it.variables, it.images, key)) for key in keys]
    for path in gradients[0]:
        assert all(jnp.isfinite(gradient[path]).all() for gradient in gradients), path
        idle = it.case.idle is not None and path.startswith(it.case.idle)
        assert any(jnp.abs(gradient[path]).max() > 0 for gradient in gradients) != idle, path


def test_no_second_compile(it: Subject):
    it.evaluate(it.variables, it.images)
    before = it.traces
    it.evaluate(jax.tree.map(lambda x: x + 1, it.variables), it.images * 2)
    assert it.traces == before


def test_bfloat16_reaches_every_layer(it: Subject):
    model = it.model.clone(dtype=jnp.bfloat16)
    variables = jax.jit(model.init)(jax.random.key(0), it.images)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    out, state = jax.jit(lambda v, x: model.apply(v, x, capture_intermediates=True, mutable="intermediates"))(
        variables, it.images
    )
    outputs = {
        path: leaf
        for path, (leaf, *_) in by_path(state["intermediates"]).items()
        if path.endswith("__call__") and hasattr(leaf, "dtype")
    }
    assert len(outputs) > 10
    # What works on attention maps stays in float32, as the softmax does.
    maps = re.compile(r"/(pre|post|bias|attend/dropout)/")
    assert [path for path, leaf in outputs.items() if leaf.dtype != jnp.bfloat16 and not maps.search(path)] == []
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), it.evaluate(it.variables, it.images), atol=0.15, rtol=0.1)


def test_features_and_pooled_features(it: Subject):
    tokens = jax.jit(lambda v, x: it.model.apply(v, x, method="features"))(it.variables, it.images)
    assert tokens.ndim == 3
    assert tokens.shape[0] == BATCH
    headless = it.model.clone(num_classes=0)
    variables = {**it.variables, "params": {k: v for k, v in it.variables["params"].items() if k != "head"}}
    pooled = jax.jit(headless.apply)(variables, it.images)
    assert pooled.ndim == 2
    out = jax.jit(lambda v, x: it.model.apply(v, x, method=lambda model, x: model.head(x)))(it.variables, pooled)
    np.testing.assert_allclose(out, it.evaluate(it.variables, it.images), atol=1e-5)


def test_attention_maps_come_out_when_asked_for(it: Subject):
    out, state = jax.jit(lambda v, x: it.model.apply(v, x, mutable="intermediates"))(it.variables, it.images)
    np.testing.assert_allclose(out, it.evaluate(it.variables, it.images), atol=1e-5)
    maps = {k: v for k, (v,) in by_path(state["intermediates"]).items() if k.endswith("/attention")}
    assert maps
    for path, weights in maps.items():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5, err_msg=path)
        n, m = weights.shape[-2:]
        if it.model.lsa and n == m > 1:
            assert jnp.abs(jnp.diagonal(weights, axis1=-2, axis2=-1)).max() == 0, path


def test_a_wrong_rank_is_named(it: Subject):
    height, width = it.case.size
    with pytest.raises(ValueError, match=rf"shape \({BATCH}, {height}, {width}\), expected \(batch, height"):
        it.model.apply(it.variables, it.images[..., 0])
