"""Several processes, maybe on several machines, that train one model: they connect, synchronise and agree."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from smallvit.common.errors import RESUME
from smallvit.common.output import Lasting
from smallvit.training.mesh import over_images, replicated
from smallvit.training.options import MachineOptions

_LONGEST = 4096
_RECEIVING = ("ep_poll", "do_epoll_wait")  # where a thread waits in epoll, by the version of Linux
_SILENCE = 10  # seconds without a heartbeat after which a process counts as lost


def join(machine: MachineOptions) -> None:
    """Connects to the other processes, given by options or found by jax in a cluster's environment."""
    given = (machine.coordinator, machine.num_processes, machine.process_id)
    if jax.distributed.is_initialized():
        return
    if any(value is not None for value in given):
        if any(value is None for value in given):
            raise ValueError("coordinator, num_processes and process_id belong together: give all three, or none")
    # A Slurm batch script also sees the number of its tasks; only srun starts them and sets this variable.
    elif not os.environ.get("JAX_COORDINATOR_ADDRESS") and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    jax.distributed.initialize(*given, heartbeat_timeout_seconds=_SILENCE, shutdown_timeout_seconds=_SILENCE)
    # Connect now: while the model compiles, one process may be later than the others' connection timeout.
    multihost_utils.sync_global_devices("joined")
    _defer_network_threads()


def _defer_network_threads() -> None:
    """Keeps the threads that receive data on a CPU from interrupting the computation.

    A thread that interrupts another one in the middle of a send polls until its time slice ends. With SCHED_BATCH it
    interrupts none. With SCHED_IDLE, for cores that nobody else uses, it only runs when a core is idle, which is faster
    still; next to other programs it would hardly run at all. Only Linux shows which threads they are: those that wait
    in epoll, and that gRPC has not named.
    """
    tasks = Path("/proc/self/task")
    if jax.default_backend() != "cpu" or not tasks.exists():
        return
    policy = os.SCHED_IDLE if os.environ.get("SMALLVIT_EXCLUSIVE") == "1" else os.SCHED_BATCH
    time.sleep(0.05)  # until they have started to wait
    name = Path("/proc/self/comm").read_text()
    for task in tasks.iterdir():
        with suppress(OSError):
            if (task / "wchan").read_text() in _RECEIVING and (task / "comm").read_text() == name:
                os.sched_setscheduler(int(task.name), policy, os.sched_param(0))


def broadcast_choice(choose: Callable[[], str]) -> str:
    """Returns the first process's choice in all processes."""
    if jax.process_count() == 1:
        return choose()
    text = np.zeros(_LONGEST, np.uint8)
    if jax.process_index() == 0:
        encoded = choose().encode()
        text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(text)).rstrip(b"\0").decode()


def barrier(where: str) -> None:
    """Waits until all processes reach this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


class Votes:
    """Tells all processes at the same step what any of them wants; one step late, so that no step waits for it."""

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
        """Discards the last votes, which were granted in the meantime; all processes must call it at the same step."""
        self._cast = None


@contextmanager
def leaving_together(log: Path) -> Iterator[None]:
    """Exits with one line if another process is lost, since this one would wait for it forever.

    The runtime's long messages go to the log.
    """
    if jax.process_count() == 1:
        yield
        return
    own = os.fdopen(os.dup(2), "w", buffering=1)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = Lasting(own)  # until the process ends: the runtime may still print on exit
    # The runtime aborts if a process sends no heartbeat. A Python handler would no longer run; a C handler does, in the
    # aborting thread.
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
    """Whether a connection to another process failed, for which the runtime has several types of errors."""
    if jax.process_count() == 1 or "RESOURCE_EXHAUSTED" in str(error):  # out of memory: resuming would not help
        return False
    words = ("Gloo", "NCCL", "Connection reset", "Connection closed", "oordination service")
    return isinstance(error, jax.errors.JaxRuntimeError) or any(word in str(error) for word in words)


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[object] = []  # must live as long as the process


def _leave(stderr: int) -> None:
    """Exits at once: the normal exit of Python would make the runtime wait for the other processes again."""
    line = "lost another process of this training: start all again with --resume, the last checkpoint is kept"
    os.write(stderr, f"smallvit: {line}\n".encode())
    os._exit(RESUME)
