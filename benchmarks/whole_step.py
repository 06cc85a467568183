"""The whole training step of the default model next to the same in torch: batch, augmentation, gradient, optimiser.

    .venv-peers/bin/python -m benchmarks.whole_step [--cores 1 2] [--batch 64] [--size 32]
    taskset -c 0 .venv-peers/bin/python -m benchmarks.profile whole_step        where the time goes

Both sides train `hybrid_vit_small` with the recipe `default`: flips and crops, label smoothing, Muon for the hidden
matrices and AdamW for the rest, clipping, weight decay and an average of the weights. They start with the same weights,
and their logits are compared first. Within one process they take turns, ten steps each, and each keeps its fastest ten;
each number of cores has a process of its own. As in the training loop, our next step is started before the metrics of
the last one are read.
"""

from smallvit.common.env import restart_fast

restart_fast()

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import smallvit
from benchmarks.accuracy_peers import SMOOTHING, crop_and_flip
from benchmarks.torch_hybrid_vit import HybridViT
from smallvit.data import load_data
from smallvit.training.mesh import make_mesh
from smallvit.training.recipe import RECIPES
from smallvit.training.step import Pace
from smallvit.training.trainer import Trainer

ROUNDS, STEPS = 12, 10
CLASSES, IMAGES = 10, 2048


class Ours:
    def __init__(self, size: int, batch: int) -> None:
        random = np.random.default_rng(0)
        images, labels = random.integers(0, 256, (IMAGES, size, size, 3), np.uint8), np.arange(IMAGES) % CLASSES
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "images.npz")
            np.savez(path, train_images=images, train_labels=labels, test_images=images[:20], test_labels=labels[:20])
            self.data = load_data(path)
        self.model = smallvit.create_model("hybrid_vit_small", num_classes=CLASSES, image_size=size)
        recipe = RECIPES["default"]
        self.trainer = Trainer(self.model, recipe, self.data, make_mesh(None), batch, 0, accumulate=1, remat=False)
        self.trainer.compile()()
        self.state, self.done = self.trainer.init(), 0
        self.variables = jax.device_get({"params": self.state.params, **self.state.others})

    @property
    def program(self) -> Any:
        return self.trainer._steps[1.0]

    def logits(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(jax.jit(self.model.apply)(self.variables, x))

    def run(self, steps: int) -> None:
        pace, before = Pace(np.float32(1), np.float32(0.004), np.float32(0.99)), None
        for step in range(self.done, self.done + steps):
            self.state, metrics = self.trainer.step(self.state, step, pace)
            if before is not None:
                before.loss.block_until_ready()
            before = metrics
        jax.block_until_ready(before)
        self.done += steps


class Torch:
    def __init__(self, size: int, batch: int, ours: Ours) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.batch, self.train, self.preprocess = batch, ours.data.train, ours.data.preprocess
        self.model = HybridViT(size, CLASSES).load(ours.variables["params"]).to(memory_format=torch.channels_last)
        self.random = np.random.default_rng(0)
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if _by_muon(name, p)]
        decayed = [p for name, p in named if p.ndim > 1 and name != "positions" and not _by_muon(name, p)]
        others = [p for name, p in named if p.ndim == 1 or name == "positions"]
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 2.0}, {"params": others, "weight_decay": 0.0}], lr=2e-3, foreach=True
        )
        self.groups: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        for p in matrices:
            self.groups[p.shape[0], p[0].numel()].append(p)
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}
        self.averages = [p.detach().clone() for p in self.model.parameters()]

    @torch.no_grad()
    def logits(self, x: np.ndarray) -> np.ndarray:
        self.model.eval()
        return self.model(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        rows = self.random.integers(0, len(self.train), self.batch)
        x = self.preprocess.normalise(crop_and_flip(self.train.images[rows], self.random))
        labels = torch.from_numpy(self.train.labels[rows].astype(np.int64))
        self.model.train()
        logits = self.model(torch.from_numpy(np.ascontiguousarray(x)).permute(0, 3, 1, 2))
        F.cross_entropy(logits, labels, label_smoothing=SMOOTHING).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self._muon()
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        torch._foreach_lerp_(self.averages, [p.detach() for p in self.model.parameters()], 0.01)

    @torch.no_grad()
    def _muon(self) -> None:
        """Updates the matrices of one shape at once."""
        for (rows, columns), group in self.groups.items():
            gradients = torch.stack([p.grad.reshape(rows, columns) for p in group])
            momentum = self.momenta[rows, columns].mul_(0.95).add_(gradients, alpha=0.05)
            x = gradients.lerp(momentum, 0.95)
            x = x / x.flatten(1).norm(dim=1).clamp(min=1e-8)[:, None, None]
            x = x.mT if rows > columns else x
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            x = (x.mT if rows > columns else x) * max(1.0, rows / columns) ** 0.5
            for p, update in zip(group, x, strict=True):
                p.mul_(1 - 0.004).add_(update.reshape(p.shape), alpha=-0.02)


def _by_muon(name: str, p: torch.Tensor) -> bool:
    """The same matrices as in smallvit/training/optimiser.py."""
    return p.ndim > 1 and not name.startswith(("head", "positions")) and min(p.shape[0], p[0].numel()) >= 16


def measure(size: int, batch: int) -> tuple[float, float]:
    """Returns the images per second of ours and of torch."""
    ours = Ours(size, batch)
    theirs = Torch(size, batch, ours)
    x = np.random.default_rng(1).standard_normal((8, size, size, 3)).astype(np.float32)
    expected = ours.logits(x)
    difference = np.abs(expected - theirs.logits(x)).max()
    if difference > 1e-4 * max(1.0, np.abs(expected).max()):
        raise ValueError(f"the logits differ by {difference}")

    times: dict[Callable[[int], None], list[float]] = {ours.run: [], theirs.run: []}
    for _ in range(ROUNDS):
        for run, seconds in times.items():
            run(1)  # so that neither starts with what the other left in the caches
            begun = time.perf_counter()
            run(STEPS)
            seconds.append(time.perf_counter() - begun)
    ours_best, theirs_best = (STEPS * batch / min(seconds) for seconds in times.values())
    return ours_best, theirs_best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # measure in this process
    given = parser.parse_args()
    if given.here:
        print(*measure(given.size, given.batch))
        return
    print("| cores | ours, images/s | torch, images/s | ratio | ours per core |\n|---|---|---|---|---|")
    available, alone = sorted(os.sched_getaffinity(0)), None
    for cores in given.cores:
        command = ["taskset", "-c", ",".join(map(str, available[-cores:])), sys.executable, "-m"]
        command += ["benchmarks.whole_step", "--here", "--batch", str(given.batch), "--size", str(given.size)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        ours, theirs = map(float, lines[-1].split())
        alone = alone or ours / cores
        print(
            f"| {cores} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} | {ours / cores / alone:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
