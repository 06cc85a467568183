"""Images a second of our models next to the same models in torch, with the same weights, in one process.

    make benchmark                                     all of it, the tables of docs/performance.md
    .venv-peers/bin/python -m benchmarks.peers --models swin_tiny --dtypes float32 --jobs infer

A training step is forward, backward and AdamW on a fixed batch. Sides take turns and each keeps its fastest step, since
the clock of a shared machine wanders: the ratio is what counts. Outputs are compared before anything is timed, but for
three models whose torch code computes something else at about the same cost (benchmarks/peer_models.py, `differs`). A
table comes last.

On a busy machine, measure one core in CPU seconds: `taskset -c 0 ... --clock cpu`.
"""

import argparse
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smallvit.common.env import restart_fast

restart_fast()

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import torch
from jax import Array
from safetensors.torch import save_file

import smallvit
from benchmarks.naive import NaiveSLViT
from benchmarks.peer_models import CLASSES, PEERS
from smallvit import kernels
from smallvit.count import multiply_adds
from smallvit.kernels.library import has_bfloat16


@dataclass
class Side:
    name: str
    train: Callable[[], None]
    infer: Callable[[], None]
    programs: dict[str, Any] = field(default_factory=dict)  # XLA's, by job, compiled on first use
    seconds: list[float] = field(default_factory=list)


def jax_side(name: str, model: Any, variables: Any, images: np.ndarray, labels: np.ndarray, native: bool) -> Side:
    optimizer = optax.adamw(1e-3, weight_decay=0.05)
    params = jax.tree.map(jnp.copy, variables["params"])
    rest = jax.tree.map(jnp.copy, {k: v for k, v in variables.items() if k != "params"})
    state = [params, jax.jit(optimizer.init)(params), rest, jnp.zeros((), jnp.int32)]
    x, y = jnp.asarray(images), jnp.asarray(labels)

    def step(params: Any, moments: Any, rest: Any, count: Array) -> tuple[list[Any], Array]:
        rngs = {"dropout": jax.random.fold_in(jax.random.key(1), count)}

        def loss(params: Any) -> tuple[Array, Any]:
            logits, rest_ = model.apply({"params": params, **rest}, x, train=True, rngs=rngs, mutable=list(rest))
            scores = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y)
            return scores.mean(), rest_

        (value, rest_), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return [optax.apply_updates(params, updates), moments, rest_, count + 1], value

    side = Side(name, lambda: None, lambda: None)

    def compiled(job: str, run: Any, *args: Any) -> Any:
        if job not in side.programs:
            with nullcontext() if native else kernels.disabled():
                side.programs[job] = run.lower(*args).compile()
        return side.programs[job]

    def train() -> None:
        state[:], value = compiled("train", jax.jit(step, donate_argnums=(0, 1, 2)), *state)(*state)
        value.block_until_ready()

    def infer() -> None:
        run = compiled("infer", jax.jit(lambda v, x: model.apply(v, x)), variables, x)
        run(variables, x).block_until_ready()

    side.train, side.infer = train, infer
    return side


def torch_side(name: str, model: torch.nn.Module, images: np.ndarray, labels: np.ndarray, dtype: str) -> Side:
    call: Any = torch.compile(model) if name == "torch compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)
    half = partial(torch.autocast, "cpu", torch.bfloat16, enabled=dtype == "bfloat16")

    def train() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        with half():
            logits = call(x)
            logits = sum(logits) / 2 if isinstance(logits, tuple) else logits  # LeViT's two heads
            loss = torch.nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()

    @torch.inference_mode()
    def infer() -> None:
        model.eval()
        with half():
            call(x)

    return Side(name, train, infer)


def same_weights(name: str, model: Any, theirs: torch.nn.Module, images: np.ndarray) -> Any:
    """Our variables with the weights of the torch model, after comparing what both put out."""
    with tempfile.TemporaryDirectory() as folder:
        save_file({k: v.contiguous() for k, v in theirs.state_dict().items()}, f"{folder}/w.safetensors")
        variables = smallvit.load_weights(model, f"{folder}/w.safetensors")
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(images[:2]).permute(0, 3, 1, 2)).numpy()
    found = np.asarray(jax.jit(model.apply)(variables, images[:2]))
    off = np.abs(found - expected).max() / np.abs(expected).max()
    print(f"{name}: outputs differ by {off:.1e} of the largest", flush=True)
    assert off < 1e-3
    return variables


def sides(name: str, dtype: str, wanted: list[str]) -> Iterator[Side]:
    peer = PEERS[name]
    rng = np.random.default_rng(0)
    images = rng.standard_normal((peer.batch, peer.size, peer.size, 3), np.float32)
    labels = rng.integers(0, CLASSES, peer.batch)
    torch.manual_seed(0)
    theirs = peer.theirs().eval()
    model = peer.ours()
    if peer.differs:
        variables = jax.jit(model.init)(jax.random.key(0), images[:1])
        print(f"{name}: in torch, {peer.differs}", flush=True)
    else:
        variables = same_weights(name, model, theirs, images)
    model = model.clone(dtype=jnp.dtype(dtype))
    if "kernels" in wanted:
        yield jax_side("kernels", model, variables, images, labels, native=True)
    if "pure" in wanted:
        yield jax_side("pure", model, variables, images, labels, native=False)
    if "naive" in wanted and name == "sl_vit_small_data":
        naive = NaiveSLViT(num_classes=CLASSES, patch_size=4, dim=192, depth=9, heads=12, dim_head=16, mlp_dim=384)
        naive = naive.clone(dtype=jnp.dtype(dtype))
        yield jax_side("naive", naive, jax.jit(naive.init)(jax.random.key(0), images), images, labels, native=False)
    yield torch_side("torch eager", theirs, images, labels, dtype)
    if "torch compile" in wanted and name == "sl_vit_small_data":
        again = peer.theirs()
        again.load_state_dict(theirs.state_dict())
        yield torch_side("torch compile", again, images, labels, dtype)


clock = time.perf_counter  # or time.process_time, of all threads


def fastest(call: Callable[[], None], least: float) -> float:
    """Seconds of the fastest of the calls within so many seconds: a shared machine only ever makes them slower."""
    start, seconds = clock(), []
    while not seconds or clock() - start < least:
        before = clock()
        call()
        seconds.append(clock() - before)
    return min(seconds)


def peak(dtype: str, rounds: int) -> float:
    """Multiply-adds a second of large matrix products, the better of the two libraries."""
    quick = dtype == "float32" or (kernels.usable() and has_bfloat16())
    n = 2048 if quick else 512  # torch takes minutes where the CPU has no instructions for bfloat16
    a = torch.randn(n, n, dtype=getattr(torch, dtype))
    b = jnp.ones((n, n), dtype)
    dot = jax.jit(lambda b: jnp.dot(b, b, preferred_element_type=jnp.float32))
    calls = (lambda: torch.mm(a, a), lambda: dot(b).block_until_ready())
    return n**3 / min(fastest(call, 0.2) for _ in range(rounds) for call in calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--jobs", nargs="+", choices=("train", "infer"), default=["train", "infer"])
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=("kernels", "pure", "naive", "torch compile"),
        default=["kernels", "pure", "naive", "torch compile"],
        help="besides torch eager",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one side in one round")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw the ratios")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU seconds, for one busy core")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    global clock
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    if hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))

    print(f"jax {jax.__version__}, torch {torch.__version__}, {os.cpu_count()} cores, {_cpu()}; {kernels.status()}")
    rows = []
    for dtype in args.dtypes:
        most = peak(dtype, 3)
        print(f"\n{dtype}")
        for name in args.models:
            if dtype == "bfloat16" and name != "sl_vit_small_data":
                continue
            peer, running = PEERS[name], list(sides(name, dtype, args.sides))
            cost = multiply_adds(peer.ours(), peer.size)
            for job in args.jobs:
                for side in running:
                    fastest(getattr(side, job), 0.5)  # warms up
                    side.seconds = []
                for _ in range(args.rounds):
                    most = max(most, peak(dtype, 1))  # it wanders with the clock, too
                    for side in running:
                        side.seconds.append(fastest(getattr(side, job), args.seconds))
                rows += list(_rows(name, dtype, job, peer.batch, cost * (3 if job == "train" else 1) / most, running))
                for row in rows[-len(running) :]:
                    print(_line(row), flush=True)
        print(f"{dtype}: matrix products reach {2 * most / 1e9:.0f} GFLOP/s")
    print("\n".join(table(rows)))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        draw(rows, args.plot)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table of docs/performance.md, in Markdown."""
    found = {(row["model"], row["dtype"], row["job"], row["side"]): row for row in rows}
    names = {"kernels": "with kernels", "pure": "pure JAX", "naive": "naive JAX", "torch compile": "torch.compile"}
    shown = {side: title for side, title in names.items() if any(row["side"] == side for row in rows)}
    heads = "model", "type", "job", "smallvit images/s", "torch eager images/s", *shown.values(), "of the peak"
    yield f"\n| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for model, dtype, job in dict.fromkeys(key[:3] for key in found):
        own = {side: found[model, dtype, job, side] for side in shown if (model, dtype, job, side) in found}
        eager = found[model, dtype, job, "torch eager"]
        cells = [f"`{model}`" + "\\*" * bool(PEERS[model].differs), dtype, job]
        cells += [f"{next(iter(own.values()), eager)['images_per_second']:.1f}", f"{eager['images_per_second']:.1f}"]
        for side in shown:
            row = own.get(side)
            cells.append(f"{row['ratio']:.2f} ({row['ratios'][0]:.2f} to {row['ratios'][-1]:.2f})" if row else "")
        cells.append(", ".join(f"{100 * row['of_peak']:.0f} %" for row in (*own.values(), eager)))
        yield f"| {' | '.join(cells)} |"
    for name in dict.fromkeys(row["model"] for row in rows):
        if PEERS[name].differs:
            yield f"\n\\* `{name}`: in torch, {PEERS[name].differs}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar for each model and side, as a multiple of torch eager."""
    rows = [row for row in rows if row["dtype"] == "float32"]
    names = list(dict.fromkeys(row["model"] for row in rows))
    colours = {"kernels": "#2a5fd0", "pure": "#8fb0f0", "naive": "#c9ced6", "torch compile": "#e8a06a"}
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.55 * len(names) + 1.4), sharey=True, layout="constrained")
    for axis, job, title in zip(axes, ("train", "infer"), ("a training step", "inference"), strict=True):
        for i, name in enumerate(reversed(names)):
            found = {row["side"]: row for row in rows if (row["model"], row["job"]) == (name, job)}
            shown = [side for side in colours if side in found]
            for j, side in enumerate(shown):
                at = i + 0.8 * ((len(shown) - 1) / 2 - j) / len(shown)
                ratios = found[side]["ratios"]
                axis.barh(at, found[side]["ratio"], 0.7 / len(shown), color=colours[side])
                axis.plot([ratios[0], ratios[-1]], [at, at], color="#1f2933", linewidth=0.8)
        axis.axvline(1, color="#1f2933", linewidth=0.8, linestyle=":")
        axis.set(title=title, yticks=range(len(names)), yticklabels=list(reversed(names)), xlabel="torch eager = 1")
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.spines[["top", "right"]].set_visible(False)
    colours = {side: colour for side, colour in colours.items() if any(row["side"] == side for row in rows)}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def _rows(name: str, dtype: str, job: str, batch: int, ideal: float, running: list[Side]) -> Iterator[dict[str, Any]]:
    """`ideal` is the least time for an image, were all of it matrix products at their peak."""
    eager = next(side.seconds for side in running if side.name == "torch eager")
    for side in running:
        yield {
            "model": name,
            "dtype": dtype,
            "job": job,
            "side": side.name,
            "images_per_second": batch / min(side.seconds),
            "of_peak": ideal * batch / min(side.seconds),
            "ratio": min(eager) / min(side.seconds),
            "ratios": sorted(theirs / mine for theirs, mine in zip(eager, side.seconds, strict=True)),
        }


def _line(row: dict[str, Any]) -> str:
    low, high = row["ratios"][0], row["ratios"][-1]
    return (
        f"| {row['model']} | {row['dtype']} | {row['job']} | {row['side']} | {row['images_per_second']:.1f} "
        f"| {100 * row['of_peak']:.0f} % | {row['ratio']:.2f} | {low:.2f} to {high:.2f} |"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
