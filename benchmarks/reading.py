"""Reading a folder of large photographs next to Pillow's own reduced-size decoding, without a model.

    .venv/bin/python -m benchmarks.reading [--megapixels 2 6 12] [--images 48] [--size 96]

The photographs are made here: JPEGs of quality 90 with gradients, soft structure and fine noise. `decode` is what
`smallvit predict` calls for every file. `load_data` is what the first `smallvit train` on a folder does: it lists,
hashes and checks the files, decodes them, looks for near duplicates and writes the cache. Pillow's side is
`Image.draft` and `ImageOps.fit`, with the margin for resampling that `Image.thumbnail` has. All use a pool of threads,
Pillow also one of processes; they take turns, and the fastest round of each counts.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from smallvit.data import load_data
from smallvit.data.decoding import decode

NAMES = ("decode", "load_data", "Pillow, threads", "Pillow, processes")
MARGIN = 2  # Pillow's `thumbnail` decodes to at least twice the size


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """Gradients, structure of several scales and fine noise; compresses about as well as a real photograph."""
    random = np.random.default_rng(seed)
    image = np.zeros((height, width, 3), np.float32)
    image += np.linspace(40, 160, width, dtype=np.float32)[None, :, None] + random.uniform(0, 40, 3).astype(np.float32)
    for cells, strength in ((4, 50), (24, 30), (160, 15)):
        coarse = random.integers(0, 256, (cells, cells, 3)).astype(np.uint8)
        soft = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        image += (np.asarray(soft, np.float32) - 128) * (strength / 128)
    image += random.normal(0, 4, (height, width, 1)).astype(np.float32)
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def make_folder(folder: Path, images: int, width: int, height: int, classes: int = 2) -> list[Path]:
    """Saves photographs as JPEGs into class folders, an hour old: a file that has just changed is checked once more."""
    files = []
    for i in range(images):
        path = folder / f"class_{i % classes}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(i, width, height).save(path, quality=90)
        os.utime(path, (time.time() - 3600,) * 2)
        files.append(path)
    return files


def pillow(path: Path, size: int) -> np.ndarray:
    with Image.open(path) as image:
        image.draft("RGB", (MARGIN * size, MARGIN * size))
        return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC))


def whole(folder: Path, size: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        load_data(folder, image_size=size, cache_dir=cache)


def fastest(ways: dict[str, Callable[[], object]], rounds: int, calls: int = 1) -> dict[str, float]:
    """Returns the seconds of the fastest call of each; they take turns of so many calls."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            for _ in range(calls):
                begun = time.perf_counter()
                way()
                best[name] = min(best[name], time.perf_counter() - begun)
    return best


def measure(folder: Path, files: list[Path], size: int, rounds: int) -> list[float]:
    """Returns the images per second of each way in NAMES."""
    cores = len(os.sched_getaffinity(0))
    ours = partial(decode, size=(size, size), channels=3, fit="crop")
    theirs = partial(pillow, size=size)
    with ThreadPoolExecutor(cores) as threads, ProcessPoolExecutor(cores) as processes:
        ways = (
            lambda: list(threads.map(ours, files)),
            lambda: whole(folder, size),
            lambda: list(threads.map(theirs, files)),
            lambda: list(processes.map(theirs, files)),
        )
        best = fastest(dict(zip(NAMES, ways, strict=True)), rounds)
    return [len(files) / best[name] for name in NAMES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megapixels", type=float, nargs="+", default=[2, 6, 12])
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()

    print(f"images/s on {len(os.sched_getaffinity(0))} core(s), to {given.size} pixels, best of {given.rounds}\n")
    print(f"| photograph | MB | {' | '.join(NAMES)} | decode / Pillow | load_data / Pillow |\n" + "|---" * 8 + "|")
    for megapixels in given.megapixels:
        height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
        with tempfile.TemporaryDirectory() as folder:
            files = make_folder(Path(folder), given.images, height * 4 // 3, height)
            rates = measure(Path(folder), files, given.size, given.rounds)
            megabytes = sum(path.stat().st_size for path in files) / len(files) / 1e6
        peer = max(rates[2:])
        cells = [f"{rate:,.1f}" for rate in rates] + [f"{rates[0] / peer:.2f}", f"{rates[1] / peer:.2f}"]
        print(f"| {megapixels:g} megapixels | {megabytes:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
