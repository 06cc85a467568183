"""A run resumes as it was started, and can be stopped in every usual way."""

from pathlib import Path

import pytest

from smallvit.common.files import write_json
from smallvit.training import MachineOptions, TrainConfig, loop, preparation
from smallvit.training.plan import read_plan
from smallvit.training.trainer import Trainer


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
