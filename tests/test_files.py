"""Files that survive a crash, a strict umask and a user without a home."""

import os
import time
from pathlib import Path

import pytest

from smallvit.common import files
from smallvit.common.files import user_cache, write_bytes
from smallvit.runs.folder import check_name, create_run, locked, open_run
from smallvit.training import comparison
from smallvit.training.config import TrainConfig
from smallvit.training.options import RunOptions


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_the_umask_counts(umask: int, mode: int, tmp_path: Path):
    before = os.umask(umask)
    try:
        write_bytes(tmp_path / "file", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_the_folder_is_on_the_disk_after_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    sync = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write_bytes(tmp_path / "file", b"x")
    assert synced[0].endswith(".tmp")
    assert synced[1] == str(tmp_path)


def test_new_folders_are_on_the_disk_before_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", lambda folder: synced.append(folder))
    write_bytes(tmp_path / "a/b/file", b"x")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a/b"]
    write_bytes(tmp_path / "a/b/file", b"y")
    assert synced[3:] == [tmp_path / "a/b"]


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode there")
def test_a_run_folder_below_a_name_that_is_not_utf8_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    below = tmp_path / os.fsdecode(b"caf\xe9")
    run = create_run(tmp_path / "runs", "a", "default", {})
    below.mkdir()
    monkeypatch.chdir(below)
    with pytest.raises(ValueError, match="is not UTF-8, as checkpoints need"):
        check_name(Path("runs"), "a")
    run.rename(below / "a")
    with pytest.raises(ValueError, match="is not UTF-8, as checkpoints need"):
        open_run(Path("a"))


@pytest.mark.parametrize("content", ["{}", "[]", '{"config": 3}', '{"model": {}}'])
def test_a_folder_with_another_configuration_is_no_run(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="is not that of a run: give a run folder"):
        open_run(tmp_path)


def test_a_long_name_can_be_written(tmp_path: Path):
    write_bytes(tmp_path / ("x" * 255), b"x")
    assert [len(path.name) for path in tmp_path.iterdir()] == [255]


def test_a_kill_while_a_run_folder_is_made_is_in_nobody_s_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt  # like a kill, no clean-up of ours takes it

    with monkeypatch.context() as patched:
        patched.setattr("smallvit.runs.folder.write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            create_run(tmp_path, "model-0", "default", {})
    check_name(tmp_path, "model-0")  # there is none yet
    (tmp_path / "model-0").mkdir()  # an empty one is none either
    started: list[TrainConfig] = []
    monkeypatch.setattr(comparison, "train", lambda config: started.append(config) or {})
    comparison._run(TrainConfig(run=RunOptions(runs=tmp_path, name="model-0")))
    assert started[0].resume is None
    assert create_run(tmp_path, "model-0", "default", {"a": 1}) == tmp_path / "model-0"
    comparison._run(TrainConfig(run=RunOptions(runs=tmp_path, name="model-0")))
    assert started[1].resume == tmp_path / "model-0"


def test_what_a_killed_process_left_is_removed_with_the_lock(tmp_path: Path):
    (tmp_path / "model").mkdir()
    for name in (".plan.json.0123.tmp", "model/.model.safetensors.0123.tmp", "model/config.json"):
        (tmp_path / name).write_text("")
    with locked(tmp_path):
        assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "config.json", "model"]


def test_a_user_without_home_and_passwd_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    folder = user_cache()
    assert folder == tmp_path / f"smallvit-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    # What others can write to may hold their programs.
    folder.chmod(0o777)
    assert user_cache() != folder


def test_what_was_left_while_making_run_folders_goes_after_a_day(tmp_path: Path):
    for name, age in ((".old.0123.tmp", 100_000), (".new.0123.tmp", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    create_run(tmp_path, "run", "default", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.0123.tmp", "run"]
