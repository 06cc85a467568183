"""The second head of LeViT, and its distance bias."""

import jax
import jax.numpy as jnp
import numpy as np

from smallvit import create_model
from smallvit.models.levit import DistanceBias
from tests.cases import CASES


def scores(num_distill_classes: int | str) -> list[jax.Array]:
    model = CASES["levit"].make(num_distill_classes=num_distill_classes)
    image = jax.random.normal(jax.random.key(0), (2, 48, 64, 3))

    @jax.jit
    def run():
        variables = model.init(jax.random.key(1), image)
        return model.apply(variables, image), *model.apply(variables, image, method="both_heads")

    return run()


def test_two_heads_of_the_same_classes_are_averaged():
    out, first, second = scores("same")
    assert jnp.abs(first - second).max() > 1e-3
    np.testing.assert_allclose(out, (first + second) / 2, atol=1e-6)


def test_a_second_head_of_other_classes_stands_apart():
    out, first, second = scores(4)
    assert second.shape == (2, 4)
    np.testing.assert_array_equal(out, first)


def test_presets_have_as_many_classes_in_both_heads():
    model = create_model("levit_128s", num_classes=10)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32))
    assert [shapes["params"][head]["kernel"].shape for head in ("head", "distill_head")] == [(384, 10), (384, 10)]


def test_bias_by_distance():
    table = jnp.arange(6.0).reshape(2, 3, 1)
    bias = DistanceBias(1, (2, 3), 2).apply({"params": {"distances": table}})
    # The first and the third token of the first row ask; the tokens of 2 rows and 3 columns answer.
    np.testing.assert_array_equal(bias, [[[0, 1, 2, 3, 4, 5], [2, 1, 0, 5, 4, 3]]])
