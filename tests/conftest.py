"""Strict defaults: shapes and types are checked at run time, nothing is promoted or broadcast implicitly."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import pytest

from tests.runs import QUICK, command, draw_photos, missing, required

jaxtyping.install_import_hook("smallvit", "beartype.beartype")

# Tests compile far more than they compute: of all settings these make a program in half the time. XLA reads them when
# the first device is asked for, and ends the process at a flag that it does not know.
FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_default_prng_impl", "rbg")  # the default generator is long to compile

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Disables the run-time type checks, which only the tests have, so that a user's mistake reaches our own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def as_optax_needs() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three easy classes of small coloured images."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    draw_photos(folder)
    return folder


@pytest.fixture(scope="session")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One cache of compiled programs for all these runs."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**os.environ, "XDG_CACHE_HOME": cache, "SMALLVIT_FAST_ENV": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.fixture(scope="session")
def reference(photos: Path, env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruptions."""
    runs = tmp_path_factory.mktemp("runs")
    run = subprocess.run(
        command(photos, *QUICK, "--runs", runs, "--name", "whole", "--image-size", 12),
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    (runs / "printed.txt").write_text(run.stdout)
    return runs / "whole"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = required("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        missing("there is no chromium on this machine")
    # A sandbox needs rights that root in a container does not have.
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=args)
        yield browser
        browser.close()
