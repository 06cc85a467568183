"""Process settings for fast computation on a CPU. No imports of jax here: the settings must come first."""

import os
import platform
import sys
from contextlib import suppress

from smallvit.common.files import trim, user_cache

# XLA allocates new buffers in every step. With huge pages, few arenas and no memory returned in between, the system
# does not map and clear the same pages in every step, which would take a quarter of its time. With a single arena, the
# threads that compile would wait for each other.
_MALLOC = ("hugetlb=1", "arena_max=2", "mmap_max=0", f"trim_threshold={2**34}", f"top_pad={2**28}")

COMPILED = 4 * 10**9  # bytes, size limit of the cache of compiled programs


def fast_env() -> dict[str, str]:
    """The environment variables that the `smallvit` commands set; they take effect before Python starts."""
    if platform.libc_ver()[0] != "glibc":
        return {}
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{knob}" for knob in _MALLOC)}


def restart_fast() -> None:
    """Restarts the process once, with `fast_env`; SMALLVIT_FAST_ENV=0 disables this.

    Call it before any heavy import: the new process imports everything again.
    """
    if os.environ.get("SMALLVIT_FAST_ENV", "1") == "0":
        return
    if missing := {name: value for name, value in fast_env().items() if name not in os.environ}:
        command = [sys.executable, *sys.orig_argv[1:]]
        with suppress(OSError):  # a slow process is better than none
            os.execve(sys.executable, command, {**os.environ, **missing, "SMALLVIT_FAST_ENV": "0"})


def prepare(device: str | None) -> None:
    """Selects the device and enables the compilation cache, for a command that computes."""
    use_device(device)
    keep_compiled()


def use_device(kind: str | None, *, alone: bool = True) -> None:
    """Selects the devices of this kind, or raises a ValueError if there are none.

    Call it before any computation. Processes that train together (not `alone`) select their devices after they have
    connected.
    """
    import jax

    if kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif kind is not None and alone and jax.default_backend() != kind:
        default = jax.default_backend()
        raise ValueError(
            f"device {kind} is not available: jax finds only {default}; install jax for {kind}, see docs.jax.dev"
        )


def keep_compiled() -> None:
    """Enables jax's persistent compilation cache, so that the next run starts faster."""
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        trim(user_cache() / "compiled", COMPILED)
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
