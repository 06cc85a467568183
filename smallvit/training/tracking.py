"""Experiment trackers: TensorBoard, MLflow and Weights & Biases. A failing tracker does not end a run."""

import os
from collections.abc import Callable, Sequence

from smallvit.common.extras import first_line, need
from smallvit.common.files import read_json, write_json
from smallvit.training.callbacks import Callback, Row, Run
from smallvit.training.config import flat

IDS = "tracking.json"  # in the run folder: a resumed run continues the same entry


class Tracker(Callback):
    """Sends the rows of metrics.csv and the result; subclasses implement `open`, `log` and `close`."""

    name: str
    package: str

    def __init__(self) -> None:
        self.library = need(self.package, f"--track {self.name}")
        self._say: Callable[[str], None] | None = None  # None: not open

    def open(self, run: Run, known: str | None) -> str | None:
        """Opens a new entry, or the `known` one of a resumed run; returns its id if it has one."""
        raise NotImplementedError

    def log(self, row: Row) -> None:
        raise NotImplementedError

    def close(self, result: Row | None) -> None:
        raise NotImplementedError

    def begin(self, run: Run) -> None:
        def start() -> None:
            path = run.folder / IDS
            ids = read_json(path) if path.exists() else {}
            if entry := self.open(run, ids.get(self.name)):
                write_json(path, {**ids, self.name: entry})

        self._say = run.say
        self._try(start)

    def evaluation(self, rows: Sequence[Row]) -> None:
        self._try(lambda: self.log(rows[-1]))

    def end(self, result: Row | None) -> None:
        self._try(lambda: self.close(result))

    def _try(self, call: Callable[[], None]) -> None:
        if self._say is None:
            return
        try:
            call()
        except Exception as error:  # any error of a server or a disk: training is more important
            self._say(f"{self.name} failed ({first_line(error)}): the run continues without it")
            self._say = None


class TensorBoard(Tracker):
    """Writes event files to RUN/tensorboard."""

    name, package = "tensorboard", "tensorboardX"

    def open(self, run: Run, known: str | None) -> None:
        purge = run.step + 1 if run.step else None  # removes what a killed run wrote after its last checkpoint
        self.writer = self.library.SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, row: Row) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, row["step"])

    def close(self, result: Row | None) -> None:
        self.writer.close()


class MLflow(Tracker):
    """Logs to the server of MLFLOW_TRACKING_URI, or to MLflow's default location."""

    name, package = "mlflow", "mlflow"

    def open(self, run: Run, known: str | None) -> str:
        entry = self.library.start_run(run_id=known, run_name=None if known else run.folder.name)
        if known is None:
            values = {"model": run.model, "data": run.data, **flat(run.config)}
            self.library.log_params({name: str(value)[:500] for name, value in values.items()})
        return entry.info.run_id

    def log(self, row: Row) -> None:
        self.library.log_metrics(_numbers(row), step=row["step"])

    def close(self, result: Row | None) -> None:
        if result is not None:
            self.library.log_metrics({f"result_{name}": value for name, value in _numbers(result).items()})
        self.library.end_run("KILLED" if result is None else "FINISHED")


class WandB(Tracker):
    """Logs to the project of WANDB_PROJECT, or `smallvit`; WANDB_MODE=offline keeps the run in the run folder."""

    name, package = "wandb", "wandb"

    def open(self, run: Run, known: str | None) -> str:
        self.entry = self.library.init(
            project=os.environ.get("WANDB_PROJECT", "smallvit"),
            name=run.folder.name,
            id=known,
            resume="allow",
            dir=str(run.folder),
            config={"model": run.model, "data": run.data, **flat(run.config)},
        )
        return self.entry.id

    def log(self, row: Row) -> None:
        self.entry.log(dict(row), step=row["step"])

    def close(self, result: Row | None) -> None:
        if result is not None:
            self.entry.summary.update(_numbers(result))
        self.entry.finish(exit_code=1 if result is None else 0)


TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in (TensorBoard, MLflow, WandB)}


def _numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}
