"""How the time of a training step grows with batch, tokens, depth, width, classes and devices, next to torch; memory.

    .venv-peers/bin/python -m benchmarks.scaling [--rounds 5] [--plot docs/images/scaling.png]

The model is sl_vit_small_data at 32 pixels with batches of 64, and one thing at a time is changed; the torch side is
vit-pytorch's with the same shapes. Both take turns, and each keeps its fastest step. An exponent is the slope of the
logarithm of the time. Memory is what XLA plans for a step besides weights and batch. Devices are parts of the same
cores, each with its share of the batch: what they take longer than one is the cost of dividing the work.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from smallvit.common.env import restart_fast

restart_fast()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import benchmarks.torch_peers  # noqa: F401, first: it makes the next import work

# ruff: isort: off
from vit_pytorch.vit_for_small_dataset import ViT as TorchSLViT

import smallvit
from benchmarks.peers import torch_side
from smallvit.ops import recompute
from smallvit.plots.style import styled

BASE: dict[str, Any] = dict(batch=64, image_size=32, depth=9, dim=192, num_classes=100)
AXES: dict[str, tuple[int, ...]] = {
    "batch": (16, 64, 256),
    "image_size": (16, 32, 64),
    "depth": (3, 9, 18),
    "dim": (96, 192, 384),
    "num_classes": (10, 100, 1000),
}
TITLES = {"image_size": "image size (tokens: its square / 16)", "dim": "width", "num_classes": "classes"}
DEVICES = (1, 2, 4)
LESS_MEMORY = [{"accumulate": 2}, {"accumulate": 4}, {"remat": True}, {"remat": True, "batch": 256}]


class Row(NamedTuple):
    ours: float  # seconds per step
    torch: float
    memory: int
    compiling: float


def shapes(image_size: int, depth: int, dim: int, num_classes: int) -> dict[str, int]:
    fields = dict(image_size=image_size, depth=depth, dim=dim, num_classes=num_classes)
    return fields | dict(patch_size=4, heads=dim // 16, dim_head=16, mlp_dim=2 * dim)


def our_step(
    images: np.ndarray | jax.Array, fields: dict[str, int], accumulate: int, remat: bool
) -> tuple[Callable[[], None], Any, float]:
    """A training step, its compiled program, and the seconds that it took to compile."""
    model = smallvit.create_model("sl_vit_small_data", **fields)
    labels, optimizer = np.zeros(len(images), np.int32), optax.adamw(1e-3)
    params = jax.jit(model.init)(jax.random.key(0), images[:1])
    state = [params, jax.jit(optimizer.init)(params)]

    def gradient(params: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            with recompute(remat):
                logits = model.apply(params, images, train=True, rngs={"dropout": jax.random.key(1)})
            return optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels).mean()

        return jax.value_and_grad(loss)(params)

    def step(params: Any, moments: Any, images: Any, labels: Any) -> tuple[list[Any], Any]:
        if accumulate == 1:
            value, grads = gradient(params, images, labels)
        else:
            # As `smallvit train --accumulate`: one part after the other.
            def part(total: Any, inputs: Any) -> tuple[Any, Any]:
                value, grads = gradient(params, *inputs)
                return jax.tree.map(jnp.add, total, grads), value

            parts = [x.reshape(accumulate, -1, *x.shape[1:]) for x in (images, labels)]
            grads, values = jax.lax.scan(part, jax.tree.map(jnp.zeros_like, params), parts)
            value = values.mean()
        updates, moments = optimizer.update(grads, moments, params)
        return [optax.apply_updates(params, updates), moments], value

    begun = time.perf_counter()
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*state, images, labels).compile()
    compiling = time.perf_counter() - begun

    def run() -> None:
        state[:], value = program(*state, images, labels)
        value.block_until_ready()

    return run, program, compiling


@cache
def measure(
    rounds: int,
    batch: int,
    image_size: int,
    depth: int,
    dim: int,
    num_classes: int,
    accumulate: int = 1,
    remat: bool = False,
) -> Row:
    images = np.random.default_rng(0).standard_normal((batch, image_size, image_size, 3), np.float32)
    fields = shapes(image_size, depth, dim, num_classes)
    ours, program, compiling = our_step(images, fields, accumulate, remat)
    theirs = torch_side("torch eager", TorchSLViT(**fields), images, np.zeros(batch, np.int64), "float32").train
    times: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for _ in range(rounds + 1):
        for run, seconds in times.items():
            begun = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begun)
    memory = program.memory_analysis().temp_size_in_bytes
    return Row(min(times[ours][1:]), min(times[theirs][1:]), memory, compiling)


def time_on_devices(number: int, rounds: int) -> float:
    """The seconds of a step on so many devices; jax can be told their number only before it starts."""
    command = [sys.executable, "-m", "benchmarks.scaling", "--devices", str(number), "--rounds", str(rounds)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def step_on_devices(number: int, rounds: int) -> float:
    jax.config.update("jax_num_cpu_devices", number)
    mesh = jax.make_mesh((number,), ("data",), axis_types=(AxisType.Auto,))
    case = dict(BASE)
    shape = (case.pop("batch"), case["image_size"], case["image_size"], 3)
    images = np.random.default_rng(0).standard_normal(shape, np.float32)
    with jax.set_mesh(mesh):
        images = jax.device_put(images, NamedSharding(mesh, PartitionSpec("data")))
        run, _, _ = our_step(images, shapes(**case), accumulate=1, remat=False)
        run()
        times = []
        for _ in range(rounds):
            begun = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun)
    return min(times)


def exponent(values: tuple[int, ...], seconds: list[float]) -> float:
    return float(np.polyfit(np.log(values), np.log(seconds), 1)[0])


def lines(rounds: int) -> Iterator[str]:
    """The tables of docs/performance.md, in Markdown."""
    yield "| | | ours, ms | torch, ms | ratio | ms per image | memory, MiB | compiled in, s |"
    yield "|---|---|---|---|---|---|---|---|"

    def line(what: str, value: str, row: Row, batch: int) -> str:
        figures = f"{1e3 * row.ours:.0f} | {1e3 * row.torch:.0f} | {row.torch / row.ours:.2f}"
        costs = f"{1e3 * row.ours / batch:.2f} | {row.memory / 2**20:.0f} | {row.compiling:.1f}"
        return f"| {what} | {value} | {figures} | {costs} |"

    for axis, values in AXES.items():
        for value in values:
            case = BASE | {axis: value}
            yield line(TITLES.get(axis, axis), str(value), measure(rounds, **case), case["batch"])
    for number in DEVICES:
        seconds = time_on_devices(number, rounds)
        yield f"| devices | {number} | {1e3 * seconds:.0f} | | | {1e3 * seconds / BASE['batch']:.2f} | | |"
    for changed in LESS_MEMORY:
        case = BASE | changed
        yield line(
            "less memory", ", ".join(f"{k}={v}" for k, v in changed.items()), measure(rounds, **case), case["batch"]
        )
    yield "\n| exponent of | ours | torch |\n|---|---|---|"
    for axis, values in AXES.items():
        rows = [measure(rounds, **BASE | {axis: value}) for value in values]
        ours, torch = (exponent(values, [row[side] for row in rows]) for side in (0, 1))
        yield f"| {TITLES.get(axis, axis)} | {ours:.2f} | {torch:.2f} |"


@styled
def draw(rounds: int) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.9), layout="constrained")
    for axes, (axis, values) in zip(figure.subplots(1, len(AXES), sharey=True), AXES.items(), strict=True):
        rows = [measure(rounds, **BASE | {axis: value}) for value in values]
        axes.loglog(values, [1e3 * row.torch for row in rows], "o-", color="#e8a06a", label="torch eager")
        axes.loglog(values, [1e3 * row.ours for row in rows], "o-", color="#2a5fd0", label="smallvit")
        axes.set_title(TITLES.get(axis, axis).partition(" (")[0])
        axes.set_xticks(values, [str(value) for value in values])
        axes.minorticks_off()
        if axis == "batch":
            axes.set_ylabel("ms per step")
            axes.legend(frameon=False)
    figure.axes[0].yaxis.set_major_formatter("{x:g}")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--devices", type=int, help="only print the seconds of a step on so many devices")
    args = parser.parse_args()
    if args.devices:
        print(step_on_devices(args.devices, args.rounds))
        return
    for line in lines(args.rounds):
        print(line, flush=True)
    if args.plot:
        from smallvit import plots

        plots.save(draw(args.rounds), args.plot)


if __name__ == "__main__":
    main()
