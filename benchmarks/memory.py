"""Memory of `smallvit train`: the peak with few and with many images, and its growth over the epochs.

    .venv/bin/python -m benchmarks.memory [--images 100000] [--minutes 1] [--epochs 50]

The peak is Linux's VmHWM of the command and its child processes, sampled five times a second: on the embedded set
(8,000 grey images of 28 pixels to train on), and on an .npz file of random images of 64 pixels, which is made here.
Growth is the resident memory (VmRSS) after each evaluation of a run on 512 images of 32 pixels.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import smallvit
from benchmarks.serve_load import memory
from smallvit.common.env import fast_env


def make_images(path: Path, images: int, size: int, held_out: int = 256) -> int:
    """Writes random images as .npz; returns the megabytes of those to train on."""
    random = np.random.default_rng(0)
    arrays = {}
    for part, number in (("train", images), ("val", held_out), ("test", held_out)):
        arrays[f"{part}_images"] = random.integers(0, 256, (number, size, size, 3), np.uint8)
        arrays[f"{part}_labels"] = np.arange(number) % 10
    np.savez(path, **arrays)
    return arrays["train_images"].nbytes // 2**20


def peak(*options: object) -> float:
    """Runs `smallvit train` and returns its peak in megabytes."""
    command = [sys.executable, "-m", "smallvit", "train", *map(str, options)]
    most = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with suppress(OSError, StopIteration):  # it may be ending
                most = max(most, memory(process.pid, "VmHWM"))
            time.sleep(0.2)
    if process.returncode:
        raise ValueError(f"{' '.join(command)} ended with code {process.returncode}")
    return most


class Watch(smallvit.Callback):
    """Prints the resident memory after each evaluation."""

    def evaluation(self, rows: Sequence[Any]) -> None:
        print(f"epoch {float(rows[-1]['epoch']):g} {memory(os.getpid(), 'VmRSS'):.1f}", flush=True)


def growth(data: Path, runs: Path, epochs: int) -> dict[float, float]:
    """Trains in a process of its own and returns the megabytes after each evaluation, by epoch."""
    command = [sys.executable, "-m", "benchmarks.memory", "--epochs", str(epochs), "--watch", str(data), str(runs)]
    env = {**os.environ, **fast_env()}  # as the command has it
    lines = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()
    found = (line.split() for line in lines)
    return {float(words[1]): float(words[2]) for words in found if len(words) == 3 and words[0] == "epoch"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=1, help="of training on these images")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--watch", type=Path, nargs=2, help=argparse.SUPPRESS)  # data and runs: see `growth`
    given = parser.parse_args()
    if given.watch:
        data, runs = given.watch
        smallvit.train(data, model="hybrid_vit_small", epochs=given.epochs, runs=runs, callbacks=[Watch()])
        return

    with tempfile.TemporaryDirectory() as folder:
        many, few, runs = Path(folder, "many.npz"), Path(folder, "few.npz"), Path(folder, "runs")
        print("| `smallvit train` | pixels of the images, MB | peak, MB |\n|---|---|---|")
        print(f"| embedded set, 3 epochs | 6 | {peak('--epochs', 3, '--runs', runs):,.0f} |", flush=True)
        pixels = make_images(many, given.images, 64)
        most = peak(many, "--model", "hybrid_vit_small", "--minutes", given.minutes, "--runs", runs)
        print(f"| {given.images:,} images of 64 pixels | {pixels:,} | {most:,.0f} |\n", flush=True)
        make_images(few, 512, 32)
        found = growth(few, runs, given.epochs)
    shown = [list(found)[i] for i in np.unique(np.linspace(0, len(found) - 1, 6).astype(int))]
    print(f"| epoch | {' | '.join(f'{epoch:.0f}' for epoch in shown)} |\n" + "|---" * (1 + len(shown)) + "|")
    print(f"| resident, MB | {' | '.join(f'{found[epoch]:,.0f}' for epoch in shown)} |")


if __name__ == "__main__":
    main()
