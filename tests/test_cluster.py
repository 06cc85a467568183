"""Several processes; the unchanged Slurm script of docs/cluster.md on one machine, with fake `srun` and `scontrol`."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import TINY, assert_same, checkpoints, draw_photos

DOCS = Path(__file__).parents[1] / "docs/cluster.md"
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys

command = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=0"]
step = {{"STEP_NUM_TASKS": 2, "NTASKS": 2, "STEP_NODELIST": "127.0.0.1", "STEP_NUM_NODES": 2, "LOCALID": 0}}
tasks = []
for i in range(2):
    env = {{f"SLURM_{{name}}": str(value) for name, value in {{**step, "PROCID": i}}.items()}}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **env}}))
with open("tasks", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""


def script(name: str, options: list[str]) -> str:
    """The script of the docs, with the values of the test."""
    (text,) = re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL)
    text, changed = re.subn(r"^NAME=.*$", f"NAME={name}", text, flags=re.MULTILINE)
    text, more = re.subn(r"^OPTIONS=.*$", f'OPTIONS="{" ".join(options)}"', text, flags=re.MULTILINE)
    assert (changed, more) == (1, 1)
    return text


JOINED = """
import os
from smallvit.training.cluster import join
from smallvit.training.options import MachineOptions

join(MachineOptions(coordinator="localhost:{port}", num_processes=1, process_id=0))
policies = [os.sched_getscheduler(int(task)) for task in os.listdir("/proc/self/task")]
print(policies.count(os.SCHED_IDLE), policies.count(os.SCHED_BATCH), os.sched_getscheduler(0) == os.SCHED_OTHER)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a thread waits for")
@pytest.mark.parametrize("exclusive", [False, True])
def test_threads_that_receive_data_do_not_interrupt_others(exclusive: bool, env: dict[str, str]):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", JOINED.format(port=port)]
    env = {**env, "SMALLVIT_EXCLUSIVE": str(int(exclusive))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    idle, batch, main_runs = done.stdout.split()[-3:]
    assert main_runs == "True"
    some, none = (idle, batch) if exclusive else (batch, idle)
    assert int(some) in (1, 2)  # of some thirty
    assert int(none) == 0


@pytest.mark.xdist_group("train_run")
def test_a_job_that_is_stopped_and_queued_again_ends_as_if_it_had_not_been(env: dict[str, str], tmp_path: Path):
    draw_photos(tmp_path / "photos")
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in {
        "srun": SRUN,
        "scontrol": '#!/bin/bash\necho "$@" >> requeued\n',
        "smallvit": f'#!/bin/bash\nexec {sys.executable} -m smallvit "$@"\n',
    }.items():
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    options = [*TINY, "--epochs", "20", "--batch-size", "16", "--image-size", "12", "--checkpoint-seconds", "0.1"]
    options += ["--policy", "none", "--cutmix", "0", "--mixup", "0", "--erasing", "0"]  # less to compile
    job = {**env, "PATH": f"{bin}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid())}
    job["PYTHONPATH"] = str(Path(__file__).parents[1])

    def submit(name: str) -> subprocess.Popen[str]:
        (tmp_path / "job.sh").write_text(script(name, options))
        return subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=job, stderr=subprocess.PIPE, text=True)

    with submit("whole") as whole:
        _, said = whole.communicate(timeout=200)
    assert whole.returncode == 0, said

    (tmp_path / "tasks").unlink()
    with submit("stopped") as first:
        deadline = time.monotonic() + 200
        while not checkpoints(tmp_path / "runs/stopped"):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(int((tmp_path / "tasks").read_text().split()[1]), signal.SIGTERM)
        first.communicate(timeout=60)
    assert first.returncode == 75
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    assert not (tmp_path / "runs/stopped/result.json").exists()

    with submit("stopped") as again:
        _, said = again.communicate(timeout=200)
    assert again.returncode == 0, said
    assert_same(tmp_path / "runs/stopped", tmp_path / "runs/whole")
