"""Images a second of the paper's SL-ViT (32 px, 100 classes, f32), ours next to vit-pytorch's in torch eager.

    make benchmark

One training step is forward, backward and AdamW on a fixed batch. The two sides alternate within one process, and
each keeps its best round, because the clock of a shared machine wanders; the ratio is what counts.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial

# How glibc hands out memory, read when a process starts: huge pages, one arena, nothing given back between steps.
# XLA allocates its buffers afresh for each step and would else pay for new pages every time; torch does not mind.
MALLOC = ":".join(
    f"glibc.malloc.{knob}"
    for knob in ("hugetlb=1", "arena_max=1", "mmap_max=0", f"trim_threshold={2**34}", f"top_pad={2**28}")
)
if "GLIBC_TUNABLES" not in os.environ and platform.libc_ver()[0] == "glibc":
    command = [sys.executable, "-m", "benchmarks.step", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "GLIBC_TUNABLES": MALLOC})

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import benchmarks.torch_peers  # noqa: F401, first: it makes the next import work

# ruff: isort: off
from vit_pytorch.vit_for_small_dataset import ViT as TorchSLViT

import smallvit

CLASSES, SIZE = 100, 32


def ours(images: np.ndarray, labels: np.ndarray) -> dict[str, Callable[[], None]]:
    model = smallvit.create_model("sl_vit_small_data", num_classes=CLASSES, image_size=SIZE)
    variables = jax.jit(model.init)(jax.random.key(0), images)
    optimizer = optax.adamw(1e-3, weight_decay=0.05)
    state = {
        "params": jax.tree.map(jnp.copy, variables),
        "opt": jax.jit(optimizer.init)(variables),
        "step": jnp.zeros((), jnp.int32),
    }
    images, labels = jnp.asarray(images), jnp.asarray(labels)

    @partial(jax.jit, donate_argnums=0)
    def step(state, images, labels):
        rngs = {"dropout": jax.random.fold_in(jax.random.key(1), state["step"])}

        def loss(params):
            logits = model.apply(params, images, train=True, rngs=rngs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}, value

    infer = jax.jit(model.apply)

    def train() -> None:
        nonlocal state
        state, value = step(state, images, labels)
        jax.block_until_ready(value)

    return {"train": train, "infer": lambda: jax.block_until_ready(infer(variables, images))}


def torch_eager(images: np.ndarray, labels: np.ndarray) -> dict[str, Callable[[], None]]:
    model = TorchSLViT(
        image_size=SIZE, patch_size=4, num_classes=CLASSES, dim=192, depth=9, heads=12, dim_head=16, mlp_dim=384
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)

    def train() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    @torch.inference_mode()
    def infer() -> None:
        model.eval()
        model(x)

    return {"train": train, "infer": infer}


def seconds(call: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3, help="steps in a round")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    images = rng.standard_normal((args.batch, SIZE, SIZE, 3), np.float32)
    labels = rng.integers(0, CLASSES, args.batch)
    sides = {"smallvit": ours(images, labels), "torch eager": torch_eager(images, labels)}

    print(f"jax {jax.__version__}, torch {torch.__version__}, {os.cpu_count()} cores, batch {args.batch}, f32")
    print("| | smallvit img/s | torch eager img/s | ratio | ratio by round |")
    print("|---|---|---|---|---|")
    for job in ("train", "infer"):
        for side in sides.values():
            seconds(side[job], 4)  # compiles, and warms up
        rounds = [[seconds(side[job], args.repeats) for side in sides.values()] for _ in range(args.rounds)]
        mine, theirs = (args.batch / min(column) for column in zip(*rounds, strict=True))
        spread = " ".join(f"{b / a:.2f}" for a, b in rounds)
        print(f"| {job} | {mine:.0f} | {theirs:.0f} | {mine / theirs:.2f} | {spread} |")


if __name__ == "__main__":
    main()
