"""Training under torture: killed, stopped and damaged at random moments, then resumed; does it end as if nothing was?

    python -m benchmarks.torture --kills 100 --stops 20 --flips 20 --together 20 --full 20

Every case starts a run of its own, does its harm once, resumes until the run is finished, and compares the model file
and the table of figures with those of a run that nothing happened to. Moments are drawn from the whole life of a
process after its first lines: reading, compiling, steps, checkpoints, evaluations, pictures and report.
"""

import argparse
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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.runs import TINY, draw_photos

RUN = [*TINY, "--epochs", "3", "--batch-size", "16", "--ema", "0.1", "--image-size", "12", "--checkpoint-seconds", "0"]
RUN += ["--policy", "none", "--cutmix", "0", "--mixup", "0", "--erasing", "0"]  # less to compile
DISK = 12 * 2**20  # bytes of the small disk
LEAVES = 60  # seconds within which the other process must leave, on a busy machine
RESUME = 75
FIGURES = ("step", "train_loss", "train_top1", "val_loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="kill -9 at a random moment")
    parser.add_argument("--stops", type=int, default=5, help="SIGTERM at a random moment")
    parser.add_argument("--flips", type=int, default=5, help="kill -9, then a flipped bit in the newest checkpoint")
    parser.add_argument("--together", type=int, default=0, help="two processes, kill -9 of one at a random moment")
    parser.add_argument("--full", type=int, default=0, help="a disk that is full at a random moment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder")
    given = parser.parse_args()
    draw, begun = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as temporary:
        top = given.folder or Path(temporary)
        torture = Torture(top, draw)
        print(f"undisturbed: {torture.seconds:.1f} s a run", flush=True)
        failures = 0
        for harm in ("kill", "stop", "flip", "together", "full"):
            number = getattr(given, harm if harm in ("together", "full") else f"{harm}s")
            moments: Counter[str] = Counter()
            same, since = 0, time.monotonic()
            if number and harm == "together":
                torture.train_together()
            for i in range(number):
                case = {"together": torture.together, "full": torture.full}.get(harm, torture.case)
                where, problem = case(harm, i)
                moments[where] += 1
                same += problem is None
                if problem is not None:
                    print(f"{harm} {i}, {where}: {problem}", flush=True)
            failures += number - same
            if number:
                met = ", ".join(f"{count} {where}" for where, count in moments.most_common())
                seconds = (time.monotonic() - since) / number
                print(
                    f"{harm}: {same} of {number} ended with the same weights and figures, {seconds:.0f} s each ({met})"
                )
    print(f"{(time.monotonic() - begun) / 60:.1f} min in all, {failures} failures")
    sys.exit(failures > 0)


class Torture:
    def __init__(self, top: Path, draw: random.Random) -> None:
        self.top, self.draw, self.data = top, draw, top / "photos"
        self.env = {**os.environ, "XDG_CACHE_HOME": str(top / "cache"), "SMALLVIT_FAST_ENV": "0"}
        self.env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        draw_photos(self.data)
        self._finish(self._command("warm"))  # compiles
        begun = time.monotonic()
        self._finish(self._command("whole"))
        self.seconds = time.monotonic() - begun
        self.whole = top / "runs/whole"

    def case(self, harm: str, number: int) -> tuple[str, str | None]:
        """When the harm was done, and what is wrong with the result."""
        folder = self.top / f"runs/{harm}-{number}"
        with subprocess.Popen(
            self._command(folder.name), env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            if harm == "flip":  # later, when there are two states
                while process.poll() is None and len(_states(folder)) < 2:
                    time.sleep(0.01)
                time.sleep(self.draw.uniform(0, 0.1) * self.seconds)
            else:
                time.sleep(self.draw.uniform(0.05, 0.98) * self.seconds)
            where = _where(folder) if process.poll() is None else "after the end"
            process.send_signal(signal.SIGTERM if harm == "stop" else signal.SIGKILL)
            process.communicate()
        # Before its first line, while Python imports, a SIGTERM ends a process at once, as it does any other.
        if harm == "stop" and process.returncode not in (RESUME, 0) and folder.exists():
            return where, f"exit code {process.returncode}"
        if harm == "flip":
            where += _flip(folder, self.draw)
        return where, self._resumed(folder)

    def train_together(self) -> None:
        """What one run of two processes ends with, which is not what one process does."""
        self._finish_together(self._command("whole-together"))
        begun = time.monotonic()
        self._finish_together(self._command("together-again"))
        self.seconds_together = time.monotonic() - begun
        self.whole_together = self.top / "runs/whole-together"

    def together(self, harm: str, number: int) -> tuple[str, str | None]:
        folder = self.top / f"runs/{harm}-{number}"
        victim = self.draw.randrange(2)
        processes = self._start_together(self._command(folder.name))
        time.sleep(self.draw.uniform(0.05, 0.98) * self.seconds_together)
        where = _where(folder) if processes[victim].poll() is None else "after the end"
        processes[victim].kill()
        problem = None
        try:
            processes[1 - victim].communicate(timeout=LEAVES)
        except subprocess.TimeoutExpired:
            problem = f"the other process waits for more than {LEAVES} s"
        for process in processes:
            process.kill()
            process.communicate()
        code = processes[1 - victim].returncode
        # Until there is a run folder the runtime ends it in its own way: there is nothing to resume.
        if problem is None and code not in (0, RESUME) and _states(folder):
            problem = f"the other process ended with {code}"
        for _ in range(3):
            if problem is not None or (folder / "result.json").exists():
                break
            begun = (folder / "config.json").exists()
            self._finish_together(self._train("--resume", folder) if begun else self._command(folder.name))
        problem = problem or self._difference(folder, self.whole_together)
        if problem is None:
            shutil.rmtree(folder)
        return where, problem

    def full(self, harm: str, number: int) -> tuple[str, str | None]:
        with _small_disk(self.top / "small") as (small, mounted):
            folder = small / f"{harm}-{number}"
            command = self._train(self.data, *RUN, "--runs", small, "--name", folder.name)
            with subprocess.Popen(
                command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            ) as process:
                time.sleep(self.draw.uniform(0.05, 0.98) * self.seconds)
                where = _where(folder) if process.poll() is None else "after the end"
                if mounted:
                    left = self.draw.choice((0, self.draw.randrange(2**16), self.draw.randrange(2**21)))
                    _fill(small / "filler", max(shutil.disk_usage(small).free - left, 0))
                elif process.poll() is None:
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (self.draw.randrange(2**14), -1))
                _, said = process.communicate()
            (small / "filler").unlink(missing_ok=True)
            if process.returncode != 0:
                where += ", seen"
                lines = [line for line in said.splitlines() if not line.startswith(("reading ", "decoding "))]
                if len(lines) != 1 or not lines[0].startswith("smallvit: "):
                    return where, f"exit code {process.returncode}, {len(lines)} lines: {said[-600:]}"
            problem = self._resumed(folder, command)
            return where, problem

    def _resumed(self, folder: Path, command: list[str] | None = None) -> str | None:
        """What is wrong with the run after it was resumed to its end; without an error it is deleted."""
        for _ in range(3):  # a run that was not begun is begun, one that is finished is left alone
            if (folder / "result.json").exists():
                break
            begun = (folder / "config.json").exists()
            self._finish(self._train("--resume", folder) if begun else command or self._command(folder.name))
        problem = self._difference(folder, self.whole)
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

    def _command(self, name: str) -> list[str]:
        return self._train(self.data, *RUN, "--runs", self.top / "runs", "--name", name)

    def _train(self, *args: object) -> list[str]:
        return [sys.executable, "-m", "smallvit.cli", "train", *map(str, args)]

    def _start_together(self, command: list[str]) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        meeting = ["--coordinator", address, "--num-processes", "2", "--process-id"]
        return [
            subprocess.Popen(
                [*command, *meeting, str(i)], env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for i in range(2)
        ]

    def _finish_together(self, command: list[str]) -> None:
        processes = self._start_together(command)
        try:
            said = [process.communicate(timeout=600)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        codes = [process.returncode for process in processes]
        if codes != [0, 0]:
            raise RuntimeError(f"two processes ended with {codes}:\n{said[0]}\n{said[1]}")

    def _finish(self, command: list[str]) -> None:
        run = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=600)
        if run.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")


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
