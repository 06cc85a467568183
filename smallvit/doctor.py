"""A report on this machine and installation, and a test of the native kernels against pure JAX."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smallvit import __version__, kernels
from smallvit.common.env import fast_env
from smallvit.common.extras import EXTRAS
from smallvit.common.files import user_cache
from smallvit.registry import create_model

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    wrong: bool = False


def examine() -> list[Finding]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    devices = jax.devices()
    return [
        Finding("smallvit", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"),
        Finding("packages", ", ".join(f"{name} {version(name)}" for name in packages)),
        Finding("devices", f"{len(devices)} x {devices[0].device_kind}; {os.cpu_count()} cores"),
        Finding("kernels", str(kernels.status()).removeprefix("native kernels: ")),
        Finding("memory", _memory()),
        Finding("compiled programs", f"kept in {user_cache() / 'compiled'}"),
        *(_extra(name, wanted) for name, wanted in EXTRAS.items()),
        *_self_test(),
    ]


def _memory() -> str:
    if not fast_env():
        return "system defaults: the settings are for glibc"
    if all(os.environ.get(name) for name in fast_env()):
        return f"huge pages, {', '.join(fast_env())} is set"
    return "small pages: set the variables of smallvit.fast_env() before Python starts, as the commands do"


def _extra(name: str, wanted: tuple[str, ...]) -> Finding:
    missing = [package for package in wanted if find_spec(package) is None]
    found = f"no {', '.join(missing)}: pip install 'smallvit[{name}]'" if missing else "installed"
    return Finding(f"extra {name}", found)


def _self_test() -> list[Finding]:
    """Compares a small model and its gradient with and without the kernels."""
    if not kernels.usable():
        return []
    model = create_model("sl_vit_tiny_data", num_classes=10, image_size=32, depth=2)
    images = np.random.default_rng(0).standard_normal((8, 32, 32, 3)).astype(np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), images)

    def loss(variables: Any, images: Any) -> Any:
        return jnp.square(jnp.asarray(model.apply(variables, images))).mean()

    def run() -> list[np.ndarray]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(variables, images))]

    fast = run()
    with kernels.disabled():
        plain = run()
    off = max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6) for a, b in zip(fast, plain, strict=True))
    if off > TOLERANCE:
        remedy = f"switch them off with {kernels.VARIABLE}=0"
        return [Finding("self-test", f"the kernels differ by {off:.1e}: {remedy}", wrong=True)]
    return [Finding("self-test", f"loss and gradients with and without kernels agree to {off:.1e}")]
