"""The native library: built or not, chosen, switched off."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from smallvit import kernels
from smallvit.kernels import build, library
from tests.kernels.checks import needs_library


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
    assert "broken.so cannot be loaded" in str(kernels.status())


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
