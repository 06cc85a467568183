"""The native library: built or not, chosen, switched off, and left out on several devices."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from smallvit import kernels
from smallvit.kernels import build, library

needs_library = pytest.mark.skipif(kernels.status().instruction_set is None, reason=str(kernels.status()))


@needs_library
def test_disabled_leaves_no_kernel_in_a_program():
    @jax.jit
    def double(x):
        return kernels.transpose(x) if kernels.takes_rows(x) else x.T

    x = jnp.zeros((2, 3))
    assert "smallvit_transpose" in double.lower(x).as_text()
    with kernels.disabled():
        assert not kernels.usable()
        assert "smallvit" not in double.lower(x).as_text()
    assert kernels.usable()


@pytest.fixture
def fresh_status() -> Iterator[None]:
    kernels.status.cache_clear()
    yield
    kernels.status.cache_clear()


@pytest.mark.usefixtures("fresh_status")
def test_without_a_library(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "PATH", tmp_path / "none.so")
    monkeypatch.delenv(library.VARIABLE, raising=False)
    assert str(kernels.status()) == "native kernels: not in use, not built (python -m smallvit.kernels.build)"
    assert not kernels.usable()
    assert not kernels.takes_rows(jnp.zeros((2, 3)))


@pytest.mark.usefixtures("fresh_status")
def test_a_broken_library(monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    monkeypatch.setattr(library, "PATH", tmp_path / "broken.so")
    monkeypatch.delenv(library.VARIABLE, raising=False)
    assert "broken.so does not load" in str(kernels.status())


@pytest.mark.usefixtures("fresh_status")
def test_switched_off(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "0")
    assert str(kernels.status()) == "native kernels: not in use, switched off by SMALLVIT_KERNELS=0"


@needs_library
@pytest.mark.usefixtures("fresh_status")
def test_an_instruction_set_by_name(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "portable")
    assert str(kernels.status()) == f"native kernels: portable, {library.PATH}"
    kernels.status.cache_clear()
    monkeypatch.setenv(library.VARIABLE, "avx3")
    assert "this CPU has no instruction set SMALLVIT_KERNELS=avx3" in str(kernels.status())


def test_no_compiler_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"^no C\+\+ compiler \(no-such-compiler\)$"):
        build.build(tmp_path / "library.so")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.BuildError, match="the compiler failed: exit 1"):
        build.build(tmp_path / "library.so")
    assert not list(tmp_path.iterdir())


@needs_library
def test_on_a_mesh_of_two_devices():
    script = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec
        from smallvit import kernels

        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        x = jax.random.normal(jax.random.key(0), (8, 9, 3 * 2 * 5))
        bias = jax.random.normal(jax.random.key(1), (2, 9, 9))

        def loss(x, bias):
            y = kernels.attend_packed(x, jnp.ones(2), bias)
            y = kernels.bias_gelu(kernels.layer_norm(y, jnp.ones(10), jnp.zeros(10)), jnp.ones(10))
            return jnp.square(y).sum()

        run = jax.jit(jax.value_and_grad(loss, (0, 1)))
        alone = run(x, bias)
        spread = NamedSharding(mesh, PartitionSpec("data"))
        together = run(jax.device_put(x, spread), jax.device_put(bias, NamedSharding(mesh, PartitionSpec())))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), alone, together)

        over = jax.shard_map(
            lambda x: kernels.attend_packed(x, jnp.ones(2)),
            mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False,
        )
        a, b = jax.jit(over)(jax.device_put(x, spread)), kernels.attend_packed(x, jnp.ones(2))
        np.testing.assert_allclose(a, b, rtol=1e-6)
        print("alike", kernels.usable())
    """
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=120)
    assert run.stdout == "alike False\n", run.stderr
