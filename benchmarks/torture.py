"""Training under torture: killed, stopped and damaged at random moments, then resumed; does it end as if nothing was?

    python -m benchmarks.torture --kills 100 --stops 20 --flips 20

Every case starts a run of its own, does its harm once, resumes until the run is finished, and compares the model file
and the table of figures with those of a run that nothing happened to. Moments are drawn from the whole life of a
process after its first lines: reading, compiling, steps, checkpoints, evaluations, pictures and report.
"""

import argparse
import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.runs import TINY, draw_photos

RUN = [*TINY, "--epochs", "4", "--batch-size", "16", "--ema", "0.1", "--image-size", "12", "--checkpoint-seconds", "0"]
RESUME = 75
FIGURES = ("step", "train_loss", "train_top1", "val_loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="kill -9 at a random moment")
    parser.add_argument("--stops", type=int, default=5, help="SIGTERM at a random moment")
    parser.add_argument("--flips", type=int, default=5, help="kill -9, then a flipped bit in the newest checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder")
    given = parser.parse_args()
    draw, begun = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as temporary:
        top = given.folder or Path(temporary)
        torture = Torture(top, draw)
        print(f"undisturbed: {torture.seconds:.1f} s a run", flush=True)
        failures = 0
        for harm, number in (("kill", given.kills), ("stop", given.stops), ("flip", given.flips)):
            moments: Counter[str] = Counter()
            same = 0
            for i in range(number):
                where, problem = torture.case(harm, i)
                moments[where] += 1
                same += problem is None
                if problem is not None:
                    print(f"{harm} {i}, {where}: {problem}", flush=True)
            failures += number - same
            if number:
                met = ", ".join(f"{count} {where}" for where, count in moments.most_common())
                print(f"{harm}: {same} of {number} ended with the same weights and figures ({met})", flush=True)
    print(f"{(time.monotonic() - begun) / 60:.1f} min in all, {failures} failures")
    sys.exit(failures > 0)


class Torture:
    def __init__(self, top: Path, draw: random.Random) -> None:
        self.top, self.draw, self.data = top, draw, top / "photos"
        self.env = {**os.environ, "XDG_CACHE_HOME": str(top / "cache"), "SMALLVIT_FAST_ENV": "0"}
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
        # Before the loop and behind it a SIGTERM ends a process at once, as it does any other.
        if harm == "stop" and process.returncode not in (RESUME, -signal.SIGTERM, 0):
            return where, f"exit code {process.returncode}"
        if harm == "flip":
            where += _flip(folder, self.draw)
        for _ in range(3):  # a run that was not begun is begun, one that is finished is left alone
            if (folder / "result.json").exists():
                break
            begun = (folder / "config.json").exists()
            self._finish(self._command(folder.name) if not begun else self._train("--resume", folder))
        problem = self._difference(folder)
        if problem is None:
            shutil.rmtree(folder)
        return where, problem

    def _difference(self, folder: Path) -> str | None:
        weights = [(run / "model/model.safetensors").read_bytes() for run in (folder, self.whole)]
        if weights[0] != weights[1]:
            return "other weights"
        tables = []
        for run in (folder, self.whole):
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

    def _finish(self, command: list[str]) -> None:
        run = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=600)
        if run.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")


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
