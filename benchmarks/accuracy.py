"""Accuracy at equal core-minutes: `smallvit train` next to small ConvNets and ViTs in torch, on folders of images.

    make .venv-peers/installed
    .venv-peers/bin/python -m benchmarks.accuracy speeds FOLDER ...           once, on a quiet machine
    .venv-peers/bin/python -m benchmarks.accuracy run FOLDER ... --minutes 6 40 --seeds 3 [--core 1]
    .venv-peers/bin/python -m benchmarks.accuracy table
    .venv-peers/bin/python -m benchmarks.accuracy plot FOLDER --minutes 2     every model in one budget
    .venv-peers/bin/python -m benchmarks.accuracy plot FOLDER ...             accuracy against minutes

Everything has one core. Each candidate's speed is taken once; then it trains for the number of images that the minutes
are worth, so that a noisy neighbour cannot decide. A result is appended to benchmarks/accuracy.jsonl as it comes; what
is there already is not run again. `ours` is what `smallvit train FOLDER` chooses by itself for these minutes; ours:NAME
is one model of ours.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, SPEEDS = HERE / "accuracy.jsonl", HERE / "accuracy_speeds.json"
PEERS = (
    "resnet20",
    "resnet20x2",
    "resnet18",
    "resnet9",
    "resnet9_half",
    "resnet9_narrow",
    "vit_pytorch_small_dataset",
    "vit_pytorch_cct_2",
    "timm_vit_tiny",
)
POLICY = "+policy"
OURS = ("hybrid_vit_small", "hybrid_vit_base", "sl_vit_tiny_data")


@cache
def read(folder: str) -> Any:
    from smallvit.data import load_data

    return load_data(folder, cache_dir=Path(tempfile.gettempdir()) / "smallvit-accuracy")


def side(folder: str) -> str:
    """Speeds depend on the image size alone."""
    return str(read(folder).preprocess.size[0])


def time_ours(name: str, folder: str) -> float:
    """Images a second of our fastest training steps, augmentation and optimiser included; in seconds of the CPU.

    It is the mean over a run with progressive resizing, if that is planned for the model. NAME+policy has the
    augmentation of long runs, which takes a tenth of the time of a small model.
    """
    import numpy as np

    import smallvit
    from smallvit.training.choice import choose_augmentation, choose_progressive
    from smallvit.training.config import TrainConfig
    from smallvit.training.mesh import make_mesh
    from smallvit.training.recipe import RECIPES
    from smallvit.training.resizing import phases
    from smallvit.training.step import Pace
    from smallvit.training.trainer import Trainer

    data, recipe = read(folder), RECIPES["default"]
    name, plus, _ = name.partition(POLICY)
    recipe = replace(recipe, progressive=choose_progressive(TrainConfig(model=name), data))
    if plus:
        recipe = replace(recipe, augment=replace(recipe.augment, **choose_augmentation(name, float("inf"), 0)))
    model = smallvit.create_model(name, num_classes=len(data.classes), image_size=data.preprocess.size)
    trainer = Trainer(model, recipe, data, make_mesh(None), recipe.batch_size, 0, accumulate=1, remat=False)
    state, seconds = trainer.init(), 0.0
    for phase in phases(recipe.progressive):
        times = []
        for step in range(40):
            begun = time.process_time()
            state, metrics = trainer.step(state, step, Pace(*[np.float32(0.0)] * 3), phase.side)
            metrics.loss.block_until_ready()
            times.append(time.process_time() - begun)
        seconds += phase.share * min(times)
    return recipe.batch_size / seconds


def measure_speeds(folders: list[str], only: list[str]) -> None:
    speeds = json.loads(SPEEDS.read_text()) if SPEEDS.exists() else {}
    for folder in folders:
        for name in only or [*(f"ours:{name}{plus}" for name in OURS for plus in ("", POLICY)), *PEERS]:
            if name.startswith("ours:"):
                speed = time_ours(name.removeprefix("ours:"), folder)
            else:
                from benchmarks.accuracy_peers import time_peer

                speed = time_peer(name, read(folder))
            speeds.setdefault(side(folder), {})[name] = round(speed, 1)
            print(f"{side(folder)} px  {name}  {speed:.0f} images/s", flush=True)
            SPEEDS.write_text(json.dumps(speeds, indent=1, sort_keys=True) + "\n")


def run_one(job: dict[str, Any]) -> dict[str, Any]:
    """One result, in this process or, for ours, in one of `smallvit train`."""
    folder, name, seed, data = job["folder"], job["name"], job["seed"], read(job["folder"])
    speeds = json.loads(SPEEDS.read_text())[side(folder)]
    images = {key: 60 * job["minutes"] * speed for key, speed in speeds.items()}
    if not name.startswith("ours"):
        from benchmarks.accuracy_peers import PEERS as RECIPES
        from benchmarks.accuracy_peers import train_peer

        steps = max(1, round(images[name] / RECIPES[name].batch_size))
        found = train_peer(name, data, steps, seed)
        return {**job, "epochs": round(images[name] / len(data.train), 1), "images_per_second": speeds[name], **found}

    from smallvit.training.choice import MODELS, choose_augmentation, choose_model, choose_progressive
    from smallvit.training.config import TrainConfig
    from smallvit.training.resizing import mean_cost

    def whole_epochs(model: str) -> float:
        progressive = choose_progressive(TrainConfig(model=model), data)
        return images[f"ours:{model}"] / len(data.train) * mean_cost(progressive)

    model = name.removeprefix("ours").removeprefix(":")
    model = model or choose_model({each: whole_epochs(each) for each in MODELS}, len(data.train))
    given = job.get("options", [])
    planned = choose_augmentation(model, whole_epochs(model), len(data.train))
    policy = given[given.index("--policy") + 1] if "--policy" in given else planned.get("policy", "none")
    timed = f"ours:{model}" + (POLICY if policy != "none" else "")
    epochs = images[timed] / len(data.train)
    with tempfile.TemporaryDirectory() as runs:
        begun = time.monotonic()
        command = [sys.executable, "-m", "smallvit.cli", "train", folder, "--model", model, "--epochs", f"{epochs:.4f}"]
        command += ["--seed", str(seed), "--runs", runs, "--name", "run", *given]
        for option, value in planned.items():  # by the minutes: `train` would plan by the epochs
            command += [] if f"--{option}" in given else [f"--{option}", str(value)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(Path(runs, "run", "result.json").read_text())
    seconds = time.monotonic() - begun
    found = {"top1": result["test_top1"], "parameters": result["parameters"], "seconds": seconds, "model": model}
    return {**job, "epochs": round(epochs, 1), "images_per_second": speeds[timed], **found}


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def key(row: dict[str, Any]) -> tuple[str, str, float, int, str]:
    return Path(row["folder"]).name, row["name"], row["minutes"], row["seed"], " ".join(row.get("options", []))


def run_all(args: argparse.Namespace) -> None:
    done = {key(row) for row in results()}
    for minutes in args.minutes or [6.0]:
        for seed in range(args.seeds):
            for folder in args.folders:
                for name in args.only or ["ours", *PEERS]:
                    job = {"folder": folder, "name": name, "minutes": minutes, "seed": seed}
                    if args.options:
                        job["options"] = args.options.split()
                    if key(job) in done:
                        continue
                    row = run_one(job)
                    row["folder"] = Path(folder).name
                    row["seconds"] = round(row["seconds"])
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(*key(row), f"{row['top1']:.2f} %", f"{row['epochs']} epochs", flush=True)


def print_table() -> None:
    """Mean and spread over the seeds, and how far ours is ahead, seed by seed."""
    groups: dict[tuple[str, float], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    costs = {}
    for row in results():
        name = " ".join([row["name"], *row.get("options", [])])
        groups[Path(row["folder"]).name, row["minutes"]][name][row["seed"]] = row["top1"]
        speed = f"{row['images_per_second']:,.0f}" if "images_per_second" in row else ""
        costs[Path(row["folder"]).name, row["minutes"], name] = (
            f"{row['epochs']:g} | {speed} | {row['parameters'] / 1e6:.2f} M"
        )
    titles = ["set", "core-minutes", "model", "epochs", "images/s", "parameters", "top-1 %", "seeds", "ours ahead by"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for (folder, minutes), names in sorted(groups.items()):
        for name, scores in sorted(names.items(), key=lambda item: -statistics.mean(item[1].values())):
            spread = f" ± {statistics.stdev(scores.values()):.2f}" if len(scores) > 1 else ""
            paired = [names["ours"][seed] - scores[seed] for seed in scores if seed in names.get("ours", {})]
            ahead = f"{statistics.mean(paired):+.2f}" if paired and name != "ours" else ""
            figures = " ".join(f"{scores[seed]:.1f}" for seed in sorted(scores))
            mean = statistics.mean(scores.values())
            print(
                f"| {folder} | {minutes:g} | {name} | {costs[folder, minutes, name]} | {mean:.2f}{spread} "
                f"| {figures} | {ahead} |"
            )


def plot(folder: str, minutes: float) -> None:
    """docs/images/which-vit.png: the accuracy of every model on one set in one budget, the mean over the seeds."""
    from matplotlib.figure import Figure

    scores = {name: points[minutes] for name, points in curves(folder).items() if minutes in points and name != "ours"}
    means = sorted((top1, name.removeprefix("ours:")) for name, top1 in scores.items())
    figure = Figure(figsize=(8, 0.36 * len(means) + 0.9))
    axes = figure.subplots()
    colours = ["#9aa5b1" if name in PEERS else "#1f6feb" for _, name in means]
    bars = axes.barh([name.replace("_tiny_data", "") for _, name in means], [top1 for top1, _ in means], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.set_title(f"Top-1 %, {folder}, {minutes:g} core-minutes each; grey: ConvNets and ViTs in torch")
    axes.spines["bottom"].set_visible(False)
    axes.xaxis.set_visible(False)
    save(figure, "which-vit.png")


def plot_minutes(folders: list[str]) -> None:
    """docs/images/accuracy-minutes.png: accuracy against core-minutes.

    Ours, the best peer in each budget, and every peer that has two budgets.
    """
    from matplotlib.figure import Figure

    def chosen(models: dict[str, dict[float, float]]) -> dict[str, dict[float, float]]:
        peers = {name: points for name, points in models.items() if name in PEERS}
        budgets = {minutes for points in peers.values() for minutes in points}
        best = {max(peers, key=lambda name: peers[name].get(minutes, 0.0)) for minutes in budgets}
        shown = {name: points for name, points in peers.items() if name in best or len(points) > 1}
        return {**shown, "ours": models["ours"]}

    shown = {folder: chosen(curves(folder)) for folder in folders}
    names = sorted(
        {name for models in shown.values() for name in models}, key=lambda name: (not name.startswith("ours"), name)
    )
    colours = dict(
        zip(names, ("#1f6feb", "#e8a06a", "#6b7785", "#a05195", "#2f9e6e", "#c0392b", "#111827"), strict=False)
    )
    figure = Figure(figsize=(4 * len(folders), 3.8), layout="constrained")
    for axes, (folder, models) in zip(figure.subplots(1, len(folders), squeeze=False)[0], shown.items(), strict=True):
        for name in [name for name in names if name in models]:
            minutes = sorted(models[name])
            axes.semilogx(minutes, [models[name][each] for each in minutes], "o-", label=name, color=colours[name])
        ticks = sorted({each for points in models.values() for each in points})
        axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
        axes.minorticks_off()
        axes.set_title(folder)
        axes.legend(frameon=False, loc="lower right")
        axes.set_xlabel("core-minutes")
    figure.axes[0].set_ylabel("top-1 %")
    save(figure, "accuracy-minutes.png")


def curves(folder: str) -> dict[str, dict[float, float]]:
    """The mean over the seeds, by model and minutes."""
    scores: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in results():
        if Path(row["folder"]).name == folder and not row.get("options"):
            scores[row["name"]][row["minutes"]].append(row["top1"])
    return {name: {at: statistics.mean(found) for at, found in each.items()} for name, each in scores.items()}


def save(figure: Any, name: str) -> None:
    from smallvit import plots

    plots.save(figure, HERE.parent / "docs" / "images" / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speeds", "run", "table", "plot"))
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--minutes", nargs="+", type=float, default=[], help="6 unless given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], help="candidates: ours, ours:NAME, or peers")
    parser.add_argument("--options", default="", help="for `smallvit train`, in one string")
    parser.add_argument("--core", type=int, default=None)
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    if args.what == "speeds":
        measure_speeds(args.folders, args.only)
    elif args.what == "run":
        run_all(args)
    elif args.what == "plot":
        from smallvit.plots.style import styled

        names = [Path(folder).name for folder in args.folders]
        if args.minutes:
            styled(plot)(names[0], args.minutes[0])
        else:
            styled(plot_minutes)(names)
    else:
        print_table()


if __name__ == "__main__":
    from smallvit.common.env import restart_fast

    restart_fast()
    main()
