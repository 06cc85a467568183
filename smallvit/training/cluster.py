"""Several processes, perhaps on several machines, that train one model: they start together and agree."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from smallvit.common.errors import RESUME
from smallvit.common.output import Lasting
from smallvit.training.config import MachineOptions
from smallvit.training.mesh import over_images, replicated

_LONGEST = 4096
_SILENCE = 10  # seconds without a sign of life after which a process counts as gone


def join(machine: MachineOptions) -> None:
    """Meets the other processes, given by flags or found by jax in the environment of a cluster."""
    given = (machine.coordinator, machine.num_processes, machine.process_id)
    if jax.distributed.is_initialized():
        return
    if any(value is not None for value in given):
        if any(value is None for value in given):
            raise ValueError("coordinator, num_processes and process_id belong together: give all three, or none")
    # The batch script of a Slurm job knows of all its tasks, too; only srun starts them and sets this.
    elif not os.environ.get("JAX_COORDINATOR_ADDRESS") and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    jax.distributed.initialize(*given, heartbeat_timeout_seconds=_SILENCE, shutdown_timeout_seconds=_SILENCE)
    # They connect now: once the model is compiled, one may be later than the others wait for a connection.
    multihost_utils.sync_global_devices("joined")


def agree(choose: Callable[[], str]) -> str:
    """What the first process chose, in all of them."""
    if jax.process_count() == 1:
        return choose()
    text = np.zeros(_LONGEST, np.uint8)
    if jax.process_index() == 0:
        chosen = choose().encode()
        text[: len(chosen)] = np.frombuffer(chosen, np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(text)).rstrip(b"\0").decode()


def meet(where: str) -> None:
    """Goes on when all have come to this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


class Votes:
    """What any of the processes wants, known to all at the same step. No step waits for it: the answer is one late."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._any = jax.jit(lambda wants: wants.any(axis=0), out_shardings=replicated(mesh))
        self._cast: Bool[Array, " k"] | None = None

    def __call__(self, *wants: bool) -> tuple[bool, ...]:
        if jax.process_count() == 1:
            return wants
        before, mine = self._cast, np.array([wants])
        rows = jax.make_array_from_callback((self._mesh.size, len(wants)), over_images(self._mesh), lambda _: mine)
        self._cast = self._any(rows)
        return (False,) * len(wants) if before is None else tuple(map(bool, np.asarray(before)))

    def clear(self) -> None:
        """Forgets the last ones, which were granted in the meantime; all processes must do so at the same step."""
        self._cast = None


@contextmanager
def leaving_together(log: Path) -> Iterator[None]:
    """If another process is gone, this one leaves in a line: whatever it waits for will not come.

    What the runtime itself prints then, at length, goes to the log.
    """
    if jax.process_count() == 1:
        yield
        return
    own = os.fdopen(os.dup(2), "w", buffering=1)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = Lasting(own)  # to the end of the process, for the runtime may still print when that comes
    # The runtime aborts when there is no sign of life from a process. A handler of Python's own would not be called
    # any more; one of C is, in the thread that aborts.
    handler = _HANDLER(lambda _: _leave(own.fileno()))
    _handlers.append(handler)
    ctypes.CDLL("msvcrt" if os.name == "nt" else None).signal(signal.SIGABRT, handler)
    try:
        yield
    except Exception as error:
        if not lost(error):
            raise
        os.write(2, f"{error}\n".encode())
        _leave(own.fileno())


def lost(error: Exception) -> bool:
    """Whether it is a connection to another process that failed; the runtime has several types of error for that."""
    if jax.process_count() == 1 or "RESOURCE_EXHAUSTED" in str(error):  # no memory: resuming would not help
        return False
    words = ("Gloo", "NCCL", "Connection reset", "Connection closed", "oordination service")
    return isinstance(error, jax.errors.JaxRuntimeError) or any(word in str(error) for word in words)


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[object] = []  # they must live as long as the process


def _leave(stderr: int) -> None:
    """Without the end of a Python process, in which the runtime waits for the others once more."""
    line = "another process of this training is gone: start all again with --resume, the last checkpoint is kept"
    os.write(stderr, f"smallvit: {line}\n".encode())
    os._exit(RESUME)
