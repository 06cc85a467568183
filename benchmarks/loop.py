"""What the training loop adds to its bare jitted step: waiting for data, accounting, the bar.

    .venv/bin/python -m benchmarks.loop [--model hybrid_vit_small] [--rounds 5]

All sides alternate within one process, the same compiled step each. The bare side trains on one batch that is already
on the device, the one with data on the batches of the loop: what it takes longer, a step waits for data. Evaluations
and checkpoints are not part of it.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

from smallvit.common.env import restart_fast

restart_fast()

from smallvit.data import load_data
from smallvit.runs.saved import Spec
from smallvit.training.callbacks import Callbacks
from smallvit.training.checkpoint import Checkpoints
from smallvit.training.config import TrainConfig
from smallvit.training.loop import History, Training
from smallvit.training.mesh import make_mesh, spread
from smallvit.training.options import RunOptions
from smallvit.training.plan import Plan
from smallvit.training.progress import Reporter
from smallvit.training.step import STILL
from smallvit.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hybrid_vit_small")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    data = load_data()
    config = TrainConfig(model=args.model, run=RunOptions(checkpoint_seconds=1e9))
    recipe = config.full_recipe
    spec = Spec(config.model, len(data.classes), data.preprocess.size, {})
    trainer = Trainer(spec.create(), recipe, data, make_mesh(None), recipe.batch_size, 0, accumulate=1, remat=False)
    trainer.compile()()
    normalisation = data.preprocess.normalisation
    steps = len(data.train) // recipe.batch_size
    images = spread(trainer.mesh, recipe.batch_size, lambda part: data.train.images[: recipe.batch_size][part])
    labels = spread(trainer.mesh, recipe.batch_size, lambda part: data.train.labels[: recipe.batch_size][part])
    folder = Path(tempfile.mkdtemp())

    def bare() -> None:
        state = trainer.init()
        for _ in range(steps):
            state, metrics = trainer._steps[1.0](state, images, labels, trainer._key, STILL, normalisation)
        metrics.loss.block_until_ready()

    def data_too() -> None:
        state = trainer.init()
        for step in range(steps):
            state, metrics = trainer.step(state, step, STILL)
        metrics.loss.block_until_ready()

    def loop() -> None:
        # One step more than is run: the loop's evaluation and checkpoint at the end are not wanted here.
        plan = Plan(recipe.batch_size, steps, 0.5, None, "", ((0, steps + 1),))
        training = Training(
            config, folder, trainer, spec, plan, Checkpoints(folder), Reporter(quiet=True), Callbacks([]), 0.0, 0.0
        )
        training.run(trainer.init(), History(), threading.Event(), until=steps)

    sides = {"bare": bare, "with data": data_too, "loop": loop}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds + 1):
        for name, run in sides.items():
            begun = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begun)
    best = {name: min(each[1:]) for name, each in times.items()}  # the first round warms up
    for name, seconds in best.items():
        print(f"{name}: {steps * recipe.batch_size / seconds:,.0f} images/s, best of {args.rounds} epochs")
    waiting, whole = best["with data"] - best["bare"], best["loop"]
    print(f"{100 * waiting / whole:.1f} % of a step waits for data, the rest of the loop takes", end=" ")
    print(f"{100 * (whole - best['with data']) / whole:.1f} %")


if __name__ == "__main__":
    main()
