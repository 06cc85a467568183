"""Several processes that train one model: they stop together, and none waits for a lost one."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

from smallvit.training import cluster
from smallvit.training.options import MachineOptions
from tests.runs import QUICK, TINY, checkpoints, command

LONG = [*TINY, "--epochs", 2000, "--batch-size", 16, "--image-size", 12, "--checkpoint-seconds", 1]
PLAIN = ["--policy", "none", "--cutmix", 0, "--mixup", 0, "--erasing", 0]  # less to compile


@contextmanager
def two(photos: Path, env: dict[str, str], runs: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that have trained together until there is a checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ["--coordinator", address, "--num-processes", 2, "--process-id"]
    processes = [
        subprocess.Popen(
            command(photos, *LONG, *PLAIN, "--runs", runs, "--name", "two", *meeting, i),
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        deadline = time.monotonic() + 200
        while not checkpoints(runs / "two"):
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.xdist_group("train_run")
def test_a_signal_to_one_stops_all(photos: Path, env: dict[str, str], tmp_path: Path):
    with two(photos, env, tmp_path) as processes:
        processes[1].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=60)[1].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [75, 75]
    newest = int(checkpoints(tmp_path / "two")[-1].stem)
    assert said[0] == said[1]
    assert said[0].startswith(f"smallvit: stopped at step {newest:,}: ")


@pytest.mark.xdist_group("train_run")
@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_killed_ends_the_others(victim: int, photos: Path, env: dict[str, str], tmp_path: Path):
    with two(photos, env, tmp_path) as processes:
        processes[victim].kill()
        killed = time.monotonic()
        survivor = processes[1 - victim]
        lines = survivor.communicate(timeout=60)[1].splitlines()
        assert time.monotonic() - killed < 15
    assert survivor.returncode == 75
    assert [line for line in lines if not line.startswith(("reading ", "decoding "))] == [
        "smallvit: lost another process of this training: start all again with --resume, the last checkpoint is kept"
    ]
    assert checkpoints(tmp_path / "two")


def test_a_batch_script_without_srun_is_one_process(monkeypatch: pytest.MonkeyPatch):
    """`sbatch` sets these variables in its script; only srun, which starts the tasks, sets SLURM_STEP_NUM_TASKS."""
    for name, value in {"NTASKS": "4", "JOB_ID": "17", "PROCID": "0", "NODELIST": "node1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.jax.distributed, "initialize", lambda *_, **__: pytest.fail("it waits for others"))
    cluster.join(MachineOptions())


@pytest.mark.xdist_group("train_run")
def test_a_run_outlives_its_terminal(photos: Path, env: dict[str, str], tmp_path: Path):
    read, write = os.pipe()
    args = command(photos, *QUICK, "--runs", tmp_path, "--name", "alone", "--image-size", 12)
    with subprocess.Popen(args, env=env, stdout=write, stderr=write) as run:
        os.close(write)
        assert os.read(read, 1)
        os.close(read)  # as `| head -c 1` does
        assert run.wait(200) == 0
    assert (tmp_path / "alone/result.json").exists()
    assert "the report is" in (tmp_path / "alone/log.txt").read_text()


@pytest.mark.xdist_group("train_run")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_other_signals_stop_a_run_too(number: signal.Signals, photos: Path, env: dict[str, str], tmp_path: Path):
    # A run under `nohup` ignores SIGHUP, as it should, and the suite may be such a run.
    heard = ["env", f"--default-signal={number.name.removeprefix('SIG')}"]
    args = [*heard, *command(photos, *LONG, *PLAIN, "--runs", tmp_path, "--name", "alone")]
    with subprocess.Popen(args, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 200
        while not checkpoints(tmp_path / "alone"):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(number)
        said = run.communicate(timeout=60)[1].splitlines()[-1]
    assert run.returncode == 75
    assert said.startswith("smallvit: stopped at step ")


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [("UNKNOWN: Gloo AllReduce failed: Connection closed by peer", True), ("RESOURCE_EXHAUSTED: Out of memory", False)],
)
def test_a_lost_process_is_not_a_lack_of_memory(message: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch):
    assert not cluster.lost(jax.errors.JaxRuntimeError(message))  # alone there is nobody to lose
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert cluster.lost(jax.errors.JaxRuntimeError(message)) == is_lost
