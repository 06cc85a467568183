"""Several processes, perhaps on several machines, that train one model: they start together and agree."""

import os
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from smallvit.training.config import MachineOptions

_LONGEST = 4096


def join(machine: MachineOptions) -> None:
    """Meets the other processes, given by flags or found by jax in the environment of a cluster."""
    given = (machine.coordinator, machine.num_processes, machine.process_id)
    if jax.distributed.is_initialized():
        return
    if any(value is not None for value in given):
        if any(value is None for value in given):
            raise ValueError("coordinator, num_processes and process_id belong together: give all three, or none")
        jax.distributed.initialize(*given)
    elif os.environ.get("JAX_COORDINATOR_ADDRESS") or int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize()


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
