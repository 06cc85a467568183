"""Checkpoints: damaged ones are set aside, unusable ones are reported, and two good states are always kept."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from smallvit.training.checkpoint import Checkpoints


def state(value: float, width: int = 3) -> dict[str, jax.Array]:
    return {"weights": jnp.full((width,), float(value)), "step": jnp.asarray(int(value))}


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, state(step), {"step": step})
    return checkpoints


def damage(folder: Path, step: int) -> None:
    """Flips one bit of the largest file."""
    files = [path for path in (folder / f"{step:09d}").rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_damaged_state_is_set_aside_and_the_next_ones_are_kept(tmp_path: Path):
    folder, said = tmp_path / "checkpoints", []
    checkpoints = saved(folder, 10, 20)
    damage(folder, 20)
    found = checkpoints.restore(state(0), said.append)
    assert found is not None
    assert found[1] == {"step": 10}
    assert float(found[0]["weights"][0]) == 10
    assert len(said) == 1
    assert "000000020 is damaged" in said[0]
    assert "set-aside-000000020" in names(folder)
    # These have lower numbers than the broken one.
    checkpoints.save(11, state(11), {"step": 11})
    checkpoints.save(12, state(12), {"step": 12})
    assert [name for name in names(folder) if name.endswith(".json") and name[0] == "0"] == [
        "000000011.json",
        "000000012.json",
    ]
    found = checkpoints.restore(state(0), said.append)
    assert found is not None
    assert found[1] == {"step": 12}
    assert len(said) == 1


def test_nothing_that_can_be_loaded_is_an_error_and_changes_nothing(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    checkpoints = saved(folder, 10, 20)
    damage(folder, 10)
    damage(folder, 20)
    before = names(folder)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no checkpoint in .* can be loaded .*--from-scratch"):
            checkpoints.restore(state(0), print)
        assert names(folder) == before
    assert checkpoints.restore(state(0), print, from_scratch=True) is None
    assert [name for name in names(folder) if not name.startswith("set-aside-")] == []
    assert checkpoints.restore(state(0), print) is None  # a kill before the first new state: not asked again


def test_another_structure_is_not_called_damage(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    checkpoints = saved(folder, 10)
    before = names(folder)
    with pytest.raises(
        ValueError, match=r"another model or optimiser .*'weights'.*float32\[3\] in the .*float32\[4\] in this run"
    ):
        checkpoints.restore(state(0, width=4), print)
    with pytest.raises(ValueError, match=r"'more'.* is missing in the checkpoint"):
        checkpoints.restore({**state(0), "more": jnp.zeros(2)}, print)
    assert names(folder) == before


def test_what_killed_saves_left_is_removed(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    checkpoints = saved(folder, 10, 20)
    for name in ("000000030", "000000030.orbax-checkpoint-tmp-7", "000000020.orbax-checkpoint-tmp"):
        (folder / name).mkdir()
        (folder / name / "part").write_bytes(b"half")
    (folder / ".000000030.json.x.tmp").write_text("{")
    found = checkpoints.restore(state(0), print)
    assert found is not None
    assert found[1] == {"step": 20}
    assert names(folder) == ["000000010", "000000010.json", "000000020", "000000020.json"]
