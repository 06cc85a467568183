"""Training, from a configuration to a run folder with a model in it."""

import json
import math
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from smallvit.common.env import keep_compiled
from smallvit.common.files import read_json, write_json
from smallvit.data import Dataset, load_data
from smallvit.runs.folder import (
    CACHE,
    CHECKPOINTS,
    LOG,
    MODEL,
    PLAN,
    check_name,
    create_run,
    locked,
    open_run,
    write_metrics,
)
from smallvit.runs.saved import Spec, save_model
from smallvit.runs.source import data_digest
from smallvit.training.checkpoint import Checkpoints
from smallvit.training.cluster import agree, join, meet
from smallvit.training.config import DEFAULT_MINUTES, TrainConfig
from smallvit.training.finish import finish
from smallvit.training.mesh import make_mesh
from smallvit.training.optimiser import learning_rates
from smallvit.training.progress import Bar, Board, Reporter, duration
from smallvit.training.step import Metrics, State
from smallvit.training.trainer import Trainer

EVALUATIONS = 100  # at most, however many epochs there are
ENDING = 12.0  # seconds that the pictures and the report take


class Stopped(Exception):
    """The run ends early, and can go on: its last good state is kept."""


@dataclass(frozen=True)
class Plan:
    """What is fixed when a run begins, and stays so wherever it goes on."""

    steps: int
    batch_size: int
    epoch: float  # steps of one
    interval: float  # steps from one evaluation to the next
    data: str  # digest of the training images

    def evaluates(self, step: int) -> bool:
        return step == self.steps or int(step / self.interval) > int((step - 1) / self.interval)


@dataclass
class History:
    """What a checkpoint remembers beside the arrays."""

    step: int = 0
    seconds: float = 0.0  # since the run began, without the time from a stop until it goes on
    training: float = 0.0  # seconds of these in which it trained
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics.csv
    best: tuple[float, float] | None = None  # accuracy, and loss with a minus, in validation
    loss: float = 0.0  # sums over the steps since the last evaluation
    correct: int = 0
    steps: int = 0


def train(config: TrainConfig | None = None) -> dict[str, Any]:
    """Does what `smallvit train` does; returns what result.json says and, as `folder`, where it stands."""
    started = time.monotonic()
    config = config or TrainConfig()
    join(config.machine)
    keep_compiled()
    say = Reporter(quiet=jax.process_index() != 0)
    folder = config.resume
    if folder is not None:
        config = replace(TrainConfig.from_json(open_run(folder)), machine=config.machine)
    else:
        check_name(config.run.runs, config.run.name)
    data = load_data(
        config.data,
        image_size=config.image_size,
        fit=config.fit,
        seed=config.split_seed,
        data_dir=config.run.data_dir,
        cache_dir=config.run.cache_dir or config.run.runs / CACHE,
    )
    for line in data.notes:
        say(line)
    spec = Spec(config.model, len(data.classes), data.preprocess.size, config.model_fields)
    trainer = _trainer(config, data, spec, say)
    say(f"compiled in {duration(trainer.compile())}")
    if folder is None:  # only now: a user's mistake leaves no folder behind
        default = f"{data.name}-{config.model}"
        folder = Path(agree(lambda: str(create_run(config.run.runs, config.run.name, default, config.to_json()))))

    with locked(folder) if jax.process_index() == 0 else nullcontext():
        say.open_log(folder / LOG)
        say(f"run folder {folder}")
        plan = _plan(config, trainer, folder, started)
        say(f"{plan.steps:,} steps, which are {plan.steps / plan.epoch:.1f} epochs")
        checkpoints = Checkpoints(folder / CHECKPOINTS)
        found = checkpoints.restore(trainer.abstract_state, say)
        if found is None:
            state, history = trainer.init(), History()
        else:
            state, history = found[0], History(**found[1])
            say(f"goes on at step {history.step:,} of {plan.steps:,}")
        training = Training(config, folder, trainer, spec, plan, checkpoints, say, started - history.seconds)
        with _stop_signals() as stopping:
            training.run(state, history, stopping)
        result: dict[str, Any] = {"folder": str(folder)}
        if jax.process_index() == 0:
            result |= finish(folder, config, data, history.rows, trainer.parameters, training.clock, say)
        meet("finished")
        return result


@dataclass
class Training:
    config: TrainConfig
    folder: Path
    trainer: Trainer
    spec: Spec
    plan: Plan
    checkpoints: Checkpoints
    say: Reporter
    started: float

    def clock(self) -> float:
        """Seconds that this run has taken so far."""
        return time.monotonic() - self.started

    def run(self, state: State, history: History, stopping: threading.Event, until: int | None = None) -> None:
        """The loop, up to the end or `until` a step. A step is waited for only when the next one is on its way."""
        rates = learning_rates(self.trainer.recipe, self.plan.steps)
        alone = jax.process_count() == 1  # processes that train together save together, at evaluations
        before: Metrics | None = None
        saved = begun = time.monotonic()
        with (
            Bar(self.say, self.plan.steps, self.plan.epoch) as bar,
            Board(self.folder, self.config.run.tensorboard) as board,
        ):
            for step in range(history.step, until or self.plan.steps):
                state, metrics = self.trainer.step(state, step, rates[step])
                if before is not None:
                    self._account(history, before)
                    bar.show(history.step, history.loss / history.steps, self.plan.batch_size)
                before, done = metrics, step + 1

                evaluates = self.plan.evaluates(done)
                stops = alone and stopping.is_set()
                saves = (
                    stops
                    or done == self.plan.steps
                    or (time.monotonic() - saved >= self.config.run.checkpoint_seconds if alone else evaluates)
                )
                if not (evaluates or saves):
                    continue
                self._account(history, before)
                before = None
                history.training += time.monotonic() - begun
                with self._writing():
                    if evaluates:
                        row = self._evaluate(state, history, float(rates[step]))
                        board.add(row)
                        bar.line(row)
                    if saves:
                        self._save(state, history)
                        saved = time.monotonic()
                if stops:
                    raise Stopped(f"stopped at step {done:,}: `smallvit train --resume {self.folder}` goes on")
                begun = time.monotonic()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk, say, ends the run in one line; the state before stays whole."""
        try:
            yield
        except (OSError, ValueError) as error:  # orbax has the latter for whatever the disk says
            last = str(error).splitlines()[0].partition(" [os_error")[0].rpartition(": ")[2]
            reason = error.strerror if isinstance(error, OSError) and error.strerror else last
            goes_on = f"`smallvit train --resume {self.folder}` goes on when that is put right"
            raise Stopped(f"cannot write to {self.folder} ({reason}): {goes_on}") from error

    def _account(self, history: History, metrics: Metrics) -> None:
        loss = float(metrics.loss)
        history.step += 1
        if not math.isfinite(loss):
            raise Stopped(f"the loss is {loss} at step {history.step:,}: begin anew with a smaller --learning-rate")
        history.loss += loss
        history.correct += int(metrics.correct)
        history.steps += 1

    def _evaluate(self, state: State, history: History, rate: float) -> dict[str, Any]:
        """Scores the validation images, adds a row to metrics.csv, and keeps the model if it is the best so far."""
        data, plan = self.trainer.data, self.plan
        scores = self.trainer.evaluate(state, data.val)
        row = {
            "epoch": round(history.step / plan.epoch, 3),
            "step": history.step,
            "minutes": round(self.clock() / 60, 3),
            "learning_rate": rate,
            "train_loss": round(history.loss / history.steps, 5),
            "train_top1": round(100 * history.correct / (history.steps * plan.batch_size), 3),
            "val_loss": round(scores.loss, 5),
            "val_top1": round(scores.top1, 3),
            "images_per_second": round(history.step * plan.batch_size / history.training, 1),
        }
        history.rows.append(row)
        history.loss, history.correct, history.steps = 0.0, 0, 0
        if history.best is None or (scores.top1, -scores.loss) >= tuple(history.best):
            history.best = (scores.top1, -scores.loss)
            variables = self.trainer.variables(state)
            if jax.process_index() == 0:
                save_model(self.folder / MODEL, self.spec, variables, data.classes, data.preprocess)
        if jax.process_index() == 0:
            write_metrics(self.folder, history.rows)
        return row

    def _save(self, state: State, history: History) -> None:
        if not self.trainer.finite(state):
            raise Stopped(
                f"weights are no numbers any more at step {history.step:,}: begin anew with a smaller --learning-rate"
            )
        history.seconds = self.clock()
        self.checkpoints.save(history.step, state, asdict(history))


def _trainer(config: TrainConfig, data: Dataset, spec: Spec, say: Reporter) -> Trainer:
    recipe, mesh = config.full_recipe, make_mesh(config.machine.mesh)
    parts = mesh.size * config.machine.accumulate * recipe.repeats
    batch_size = recipe.batch_size
    if batch_size > len(data.train):
        batch_size = max(len(data.train) // parts, 1) * parts
        say(f"batches of {batch_size}: there are only {len(data.train)} images to train on")
    if batch_size % parts:
        raise ValueError(
            f"batch size {batch_size} must be divisible by {mesh.size} devices x accumulate="
            f"{config.machine.accumulate}: try {max(batch_size // parts, 1) * parts}"
        )
    machine = config.machine
    trainer = Trainer(
        spec.create(),
        recipe,
        data,
        mesh,
        batch_size,
        config.seed,
        accumulate=machine.accumulate,
        remat=machine.remat,
    )
    height, width = data.preprocess.size
    say(
        f"{spec.name}: {trainer.parameters:,} parameters, images {height} x {width} x {data.preprocess.channels}, "
        f"batches of {batch_size}, recipe {config.recipe}, {mesh.size} x {jax.default_backend()}"
    )
    return trainer


def _plan(config: TrainConfig, trainer: Trainer, folder: Path, started: float) -> Plan:
    """The stored plan of a run that goes on, or a new one, stored."""
    data = trainer.data
    digest = data_digest(data)
    if (folder / PLAN).exists():
        plan = Plan(**read_json(folder / PLAN))
        if plan.data != digest:
            raise ValueError(f"the data is not what {folder} was trained on: put it back, or begin a new run")
        if plan.batch_size != trainer.batch_size:
            raise ValueError(f"{folder} has batches of {plan.batch_size}, but here they are {trainer.batch_size}")
        return plan
    recipe = trainer.recipe
    epoch = len(data.train) * recipe.passes * recipe.repeats / trainer.batch_size
    epochs = config.epochs or (recipe.epochs if config.minutes is None else None)
    if epochs is None:
        left = 60 * (config.minutes or DEFAULT_MINUTES) - (time.monotonic() - started) - ENDING
        per_step, per_evaluation = _measure(trainer)
        epochs = max(left, 0) / (per_step * epoch + per_evaluation)
        if epochs > EVALUATIONS:
            epochs = (left - EVALUATIONS * per_evaluation) / (per_step * epoch)
    steps = max(math.ceil(epochs * epoch), 1)
    interval = epoch * max(1, math.ceil(epochs / EVALUATIONS))
    plan = Plan(steps, trainer.batch_size, epoch, interval, digest)
    plan = Plan(**json.loads(agree(lambda: json.dumps(asdict(plan)))))
    if jax.process_index() == 0:
        write_json(folder / PLAN, asdict(plan))
    return plan


def _measure(trainer: Trainer, seconds: float = 4.0) -> tuple[float, float]:
    """How long a step and an evaluation take, on a state that is thrown away; the slow first steps are left out."""
    state, begun, times = trainer.init(), time.monotonic(), []
    while len(times) < 6 or time.monotonic() - begun < seconds:
        before = time.monotonic()
        state, metrics = trainer.step(state, len(times), np.float32(0))
        metrics.loss.block_until_ready()
        times.append(time.monotonic() - before)
    trainer.evaluate(state, trainer.data.val)
    before = time.monotonic()
    trainer.evaluate(state, trainer.data.val)
    return statistics.mean(times[len(times) // 2 :]), time.monotonic() - before


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Ctrl-C and a polite kill set the event, so that the loop ends at a whole step; a second one interrupts."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def stop(number: int, _: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
