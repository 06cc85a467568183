"""A run resumes as it was started, and can be stopped in every usual way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import smallvit
from smallvit import plots
from smallvit.common.files import write_json
from smallvit.evaluation import evaluate
from smallvit.training import MachineOptions, RecipeOptions, TrainConfig, loop, mesh, preparation, trainer
from smallvit.training.callbacks import Callback
from smallvit.training.options import RunOptions
from smallvit.training.plan import read_plan
from smallvit.training.trainer import Trainer
from tests.runs import assert_same


class Seen(Exception):
    pass


def test_a_run_resumes_with_its_own_precision(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun = TrainConfig(str(photos), model="vit_tiny_data", machine=MachineOptions(dtype="bfloat16", remat=True))
    write_json(tmp_path / "run/config.json", {"command": None, "config": begun.to_json(), "versions": {}})
    seen: list[TrainConfig] = []

    def trainer(config: TrainConfig, *_: object) -> None:
        seen.append(config)
        raise Seen

    monkeypatch.setattr(preparation, "_trainer", trainer)
    with pytest.raises(Seen):
        loop.train(TrainConfig(resume=tmp_path / "run", machine=MachineOptions(mesh="data=1")))
    assert seen[0].machine == MachineOptions(dtype="bfloat16", remat=True, mesh="data=1")
    assert seen[0].model_fields["dtype"] == "bfloat16"


def test_another_precision_is_refused():
    begun = MachineOptions(dtype="bfloat16", accumulate=4)
    assert MachineOptions(accumulate=4, num_processes=2).resume(begun) == MachineOptions(
        dtype="bfloat16", accumulate=4, num_processes=2
    )
    with pytest.raises(ValueError, match="started with accumulate=4, not 2: leave out accumulate"):
        MachineOptions(accumulate=2).resume(begun)


@pytest.mark.parametrize("content", [[], {}, {"batch_size": 8}, "text", {"decisions": 3}])
def test_a_damaged_plan_is_one_line(tmp_path: Path, content: object):
    write_json(tmp_path / "plan.json", content)
    with pytest.raises(ValueError, match=r"plan\.json is damaged: restore it, or start a new run"):
        read_plan(tmp_path, object.__new__(Trainer))


CROPS: dict[str, Any] = dict(
    model="vit_tiny_data",
    fields=dict(dim=16, depth=1, heads=2, mlp_dim=16),
    image_size=12,
    batch_size=16,
    epochs=2,
    resized_crop=(0.25, 1.0),
)


class Broken(Callback):
    def step(self, step: int, loss: float) -> None:
        if step == 5:
            raise RuntimeError("stopped")


@pytest.fixture(scope="module")
def large_photos(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "photos"
    for path in photos.rglob("*.png"):
        larger = folder / path.relative_to(photos)
        larger.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            image.resize((36, 24)).save(larger)
    return folder


@pytest.mark.usefixtures("as_a_user", "as_optax_needs")
@pytest.mark.parametrize("all_images", [False, True])
def test_a_run_on_crops_of_larger_images_resumes(
    large_photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_images: bool
):
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(loop, "finish", lambda *_: {"val_top1": 50.0, "test_top1": None})
    monkeypatch.setattr(trainer, "spread", lambda *args: seen.append((batch := mesh.spread(*args)).shape) or batch)
    settings = dict(**CROPS, all_images=all_images, runs=tmp_path)
    whole = Path(smallvit.train(large_photos, **settings, name="whole")["folder"])
    assert "training images are kept at 24 x 24 for random resized crops" in (whole / "log.txt").read_text()
    images = {shape for shape in seen if len(shape) == 4}
    assert images == {(16, 24, 24, 3), (6, 12, 12, 3)}  # to train on, and to validate
    with pytest.raises(RuntimeError, match="stopped"):
        smallvit.train(large_photos, **settings, name="stopped", checkpoint_seconds=0.0, callbacks=[Broken()])
    smallvit.train(resume=tmp_path / "stopped")
    assert "resuming at step" in (tmp_path / "stopped/log.txt").read_text()
    assert_same(tmp_path / "stopped", whole)
    assert not [note for note in evaluate(whole).notes if "changed" in note]


@pytest.mark.usefixtures("as_a_user", "as_optax_needs")
def test_the_pictures_of_crops_of_larger_images(large_photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[tuple[int, ...]] = []
    draw = plots.augmented

    def augmented(before: np.ndarray, after: np.ndarray) -> object:
        drawn.extend((before.shape[1:], after.shape[1:]))
        return draw(before, after)

    monkeypatch.setattr(plots, "augmented", augmented)
    smallvit.train(large_photos, **CROPS, runs=tmp_path, name="run")
    assert drawn == [(24, 24, 3), (12, 12, 3)]


@pytest.mark.usefixtures("as_a_user")
def test_no_reserve_without_need(photos: Path, large_photos: Path, tmp_path: Path):
    crops = RecipeOptions(resized_crop=(0.25, 1.0))
    config = TrainConfig(str(large_photos), image_size=12, in_recipe=crops, run=RunOptions(runs=tmp_path))
    assert preparation.scan(config).blank.larger is not None
    for other in (
        replace(config, data=str(photos)),
        replace(config, in_recipe=RecipeOptions()),
        replace(config, own=("augment=module.function",)),
    ):
        assert preparation.scan(other).blank.larger is None
