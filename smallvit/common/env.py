"""How a process starts so that it computes fast on a CPU. Nothing here imports jax: it must come before."""

import os
import platform
import sys
from contextlib import suppress

from smallvit.common.files import trim, user_cache

# XLA asks malloc for its buffers afresh at every step. Huge pages, one arena, and nothing given back in between: else
# the kernel hands out and clears the same pages again and again, which costs a quarter of a training step.
_MALLOC = ("hugetlb=1", "arena_max=1", "mmap_max=0", f"trim_threshold={2**34}", f"top_pad={2**28}")

COMPILED = 4 * 10**9  # bytes of programs that are kept


def fast_env() -> dict[str, str]:
    """The environment variables that the `smallvit` commands start with; set them before Python starts."""
    if platform.libc_ver()[0] != "glibc":
        return {}
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{knob}" for knob in _MALLOC)}


def restart_fast() -> None:
    """Restarts the process with `fast_env`, once; SMALLVIT_FAST_ENV=0 switches this off.

    Call it before anything heavy is imported: the new process imports everything again.
    """
    if os.environ.get("SMALLVIT_FAST_ENV", "1") == "0":
        return
    if missing := {name: value for name, value in fast_env().items() if name not in os.environ}:
        command = [sys.executable, *sys.orig_argv[1:]]
        with suppress(OSError):  # slower is better than not at all
            os.execve(sys.executable, command, {**os.environ, **missing, "SMALLVIT_FAST_ENV": "0"})


def use_device(kind: str | None, *, alone: bool = True) -> None:
    """Computes on devices of this kind; a ValueError if there are none. Call it before anything is computed.

    Processes that train together (not `alone`) find their devices later, when they have found each other.
    """
    import jax

    if kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif kind is not None and alone and jax.default_backend() != kind:
        found = jax.default_backend()
        raise ValueError(
            f"device {kind} is not available: jax finds only {found}; install jax for it, see docs.jax.dev"
        )


def keep_compiled() -> None:
    """Keeps compiled programs in the user's cache, so that the next run starts faster."""
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        trim(user_cache() / "compiled", COMPILED)
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
