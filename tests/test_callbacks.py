"""Callbacks, early stopping, trackers, and the user's own functions."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import smallvit
from smallvit.training import TrainConfig, loop
from smallvit.training.callbacks import Callback, Patience, Run
from smallvit.training.own import Own
from smallvit.training.tracking import TRACKERS

pytestmark = pytest.mark.usefixtures("as_a_user")
TINY: dict[str, Any] = dict(
    model="vit_tiny_data", fields=dict(dim=16, depth=1, heads=2, mlp_dim=16), image_size=12, batch_size=16, ema=0.0
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, as_optax_needs: None):
    """Skips pictures and report, which take longer than these runs."""
    monkeypatch.setattr(loop, "finish", lambda *_: {"val_top1": 50.0, "test_top1": None})


def rows(*scores: float) -> list[dict[str, Any]]:
    """Evaluations of 400 images, where twice the standard error at 50 % is 5 points."""
    return [{"step": i, "val_top1": score, "val_error": 2.5} for i, score in enumerate(scores)]


def test_patience_waits_for_a_gain_beyond_chance():
    patience = Patience(3)
    assert patience.waited(rows(50)) == 0
    assert patience.waited(rows(50, 54, 52, 40)) == 3
    assert patience.waited(rows(50, 54, 56)) == 0  # small steps add up
    assert patience.waited(rows(50, 60, 62, 61)) == 2
    assert not patience.evaluation(rows(50, 54, 52))
    assert patience.evaluation(rows(50, 54, 52, 40))
    balanced = [{**row, "val_mean_recall": recall} for row, recall in zip(rows(50, 50), (30, 60), strict=True)]
    assert patience.waited(balanced) == 0
    assert patience.waited([{**row, "val_error": 20.0} for row in balanced]) == 1
    assert patience.waited([{"val_top1": 50.0}, {"val_top1": 51.0}]) == 0  # of a version without this column


@dataclass
class Watch(Callback):
    """Records its calls."""

    stop_at: int = 10**9
    seen: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def begin(self, run: Run) -> None:
        self.seen.append(f"begin {run.model} {run.step} of {run.steps}")

    def step(self, step: int, loss: float) -> None:
        self.seen.append(str(step))
        self.losses.append(loss)

    def evaluation(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        self.seen.append(f"evaluation {len(rows)} {rows[-1]['step']}")
        return rows[-1]["step"] >= self.stop_at

    def end(self, result: Mapping[str, Any] | None) -> None:
        self.seen.append(f"end {result and result['val_top1']}")


@pytest.mark.filterwarnings("default")
def test_a_callback_sees_and_ends_a_run(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    watch = Watch(stop_at=8)
    result = smallvit.train(photos, **TINY, epochs=6, runs=tmp_path, name="a", callbacks=[watch], track="tensorboard")
    assert watch.seen[:5] == ["begin vit_tiny_data 0 of 23", "1", "2", "3", "4"]
    assert [each for each in watch.seen if "e" in each][1:] == ["evaluation 1 4", "evaluation 2 8", "end 50.0"]
    printed = capsys.readouterr().out
    assert "ended early by Watch, at step 8 of 23: the learning rate is at" in printed
    assert (Path(result["folder"]) / "model/model.safetensors").exists()
    assert list((tmp_path / "a/tensorboard").glob("events*"))
    # The end is part of the last checkpoint: a process that is killed in the report ends there again.
    again = Watch()
    smallvit.train(resume=tmp_path / "a", callbacks=[again])
    assert again.seen == ["begin vit_tiny_data 8 of 23", "end 50.0"]


class Unhappy(Callback):
    def step(self, step: int, loss: float) -> None:
        raise RuntimeError("no")


@pytest.mark.filterwarnings("default")
def test_functions_of_ones_own(photos: Path, tmp_path: Path):
    calls: dict[str, Any] = {}

    def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return 100 + ((jax.nn.softmax(logits) - targets) ** 2).sum(-1)

    def optimiser(rate: float) -> optax.GradientTransformation:
        calls["rate"] = rate
        return optax.sgd(rate, momentum=0.9)

    def augment(key: jax.Array, images: jax.Array) -> jax.Array:
        calls["images"] = images.shape, images.dtype
        return jnp.zeros_like(images)

    own = dict(loss=loss, optimiser=optimiser, augment=augment)
    watch = Watch(stop_at=1)
    with pytest.raises(RuntimeError, match="no"):
        smallvit.train(photos, **TINY, lr=0.5, epochs=1, runs=tmp_path, name="a", callbacks=[watch, Unhappy()], **own)
    assert watch.losses[0] > 100
    assert watch.seen[-1] == "end None"
    assert calls == {"rate": 0.5, "images": ((16, 12, 12, 3), jnp.uint8)}
    stored = json.loads((tmp_path / "a/config.json").read_text())["config"]["own"]
    assert [text.partition("=")[0] for text in stored] == ["loss", "optimiser", "augment"]
    with pytest.raises(ValueError, match=r"was started with loss=.*optimiser=.*: resume it from Python, as in"):
        loop.train(TrainConfig(resume=tmp_path / "a"))
    smallvit.train(resume=tmp_path / "a", **own)


def test_own_functions_are_checked(tmp_path: Path, photos: Path):
    with pytest.raises(ValueError, match="loss='mse' must be a function"):
        smallvit.train(photos, loss="mse")
    with pytest.raises(ValueError, match="was started without your own loss: leave it out"):
        Own(loss=lambda logits, targets: logits).check((), "runs/a")
    with pytest.raises(ValueError, match=r"your loss has shape \(\): it must return one number per image"):
        smallvit.train(photos, **TINY, epochs=1, runs=tmp_path, loss=lambda logits, targets: logits.mean())
    with pytest.raises(ValueError, match="your optimiser returns 3: it must return an optax transformation"):
        smallvit.train(photos, **TINY, epochs=1, runs=tmp_path, optimiser=lambda rate: 3)
    with pytest.raises(ValueError, match=r"your augment turns images of shape \(16, 12, 12, 3\) into"):
        smallvit.train(photos, **TINY, epochs=1, runs=tmp_path, augment=lambda key, images: images[:, :6])
    with pytest.raises(ValueError, match=r"must be an instance of smallvit.Callback"):
        smallvit.train(photos, **TINY, epochs=1, runs=tmp_path, callbacks=[Watch])


class FakeMLflow:
    """The part of mlflow's API that we call."""

    def __init__(self):
        self.log: list[Any] = []

    def start_run(self, run_id: str | None = None, *, run_name: str | None = None) -> Any:
        self.log.append(("start", run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="id7"))

    def log_params(self, params: dict[str, Any]) -> None:
        assert all(len(value) <= 500 for value in params.values())
        self.log.append(("params", params))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.log.append(("metrics", metrics, step))

    def end_run(self, status: str = "FINISHED") -> None:
        self.log.append(("end", status))


class FakeWandB:
    """The part of wandb's API that we call."""

    def __init__(self):
        self.data: list[Any] = []
        self.summary: dict[str, Any] = {}
        self.id = "w1"

    def init(self, *, project: str, name: str, id: str | None, resume: str, dir: str, config: dict[str, Any]) -> Any:
        self.data.append(("init", project, name, id, config["model"]))
        return self

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.data.append(("log", data, step))

    def finish(self, exit_code: int | None = None) -> None:
        self.data.append(("finish", exit_code))


def told(name: str, folder: Path, result: dict[str, Any] | None, lines: list[str]) -> None:
    tracker = TRACKERS[name]()
    config = {"epochs": 3.0, "minutes": None, "run": {"runs": "runs", "track": [name]}, "fields": ["x=1" * 400]}
    tracker.begin(Run(folder, "vit_tiny_data", "photos", config, 20, 0, lines.append))
    tracker.step(1, 0.5)
    tracker.evaluation([{"step": 4, "val_top1": 1.0}, {"step": 8, "val_top1": 30.0}])
    tracker.end(result)


def test_mlflow_gets_settings_rows_and_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake, lines = FakeMLflow(), []
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    told("mlflow", tmp_path, {"test_top1": 40.0, "folder": "x"}, lines)
    (_, run_id, name), (_, params), *others = fake.log
    assert (run_id, name, params["epochs"], params["model"]) == (None, tmp_path.name, "3.0", "vit_tiny_data")
    assert "minutes" not in params
    assert others == [
        ("metrics", {"step": 8, "val_top1": 30.0}, 8),
        ("metrics", {"result_test_top1": 40.0}, None),
        ("end", "FINISHED"),
    ]
    fake.log.clear()
    told("mlflow", tmp_path, None, lines)  # resumed, then stopped
    assert fake.log[0] == ("start", "id7", None)
    assert fake.log[-1] == ("end", "KILLED")
    assert lines == []


def test_wandb_gets_settings_rows_and_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for known in (None, "w1"):
        told("wandb", tmp_path, {"test_top1": 40.0}, [])
        assert fake.data[0] == ("init", "smallvit", tmp_path.name, known, "vit_tiny_data")
        assert fake.data[1:] == [("log", {"step": 8, "val_top1": 30.0}, 8), ("finish", 0)]
        assert fake.summary == {"test_top1": 40.0}
        fake.data.clear()


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Down(FakeMLflow):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise ConnectionError("the server is down\nand more")

    fake, lines = Down(), []
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    told("mlflow", tmp_path, {}, lines)
    assert lines == ["mlflow failed (the server is down): the run continues without it"]


def test_a_missing_tracker_is_one_line(photos: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"--track mlflow needs mlflow: pip install 'smallvit\[mlflow\]'"):
        smallvit.train(photos, track=["mlflow"])
    with pytest.raises(ValueError, match="unknown tracker 'comet': choose from tensorboard, mlflow, wandb"):
        smallvit.train(photos, track="comet")
