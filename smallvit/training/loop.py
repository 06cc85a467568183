"""`train`, from a configuration to a run folder with a model, and its loop."""

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from smallvit.common.env import keep_compiled
from smallvit.common.errors import Preempted, Stopped
from smallvit.common.output import lasting_output
from smallvit.runs.folder import (
    CHECKPOINTS,
    LOG,
    MODEL,
    check_name,
    create_run,
    locked,
    open_run,
    write_metrics,
)
from smallvit.runs.saved import Spec, save_model
from smallvit.training.callbacks import Callback, Callbacks, Patience, Run, check_callbacks
from smallvit.training.checkpoint import Checkpoints
from smallvit.training.cluster import Votes, barrier, broadcast_choice, join, leaving_together, lost
from smallvit.training.config import TrainConfig
from smallvit.training.finish import finish
from smallvit.training.own import Own
from smallvit.training.plan import Plan, ending, make_plan, read_plan, store_plan
from smallvit.training.preparation import prepare, starting_weights
from smallvit.training.progress import Bar, Reporter
from smallvit.training.signals import own_signals, watch_signals
from smallvit.training.start import read_start
from smallvit.training.step import Metrics, Pace, State
from smallvit.training.tracking import TRACKERS
from smallvit.training.trainer import Trainer


@dataclass
class History:
    """The part of a checkpoint besides the arrays."""

    step: int = 0
    seconds: float = 0.0  # since the run started, without pauses between a stop and a resume
    training: float = 0.0  # seconds of the loop without evaluations
    decided_step: int = 0  # the step of the last decision, and `training` then
    decided_training: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics.csv
    best: float | None = None  # validation accuracy, or mean recall with --balance
    kept: int = 0  # the row whose weights were saved as the model
    loss: float = 0.0  # sums over the steps since the last evaluation
    correct: int = 0
    steps: int = 0
    stopped: bool = False  # early, by a callback


@lasting_output()
@own_signals()
def train(
    config: TrainConfig | None = None,
    callbacks: Iterable[Callback] = (),
    own: Own = Own(),  # noqa: B008, it is frozen
) -> dict[str, Any]:
    """Runs `smallvit train`; returns the content of result.json and, as `folder`, the run folder."""
    started = time.monotonic()
    config = config or TrainConfig()
    join(config.machine)
    stopping = watch_signals(config.resume)
    keep_compiled()
    report = Reporter(quiet=jax.process_index() != 0)
    folder, from_scratch = config.resume, config.from_scratch
    if folder is not None:
        begun = TrainConfig.from_json(open_run(folder))
        config = replace(begun, machine=config.machine.resume(begun.machine))
        own.check(config.own, folder)
    else:
        config = replace(config, own=own.names)
        check_name(config.run.runs, config.run.name)
    watching = [*(TRACKERS[name]() for name in config.run.track), *callbacks]
    check_callbacks(watching)
    config, data, spec, trainer, given = prepare(config, own, report, new=folder is None)
    plan = read_plan(folder, trainer) if folder is not None else None  # all processes use that of the first
    plan = plan or make_plan(config, trainer, started)
    if folder is None:  # only now, so that a user's mistake leaves no folder behind
        default = f"{data.name}-{config.model}"
        folder = Path(
            broadcast_choice(lambda: str(create_run(config.run.runs, config.run.name, default, config.to_json())))
        )
    stopping.folder = folder

    runtime_log = folder / f"runtime-{jax.process_index()}.txt"
    with leaving_together(runtime_log), locked(folder) if jax.process_index() == 0 else nullcontext():
        report.open_log(folder / LOG)
        report(f"run folder {folder}")
        store_plan(folder, plan)
        report(f"{plan.steps:,} steps, which are {plan.epochs:.1f} epochs")
        if plan.seconds is not None and plan.epochs < 1:
            report(f"warning: this time is too short to see every image once: give more than {plan.seconds / 60:g} min")
        checkpoints = Checkpoints(folder / CHECKPOINTS)
        found = checkpoints.restore(trainer.abstract_state, report, from_scratch=from_scratch)
        if found is None:
            if config.init is not None and given is None:  # stopped before its first checkpoint
                given = starting_weights(read_start(config.init), spec, data, report)
            state, history = trainer.init(given), History()
        else:
            state, history = found[0], History(**found[1])
            report(f"resuming at step {history.step:,} of {plan.steps:,}")
        patience = [] if config.patience is None else [Patience(config.patience)]
        listeners = Callbacks([*watching, *patience] if jax.process_index() == 0 else [])
        training = Training(
            config,
            folder,
            trainer,
            spec,
            plan,
            checkpoints,
            report,
            listeners,
            started - history.seconds,
            plan.evaluating,
        )
        result: dict[str, Any] | None = None
        listeners.begin(Run(folder, spec.name, data.name, config.to_json(), plan.steps, history.step, report))
        try:
            with stopping.at_a_step():
                training.run(state, history, stopping)
            if jax.process_index() == 0:
                clock, parameters = training.clock, trainer.parameters
                result = finish(
                    folder, config, data, history.rows, history.kept, parameters, clock, report, own.augment
                )
        finally:
            listeners.end(result)
        barrier("finished")
        return {"folder": str(folder), **(result or {})}


@dataclass
class Training:
    config: TrainConfig
    folder: Path
    trainer: Trainer
    spec: Spec
    plan: Plan
    checkpoints: Checkpoints
    report: Reporter
    callbacks: Callbacks
    started: float
    evaluating: float  # seconds of the last evaluation

    def clock(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self.started

    def run(self, state: State, history: History, stopping: threading.Event, until: int | None = None) -> None:
        """Trains to the end, or `until` a step. The results of a step are read after the next one has been started."""
        votes = Votes(self.trainer.mesh)
        before: Metrics | None = None
        step, saved, begun = history.step, time.monotonic(), time.monotonic()
        with Bar(self.report, self.plan) as bar:
            while step < (until or self.plan.steps) and not history.stopped:
                pace = self.plan.pace(self.trainer.recipe, step)
                state, metrics = self.trainer.step(state, step, pace, self.plan.side(step))
                if before is not None:
                    self._account(history, before)
                    bar.show(history.step, history.loss / history.steps, self.plan.batch_size)
                before, step = metrics, step + 1

                evaluates = self.plan.evaluates(step)
                due = time.monotonic() - saved >= self.config.run.checkpoint_seconds
                stops, due = votes(stopping.is_set(), due)
                saves = stops or due or step == self.plan.steps
                if not (evaluates or saves or self.plan.decides(step)):
                    continue
                self._account(history, before)
                before = None
                history.training += time.monotonic() - begun
                with self._writing():
                    if evaluates:
                        bar.line(self._evaluate(state, history, pace))
                begun = time.monotonic()
                if evaluates and step < self.plan.steps:
                    history.stopped = self._asked_to_stop(history, pace)
                    saves = saves or history.stopped
                elif evaluates:
                    self.callbacks.evaluation(history.rows)
                with self._writing():
                    if self.plan.decides(step) and not history.stopped:
                        self._decide(step, history)
                        bar.plan = self.plan
                    if saves:
                        self._save(state, history)
                        saved = time.monotonic()
                        votes.clear()
                if stops:
                    barrier("stopped")
                    raise Preempted(f"stopped at step {step:,}: `smallvit train --resume {self.folder}` resumes it")

    def _asked_to_stop(self, history: History, pace: Pace) -> bool:
        """Whether a callback of the first process stops the run here; the same in all processes."""
        by = broadcast_choice(lambda: self.callbacks.evaluation(history.rows))
        if by:
            self.report(
                f"ended early by {by}, at step {history.step:,} of {self.plan.steps:,}: the learning rate is at "
                f"{float(pace.rate):.0%} of its peak, and the model is the best one so far"
            )
        return bool(by)

    def _decide(self, step: int, history: History) -> None:
        """Replans the remaining steps by the time per step since the last decision."""
        assert self.plan.seconds is not None
        work = self.plan.work(history.decided_step, step)
        per_step = (history.training - history.decided_training) / work
        history.decided_step, history.decided_training = step, history.training
        rest = ending(self.trainer, self.evaluating) + self.plan.evaluations_after(step) * self.evaluating
        left = self.plan.steps_for((self.plan.seconds - self.clock() - rest) / per_step, step)
        # From the first process: the others may have measured other times.
        self.plan = self.plan.decided(step, int(broadcast_choice(lambda: str(left))))
        store_plan(self.folder, self.plan)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns write errors, such as a full disk, into a one-line end of the run; earlier files stay intact."""
        try:
            yield
        except (OSError, ValueError) as error:  # orbax raises ValueError for errors of the disk
            if lost(error):
                raise
            last = str(error).splitlines()[0].partition(" [os_error")[0].rpartition(": ")[2]
            reason = error.strerror if isinstance(error, OSError) and error.strerror else last
            remedy = f"fix that, then `smallvit train --resume {self.folder}`"
            raise Stopped(f"cannot write to {self.folder} ({reason}): {remedy}") from error

    def _account(self, history: History, metrics: Metrics) -> None:
        loss = float(metrics.loss)
        history.step += 1
        if not math.isfinite(loss):
            raise Stopped(
                f"the loss is {loss} at step {history.step:,}: start a new run with a smaller --learning-rate"
            )
        self.callbacks.step(history.step, loss)
        history.loss += loss
        history.correct += int(metrics.correct)
        history.steps += 1

    def _evaluate(self, state: State, history: History, pace: Pace) -> dict[str, Any]:
        """Scores the validation images, adds a row to metrics.csv, and saves the weights if they are kept."""
        data, plan = self.trainer.data, self.plan
        state = self.trainer.settled(state, history.step)
        begun = time.monotonic()
        scores = self.trainer.evaluate(state, data.val)
        row = {
            "epoch": round(history.step / plan.epoch, 3),
            "step": history.step,
            "minutes": round(self.clock() / 60, 3),
            "learning_rate": float(pace.rate) * self.trainer.recipe.learning_rate,
            "train_loss": round(history.loss / history.steps, 5),
            "train_top1": round(100 * history.correct / (history.steps * plan.batch_size), 3),
            "val_loss": round(scores.loss, 5),
            "val_top1": round(scores.top1, 3),
            "images_per_second": round(history.step * plan.batch_size / history.training, 1),
        }
        score, error = scores.top1, scores.error
        if self.trainer.recipe.balance:
            score, error = scores.mean_recall, scores.recall_error
            row["val_mean_recall"] = round(score, 3)
        row["val_error"] = round(error, 3)
        history.rows.append(row)
        history.loss, history.correct, history.steps = 0.0, 0, 0
        kept = is_kept(score, error, history.best, last=history.step == plan.steps)
        if kept or self.config.all_images:  # the score of training images says nothing
            history.best, history.kept = max(score, history.best or 0.0), len(history.rows) - 1
            variables = self.trainer.variables(state)
            if jax.process_index() == 0:
                save_model(self.folder / MODEL, self.spec, variables, data.classes, data.preprocess)
        if jax.process_index() == 0:
            write_metrics(self.folder, history.rows)
        self.evaluating = time.monotonic() - begun
        return row

    def _save(self, state: State, history: History) -> None:
        if not self.trainer.finite(state):
            raise Stopped(
                f"NaN in the weights at step {history.step:,}: start a new run with a smaller --learning-rate"
            )
        history.seconds = self.clock()
        self.checkpoints.save(history.step, state, asdict(history))


def is_kept(score: float, error: float, best: float | None, *, last: bool) -> bool:
    """Whether the weights with this score, in percent, replace those with the best score so far.

    The last weights, averaged at the end of the schedule, are preferred unless they are worse by more than twice the
    standard error: the best of many validations on few images is mostly luck.
    """
    return best is None or score >= best or (last and best - score <= 2 * error)
