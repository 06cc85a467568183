"""Training under torture: killed, stopped and damaged at random moments, then resumed; does it end as if nothing was?

    python -m benchmarks.torture --kills 100 --stops 20 --flips 20 --together 20 --full 20

Every case starts a run of its own, does its harm once, resumes until the run is finished, and compares the model file
and the table of figures with those of a run that nothing happened to. Moments are drawn evenly from the processor time
of a run, so that a busy machine does not move them: reading, compiling, steps, checkpoints, evaluations, pictures and
report. Runs are forks of this process, which has imported everything and computed nothing; the one they are compared
with is a process of its own.
"""

import argparse
import atexit
import csv
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tests.runs import TINY, draw_photos

RUN = [*TINY, "--epochs", "3", "--batch-size", "16", "--ema", "0.1", "--image-size", "12", "--checkpoint-seconds", "0"]
RUN += ["--policy", "none", "--cutmix", "0", "--mixup", "0", "--erasing", "0"]  # less to compile
DISK = 12 * 2**20  # bytes of the small disk
LEAVES = 60  # seconds within which the other process must leave, on a busy machine
RESUME = 75
IMPORTED = "cli models plots.images plots.maps plots.scores training.crossvalidation training.keywords training.loop"
FIGURES = ("step", "train_loss", "train_top1", "val_loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="kill -9 at a random moment")
    parser.add_argument("--stops", type=int, default=5, help="SIGTERM at a random moment")
    parser.add_argument("--flips", type=int, default=5, help="kill -9, then a flipped bit in the newest checkpoint")
    parser.add_argument("--together", type=int, default=0, help="two processes, kill -9 of one at a random moment")
    parser.add_argument("--full", type=int, default=0, help="a disk that is full at a random moment")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after these, begin no other case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder")
    given = parser.parse_args()
    draw, begun = random.Random(given.seed), time.monotonic()
    # No TemporaryDirectory, which every fork would delete at its end.
    top = given.folder or Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        torture = Torture(top, draw)
        print(f"undisturbed: {torture.seconds:.1f} s of processor time a run", flush=True)
        failures = 0
        for harm in ("kill", "stop", "flip", "full", "together"):
            number = getattr(given, harm if harm in ("together", "full") else f"{harm}s")
            moments: Counter[str] = Counter()
            same, done, since = 0, 0, time.monotonic()
            if number and harm == "together":
                torture.train_together()
            for i in range(number):
                if time.monotonic() - begun > 60 * given.minutes:
                    break
                case = {"together": torture.together, "full": torture.full}.get(harm, torture.case)
                where, problem = case(harm, i)
                moments[where] += 1
                done += 1
                same += problem is None
                if problem is not None:
                    print(f"{harm} {i}, {where}: {problem}", flush=True)
            failures += done - same
            if done:
                met = ", ".join(f"{count} {where}" for where, count in moments.most_common())
                seconds = (time.monotonic() - since) / done
                ended = f"{same} of {done} ended with the same weights and figures"
                print(f"{harm}: {ended}, {seconds:.0f} s each ({met})", flush=True)
    finally:
        if given.folder is None:
            shutil.rmtree(top, ignore_errors=True)
    print(f"{(time.monotonic() - begun) / 60:.1f} min in all, {failures} failures")
    sys.exit(failures > 0)


class Run:
    """`smallvit train` in a fork of this process, which spares it the imports."""

    def __init__(self, args: list[str], said: Path) -> None:
        self.said, self.begun, self.code, self.used = said, time.monotonic(), None, 0.0
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(args, said)

    code: int | None
    used: float  # processor time, once it has ended

    def poll(self) -> int | None:
        if self.code is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.code, self.used = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        return self.code

    def wait(self, seconds: float = 600) -> int | None:
        """The exit code; None if it has not ended by then."""
        last = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < last:
            time.sleep(0.02)
        return self.code

    def wait_for(self, seconds: float) -> None:
        """Until it has used this processor time, or has ended."""
        while self.poll() is None and self._used_so_far() < seconds:
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _used_so_far(self) -> float:
        try:
            words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # no Linux
            return time.monotonic() - self.begun
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _become(args: list[str], said: Path) -> NoReturn:
    from smallvit import cli

    code: object = 1
    try:
        with said.open("w") as errors:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(errors.fileno(), 2)
        sys.argv = ["smallvit", "train", *args]
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


class Torture:
    def __init__(self, top: Path, draw: random.Random) -> None:
        self.top, self.draw, self.data, self.started = top, draw, top / "photos", 0
        os.environ |= {
            "XDG_CACHE_HOME": str(top / "cache"),
            "SMALLVIT_FAST_ENV": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(top / "compiled"),  # of every program, however small
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        draw_photos(self.data)
        for name in IMPORTED.split():
            import_module(f"smallvit.{name}")
        self.whole = top / "runs/whole"
        command = [sys.executable, "-m", "smallvit.cli", "train", *self._args("whole")]
        process = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{process.stderr}")
        self.seconds = self._finish(self._args("again")).used
        self._same("again", self.whole)

    def _same(self, name: str, whole: Path) -> None:
        if problem := self._difference(self.top / "runs" / name, whole):
            raise RuntimeError(f"nothing was done to {name}, and still: {problem}")

    def case(self, harm: str, number: int) -> tuple[str, str | None]:
        """When the harm was done, and what is wrong with the result."""
        folder = self.top / f"runs/{harm}-{number}"
        run = self._start(self._args(folder.name))
        if harm == "flip":  # later, when there are two states
            while run.poll() is None and len(_states(folder)) < 2:
                time.sleep(0.005)
            run.wait_for(run._used_so_far() + self.draw.uniform(0, 0.1) * self.seconds if run.poll() is None else 0)
        else:
            run.wait_for(self.draw.uniform(0.02, 0.98) * self.seconds)
        where = _where(folder) if run.poll() is None else "after the end"
        run.send(signal.SIGTERM if harm == "stop" else signal.SIGKILL)
        code = run.wait()
        # Before its first line a SIGTERM ends a process at once, as it does any other.
        if harm == "stop" and code not in (RESUME, 0) and folder.exists():
            return where, f"exit code {code}"
        if harm == "flip":
            where += _flip(folder, self.draw)
        return where, self._resumed(folder, self._args(folder.name), self._finish, self.whole)

    def train_together(self) -> None:
        """What one run of two processes ends with, which is not what one process does."""
        self._finish_together(self._args("whole-together"))
        self.seconds_together = self._finish_together(self._args("together-again"))
        self.whole_together = self.top / "runs/whole-together"
        self._same("together-again", self.whole_together)

    def together(self, harm: str, number: int) -> tuple[str, str | None]:
        folder, victim = self.top / f"runs/{harm}-{number}", self.draw.randrange(2)
        runs = self._start_together(self._args(folder.name))
        runs[victim].wait_for(self.draw.uniform(0.02, 0.98) * self.seconds_together[victim])
        where = _where(folder) if runs[victim].poll() is None else "after the end"
        runs[victim].send(signal.SIGKILL)
        code = runs[1 - victim].wait(LEAVES)
        for run in runs:
            run.send(signal.SIGKILL)
            run.wait()
        if code is None:
            return where, f"the other process waits for more than {LEAVES} s"
        # Until there is a run folder the runtime ends it in its own way: there is nothing to resume.
        if code not in (0, RESUME) and _states(folder):
            return where, f"the other process ended with {code}"
        return where, self._resumed(folder, self._args(folder.name), self._finish_together, self.whole_together)

    def full(self, harm: str, number: int) -> tuple[str, str | None]:
        with _small_disk(self.top / "small") as (small, mounted):
            folder = small / f"{harm}-{number}"
            args = self._args(folder.name, small)
            run = self._start(args)
            run.wait_for(self.draw.uniform(0.02, 0.98) * self.seconds)
            where = _where(folder) if run.poll() is None else "after the end"
            if mounted:
                left = self.draw.choice((0, self.draw.randrange(2**16), self.draw.randrange(2**21)))
                _fill(small / "filler", max(shutil.disk_usage(small).free - left, 0))
            elif run.poll() is None:
                resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (self.draw.randrange(2**14), -1))
            code, said = run.wait(), run.said.read_text()
            (small / "filler").unlink(missing_ok=True)
            if code != 0:
                where += ", seen"
                lines = [line for line in said.splitlines() if not line.startswith(("reading ", "decoding "))]
                if len(lines) != 1 or not lines[0].startswith("smallvit: "):
                    return where, f"exit code {code}, {len(lines)} lines: {said[-600:]}"
            return where, self._resumed(folder, args, self._finish, self.whole)

    def _resumed(self, folder: Path, args: list[str], finish: Callable[[list[str]], object], whole: Path) -> str | None:
        """What is wrong with the run after it was resumed to its end; without an error it is deleted."""
        for _ in range(3):  # a run that was not begun is begun, one that is finished is left alone
            if (folder / "result.json").exists():
                break
            finish(["--resume", str(folder)] if (folder / "config.json").exists() else args)
        problem = self._difference(folder, whole)
        if problem is None:
            shutil.rmtree(folder)
        return problem

    def _difference(self, folder: Path, whole: Path) -> str | None:
        weights = [(run / "model/model.safetensors").read_bytes() for run in (folder, whole)]
        if weights[0] != weights[1]:
            return "other weights"
        tables = []
        for run in (folder, whole):
            with (run / "metrics.csv").open() as file:
                tables.append([[row[name] for name in FIGURES] for row in csv.DictReader(file)])
        if tables[0] != tables[1]:
            return "other figures"
        if left := [path.name for path in (folder / "checkpoints").iterdir() if "tmp" in path.name]:
            return f"left behind: {', '.join(left)}"
        return None

    def _args(self, name: str, runs: Path | None = None) -> list[str]:
        return [str(self.data), *RUN, "--runs", str(runs or self.top / "runs"), "--name", name]

    def _start(self, args: list[str]) -> Run:
        self.started += 1
        return Run(args, self.top / f"said-{self.started}.txt")

    def _start_together(self, args: list[str]) -> list[Run]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        meeting = ["--coordinator", address, "--num-processes", "2", "--process-id"]
        return [self._start([*args, *meeting, str(i)]) for i in range(2)]

    def _finish(self, args: list[str]) -> Run:
        run = self._start(args)
        self._ended(run, args)
        return run

    def _finish_together(self, args: list[str]) -> list[float]:
        """The processor time of each process."""
        runs = self._start_together(args)
        for run in runs:
            self._ended(run, args)
        return [run.used for run in runs]

    def _ended(self, run: Run, args: list[str]) -> None:
        if (code := run.wait()) != 0:
            run.send(signal.SIGKILL)
            raise RuntimeError(f"smallvit train {' '.join(args)} ended with {code}:\n{run.said.read_text()}")


@contextmanager
def _small_disk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """A disk of its own, where mounting is allowed; else files may only be of some size, and False."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield folder, mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def _fill(path: Path, size: int) -> None:
    with path.open("wb") as file:
        try:
            for _ in range(size // 2**16 + 1):
                file.write(bytes(min(2**16, size)))
                size -= min(2**16, size)
        except OSError:  # the run was faster
            pass


def _where(folder: Path) -> str:
    """What the run was doing, by what it has written."""
    if not folder.exists():
        return "before there was a run folder"
    if (folder / "confusion.png").exists():
        return "in pictures and report"
    checkpoints = folder / "checkpoints"
    if not checkpoints.exists():
        return "before the first checkpoint"
    whole = {path.stem for path in _states(folder)}
    if any(path.is_dir() and path.name not in whole for path in checkpoints.glob("[0-9]*")):
        return "in a checkpoint"
    return "between checkpoints"


def _states(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("[0-9]*.json"))


def _flip(folder: Path, draw: random.Random) -> str:
    states = _states(folder)
    if len(states) < 2 or (folder / "result.json").exists():  # with one state alone the run would stop, as it should
        return ", nothing to flip"
    files = [path for path in states[-1].with_suffix("").rglob("*") if path.is_file() and path.stat().st_size]
    victim = draw.choice(files)
    content = bytearray(victim.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    victim.write_bytes(content)
    return ""


if __name__ == "__main__":
    main()
