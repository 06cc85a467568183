"""Several devices in one process: the kernels are sharded over them, and the results equal those of one device."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from smallvit import kernels

pytestmark = pytest.mark.skipif(kernels.status().instruction_set is None, reason=str(kernels.status()))


def run(script: str) -> str:
    """The output of the script on two devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, env=env, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


KERNELS = """
    import jax, jax.numpy as jnp, numpy as np, re
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from smallvit import kernels

    mesh = jax.make_mesh((2, 1), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows, whole = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P())

    def draw(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape)

    def wave(y):  # so that every number of the result has a gradient of its own
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    def check(used, kernel, images, *others, divided=True, gathered=()):
        # images are spread, the others are whole: values and gradients, which kernels compute them, what is gathered
        def loss(images, *others):
            return sum(map(wave, jax.tree.leaves(kernel(images, *others))))

        grad = jax.value_and_grad(loss, tuple(range(1 + len(others))))
        alone = jax.jit(grad)(images, *others)
        spread = jax.device_put(images, rows if divided else whole), *jax.device_put(others, whole)
        with jax.set_mesh(mesh):
            assert kernels.usable()
            compiled = jax.jit(grad).lower(*spread).compile()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), alone, compiled(*spread))
        text = compiled.as_text()
        assert set(re.findall('custom_call_target="smallvit_([a-z_]+)"', text)) == set(used.split()), text
        assert re.findall(r"= (\\S+?)[{]\\S* all-gather", text) == [*gathered] and "all-to-all" not in text, text
"""


def test_without_a_mesh_there_are_no_kernels_on_two_devices():
    assert run("from smallvit import kernels; print(kernels.usable())") == "False\n"


def test_each_device_computes_its_rows():
    run(
        KERNELS
        + """
    x = draw(0, 6, 5, 10)
    check("norm_forward norm_backward", kernels.layer_norm, x, draw(1, 10), draw(2, 10))
    check("gelu_forward gelu_backward", kernels.bias_gelu, x, draw(1, 10))
    x = draw(0, 32, 10)
    check("dense dense_gradient", kernels.dense, x, draw(1, 10, 7), draw(2, 7))
    gelu = lambda *args: kernels.dense(*args, gelu=True)
    check("dense_gelu gelu_backward dense dense_gradient", gelu, x, draw(1, 10, 7), draw(2, 7))
    check("transpose", lambda x: kernels.transpose(jax.lax.stop_gradient(x)) @ x, x)
    x = draw(0, 4, 6, 6, 4)
    check("unfold fold", lambda x: kernels.unfold(x, (3, 3), (2, 2), (1, 1)), x)
    conv = lambda stride: lambda x, kernel: kernels.conv(x, kernel, (stride, stride), (1, 1))
    check("conv conv_gradient", conv(1), x, draw(1, 3, 3, 4, 5))
    check("conv conv_gradient dense fold", conv(2), x, draw(1, 3, 3, 4, 5))
    check("max_pool max_pool_gradient", lambda x: kernels.max_pool(x, (2, 2)), x)
    depthwise = lambda x, kernel: kernels.depthwise(x, kernel, (1, 1), (1, 1))
    check("depthwise depthwise_gradient", depthwise, x, draw(1, 3, 3, 1, 4))
    """
    )


def test_attention_and_its_masks_on_two_devices():
    run(
        KERNELS
        + """
    used, others = "packed_forward packed_backward", (jnp.ones(2), draw(1, 2, 9, 9))
    check(used, kernels.attend_packed, draw(0, 8, 9, 30), *others)
    apart = lambda q, scale, bias: kernels.attend(q, q * 2, q + 1, scale, bias, mask_diagonal=True)
    check("attention_forward attention_backward", apart, draw(0, 8, 9, 10), *others)
    joined = lambda qkv, scale, bias: kernels.attend(qkv, None, None, scale, bias, values=7)
    check("attention_forward attention_backward", joined, draw(0, 8, 9, 30), *others)
    mixed = lambda qkv, *mixes: kernels.attend_mixed(qkv, None, None, jnp.ones(2), *mixes)
    check("mixed_forward mixed_backward", mixed, draw(0, 8, 9, 30), draw(1, 2, 2), draw(2, 2, 2), draw(3, 2))
    # four windows in an image, each with a mask of its own; of three images no device can have half
    allowed = np.random.default_rng(0).random((4, 1, 9, 9)) < 0.5
    masked = lambda qkv, scale, bias: kernels.attend_packed(qkv, scale, bias, allowed)
    check(used, masked, draw(0, 6, 4, 9, 30), *others)
    check(used, masked, draw(0, 3, 4, 9, 30), *others, divided=False)
    """
    )


def test_batch_norm_has_the_moments_of_all_devices():
    run(
        KERNELS
        + """
    used, others = "column_moments batch_forward batch_sums batch_backward", (draw(1, 10), draw(2, 10))
    x = draw(0, 6, 10) + jnp.arange(6)[:, None]
    moments = ["f32[2,2,10]"]
    check(used, lambda *args: kernels.batch_norm(*args, None, 1e-5, False)[0], x, *others, gathered=moments)
    grid = draw(0, 4, 5, 6, 10) + jnp.arange(4)[:, None, None, None]
    pooled = lambda *args: kernels.batch_norm_pool(*args, 1e-5, True, (2, 2))[0]
    used_pooled = "column_moments batch_pool_forward batch_pool_sums batch_pool_backward"
    check(used_pooled, pooled, grid, *others, gathered=moments)
    adds = lambda x, *others: kernels.batch_norm(x, *others, x * 2, 1e-5, True)[0]
    check(used, adds, x, *others, gathered=moments)
    """
    )


def test_two_devices_train_as_one_does():
    run(
        """
        import jax, numpy as np, re
        from smallvit.data import Dataset, Preprocess, Split
        from smallvit.runs.saved import Spec
        from smallvit.training import TrainConfig
        from smallvit.training.mesh import AXES
        from smallvit.training.step import Pace
        from smallvit.training.trainer import Trainer

        def split(number):
            images = np.random.default_rng(number).integers(0, 255, (number, 8, 8, 3), np.uint8)
            return Split(images, np.arange(number, dtype=np.int32) % 3, list(map(str, range(number))))

        preprocess = Preprocess((8, 8), 3, "crop", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
        data = Dataset("noise", ("a", "b", "c"), split(64), split(24), None, preprocess, ())
        fields = dict(widths=(16,), strides=(2,), conv_depth=1, depth=1, heads=2, mlp_dim=32, last_width=32)
        spec = Spec("hybrid_vit_small", 3, (8, 8), dict(**fields, drop_path=0.3))
        config = TrainConfig(model="hybrid_vit_small")
        recipe = config.full_recipe
        pace = Pace(np.float32(0.5), np.float32(0.001), np.float32(0.9))

        def train(devices, fsdp=1):
            mesh = jax.make_mesh(
                (devices // fsdp, fsdp),
                AXES,
                axis_types=(jax.sharding.AxisType.Auto,) * 2,
                devices=jax.devices()[:devices],
            )
            trainer = Trainer(spec.create(), recipe, data, mesh, 16, 0, accumulate=2, remat=False)
            trainer.compile()()
            state, losses = trainer.init(), []
            for step in range(4):
                state, metrics = trainer.step(state, step, pace)
                losses.append(float(metrics.loss))
            losses.append(trainer.evaluate(state, data.val).loss)
            return np.array(losses), trainer._steps[1.0].as_text(), trainer._predict.as_text()

        (one, *_), (two, step, predict) = train(1), train(2)
        sharded, sharded_step, _ = train(2, fsdp=2)
        np.testing.assert_allclose(one, two, atol=2e-5)
        np.testing.assert_allclose(one, sharded, atol=2e-5)
        assert abs(one - one[0]).max() > 1e-3  # it learns
        forward = "conv", "batch_pool_forward", "batch_forward", "packed_forward", "dense_gelu"
        for name in (*forward, "depthwise", "norm_forward"):
            assert f'"smallvit_{name}"' in step, name
        for name in ("conv", "max_pool", "packed_forward", "dense", "depthwise", "norm_forward"):
            assert f'"smallvit_{name}"' in predict, name
        gradients = "conv_gradient", "batch_pool_backward", "batch_backward", "packed_backward", "dense_gradient"
        for name in (*gradients, "depthwise_gradient"):
            assert f'"smallvit_{name}"' in step, name
        for name in ("clip", "adam", "muon", "weighted_sums"):
            assert f'"smallvit_{name}"' in step, name
            assert f'"smallvit_{name}"' not in sharded_step, name  # each device updates its part of the weights
        gathered = re.findall(r"= (\\S+?)[{]\\S* all-gather", step)
        assert gathered and all(shape.startswith("f32[2,2,") for shape in gathered), gathered  # BatchNorm's moments
        """
    )
