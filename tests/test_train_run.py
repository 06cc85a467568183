"""Whole runs, as a user starts them: their files, how they resume after a kill, many devices and processes."""

import csv
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from smallvit import kernels
from smallvit.evaluation import evaluate
from smallvit.runs.saved import from_pretrained
from smallvit.training.comparison import CompareConfig, variants
from tests.runs import QUICK, assert_same, checkpoints, command


@pytest.mark.xdist_group("train_run")
def test_what_a_run_leaves(reference: Path):
    result = json.loads((reference / "result.json").read_text())
    assert result["test_top1"] == 100
    assert result["val_top1"] == 100
    assert result["test_interval"] == [pytest.approx(60.97, abs=0.01), 100]  # of 6 images
    assert from_pretrained(reference).temperature == 1  # 6 validation images are too few to fit one
    assert (reference / "mistakes.csv").read_text() == "file,true_class,predicted_class,probability\n"
    assert result["epochs"] == pytest.approx(6, abs=0.3)
    assert result["images_per_second"] > 0
    assert result["parameters"] == sum(a.size for a in load_file(reference / "model/model.safetensors").values())
    for name in ("curves", "confusion", "worst-mistakes", "augmented", "attention"):
        with Image.open(reference / f"{name}.png") as image:
            assert min(image.size) > 100
    assert "<html" in (reference / "report.html").read_text()
    with (reference / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    config = json.loads((reference / "config.json").read_text())
    assert config["versions"]["jax"]
    assert config["config"]["epochs"] == 6
    printed = (reference.parent / "printed.txt").read_text()
    for text in (printed, (reference / "report.html").read_text()):
        assert "probabilities are not calibrated: there are 6 validation images, a temperature needs 50" in text
    assert "compiled in" in printed
    assert "to go" in printed
    assert printed.splitlines()[1:] == [line[21:] for line in (reference / "log.txt").read_text().splitlines()][1:]


@pytest.mark.xdist_group("train_run")
def test_a_run_without_test_images_is_calibrated_on_its_validation_images(env: dict[str, str], tmp_path: Path):
    draw = np.random.default_rng(0)
    labels = {"train": np.arange(96) % 3, "val": np.arange(60) % 3}
    images = {part: draw.integers(0, 256, (len(each), 12, 12, 3), np.uint8) for part, each in labels.items()}  # noise
    arrays = {f"{part}_images": images[part] for part in labels} | {f"{part}_labels": labels[part] for part in labels}
    np.savez(tmp_path / "noise.npz", **arrays)
    args = command(tmp_path / "noise.npz", *QUICK, "--epochs", 2, "--runs", tmp_path, "--name", "noise")
    done = subprocess.run(args, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "noise"
    result = json.loads((folder / "result.json").read_text())
    assert (result["test_top1"], result["test_interval"]) == (None, None)
    low, high = result["val_interval"]
    assert low < result["val_top1"] < high
    assert f"warning: only 60 validation images: the true accuracy is somewhere between {low:.0f} and" in done.stdout
    saved = from_pretrained(folder)
    assert saved.calibration.images == 60
    assert saved.temperature > 1  # nothing can be known of noise
    assert "so the calibration error after it is optimistic" in (folder / "report.html").read_text()
    assert "not calibrated" not in done.stdout
    wrong = round(60 * (1 - result["val_top1"] / 100))
    assert len((folder / "mistakes.csv").read_text().splitlines()) == 1 + wrong


@pytest.mark.xdist_group("train_run")
def test_a_model_that_cannot_be_explained_has_a_report(photos: Path, env: dict[str, str], tmp_path: Path):
    """Without blocks, the class token is all that the prediction depends on. Nor are there kernels, which is said."""
    args = command(photos, *QUICK, "--fields", "depth=0", "--epochs", 1, "--runs", tmp_path, "--name", "blind")
    slow = {**env, kernels.VARIABLE: "0"}
    done = subprocess.run(args, env=slow, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "switched off by SMALLVIT_KERNELS=0: with them, the default model trains about twice as fast" in done.stdout
    assert "no attention.png: no part of ViT has a grid of tokens" in done.stdout
    assert not (tmp_path / "blind/attention.png").exists()
    assert "<html" in (tmp_path / "blind/report.html").read_text()


@pytest.mark.xdist_group("train_run")
def test_all_images_are_trained_on_but_those_of_the_test(photos: Path, env: dict[str, str], tmp_path: Path):
    args = command(photos, *QUICK, "--epochs", 2, "--all-images", "--runs", tmp_path, "--name", "all")
    done = subprocess.run(args, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "also training on the 6 validation images: only the test images are held out" in done.stdout
    assert ("not in use" in done.stdout) == (kernels.status().instruction_set is None)
    result = json.loads((tmp_path / "all/result.json").read_text())
    assert (result["kept_epoch"], result["steps"]) == (result["epochs"], 9)  # two epochs of 66, in 16s
    assert from_pretrained(tmp_path / "all").calibration.images == 0
    assert "probabilities are not calibrated: the validation images were trained on" in done.stdout
    evaluation = evaluate(tmp_path / "all")
    assert (evaluation.part, len(evaluation.split)) == ("test", 6)
    assert not [note for note in evaluation.notes if "changed" in note]


@pytest.mark.xdist_group("train_run")
def test_a_finished_run_is_left_alone(reference: Path, env: dict[str, str], photos: Path):
    before = (reference / "result.json").read_bytes()
    for args in (["--resume", reference], [photos, "--runs", reference.parent, "--name", "whole"]):
        run = subprocess.run(command(*args), env=env, capture_output=True, text=True, timeout=120)
        assert run.returncode == 2
        assert run.stderr.count("\n") == 1
        assert "Traceback" not in run.stderr
    assert (reference / "result.json").read_bytes() == before


KILLS: dict[str, Callable[[Path], bool]] = {
    "before the first step": lambda run: (run / "plan.json").exists(),
    "while a checkpoint is written": lambda run: (
        len(checkpoints(run)) > 0
        and any(path.is_dir() and not path.with_suffix(".json").exists() for path in (run / "checkpoints").iterdir())
    ),
    "in the middle": lambda run: bool(checkpoints(run)) and int(checkpoints(run)[-1].stem) > 12,
    "when the model was written": lambda run: (run / "model/model.safetensors").exists(),
}


@pytest.mark.xdist_group("train_run")
@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_run_goes_on_to_the_same_weights(
    moment: str, reference: Path, photos: Path, env: dict[str, str], tmp_path: Path
):
    args = [photos, *QUICK, "--runs", tmp_path, "--name", "killed", "--image-size", 12, "--checkpoint-seconds", 0]
    folder = tmp_path / "killed"
    with subprocess.Popen(command(*args), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        deadline = time.monotonic() + 200
        while not (folder.exists() and _true(KILLS[moment], folder)):
            assert run.poll() is None, run.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        run.send_signal(signal.SIGKILL)
    assert not (folder / "result.json").exists()

    again = subprocess.run(command("--resume", folder), env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert_same(folder, reference)


def _true(condition: Callable[[Path], bool], folder: Path) -> bool:
    try:
        return condition(folder)
    except FileNotFoundError:  # it was just renamed
        return False


@pytest.mark.xdist_group("train_run")
def test_stopping_politely_damage_and_going_on(reference: Path, photos: Path, env: dict[str, str], tmp_path: Path):
    args = [photos, *QUICK, "--runs", tmp_path, "--name", "stopped", "--image-size", 12, "--checkpoint-seconds", 0]
    folder = tmp_path / "stopped"
    with subprocess.Popen(command(*args), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 200
        while not (folder.exists() and len(checkpoints(folder)) == 2):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        run.send_signal(signal.SIGINT)
        assert run.stderr is not None
        *_, message = run.stderr.read().splitlines()
    assert run.returncode == 75
    assert message.startswith("smallvit: stopped at step ")
    assert f"smallvit train --resume {folder}" in message

    newest = checkpoints(folder)[-1].with_suffix("")
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])
    again = subprocess.run(command("--resume", folder), env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert f"checkpoint {newest.name} is damaged" in again.stdout
    assert_same(folder, reference)


STOPS: dict[str, tuple[Callable[[Path], bool], str]] = {
    "while it compiles": (lambda folder: True, "stopped before there was a run folder: start it again"),
    "in pictures and report": (lambda folder: (folder / "confusion.png").exists(), "stopped after the last step: "),
}


@pytest.mark.xdist_group("train_run")
@pytest.mark.parametrize("moment", STOPS)
def test_a_signal_before_or_after_the_steps(
    moment: str, reference: Path, photos: Path, env: dict[str, str], tmp_path: Path
):
    condition, message = STOPS[moment]
    args = [photos, *QUICK, "--runs", tmp_path, "--name", "stopped", "--image-size", 12]
    folder = tmp_path / "stopped"
    with subprocess.Popen(command(*args), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        run.stdout.readline()  # what it has read
        while not condition(folder):
            assert run.poll() is None
            time.sleep(0.001)
        run.send_signal(signal.SIGTERM)
        _, printed = run.communicate(timeout=200)
    assert run.returncode == 75, printed
    *_, line = printed.splitlines()  # after those on reading
    assert "Traceback" not in printed
    assert line.startswith(f"smallvit: {message}")
    assert not (folder / "result.json").exists()

    if folder.exists():
        assert f"smallvit train --resume {folder}" in line
        again = subprocess.run(command("--resume", folder), env=env, capture_output=True, text=True, timeout=300)
        assert again.returncode == 0, again.stderr
        assert_same(folder, reference)


def losses(folder: Path) -> np.ndarray:
    with (folder / "metrics.csv").open() as file:
        return np.array([[float(row["train_loss"]), float(row["val_loss"])] for row in csv.DictReader(file)])


def on_devices(env: dict[str, str], number: int) -> dict[str, str]:
    return {**env, "XLA_FLAGS": f"--xla_force_host_platform_device_count={number}"}


def _meeting(address: str, process: int) -> list[object]:
    return ["--coordinator", address, "--num-processes", 2, "--process-id", process]


@pytest.mark.xdist_group("train_run")
def test_many_devices_and_processes_train_the_same_model(
    reference: Path, photos: Path, env: dict[str, str], tmp_path: Path
):
    args = [photos, *QUICK, "--runs", tmp_path, "--image-size", 12]
    one = subprocess.run(
        command(*args, "--name", "eight", "--mesh", "data=4,fsdp=2"),
        env=on_devices(env, 8),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert one.returncode == 0, one.stderr
    np.testing.assert_allclose(losses(tmp_path / "eight"), losses(reference), atol=2e-5)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    together = [
        subprocess.Popen(
            command(
                *args, *("--name", "two", "--mesh", "data=4,fsdp=2", "--checkpoint-seconds", 0), *_meeting(address, i)
            ),
            env=on_devices(env, 4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    printed = [process.communicate(timeout=300) for process in together]
    assert [process.returncode for process in together] == [0, 0], printed
    # Only the first speaks. What connects them has a line for each device, and their threads may mix the parts of it.
    parts = r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : |\d+|\s"
    assert re.sub(parts, "", printed[1][0]) == "", printed[1][0]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(reference), atol=2e-5)

    # What two processes wrote, one device goes on with: the last epoch anew.
    folder = tmp_path / "two"
    (folder / "result.json").unlink()
    shutil.rmtree(checkpoints(folder)[-1].with_suffix(""))
    checkpoints(folder)[-1].unlink()
    again = subprocess.run(command("--resume", folder), env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "resuming at step" in again.stdout
    np.testing.assert_allclose(losses(folder), losses(reference), atol=2e-5)


@pytest.mark.xdist_group("train_run")
def test_a_comparison_is_a_table_and_goes_on(photos: Path, env: dict[str, str], tmp_path: Path):
    out = tmp_path / "out"
    ask = [sys.executable, "-m", "smallvit", "compare", str(photos), "--image-size", "12", "--out", str(out)]
    ask += ["--fields", "dim=16", "depth=1", "heads=2", "mlp_dim=16", "--batch-size", "16", "--seeds", "1"]
    first = subprocess.run([*ask, "--epochs", "1"], env=env, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    with (out / "table.csv").open() as file:
        plain, both = csv.DictReader(file)
    assert (plain["model"], both["model"]) == ("vit_tiny_data", "sl_vit_tiny_data")
    # Patches of 3 x 3 with 3 channels, from four more copies, a LayerNorm over all five, two temperatures.
    assert int(both["parameters"]) - int(plain["parameters"]) == 4 * 27 * 16 + 2 * 5 * 27 + 2
    assert int(both["multiply_adds"]) - int(plain["multiply_adds"]) == 16 * 4 * 27 * 16
    assert "| sl_vit_tiny_data |" in first.stdout
    with Image.open(out / "table.png") as image:
        assert image.width > 300

    shutil.rmtree(out / "runs/sl_vit_tiny_data-0")
    kept = (out / "runs/vit_tiny_data-0/result.json").stat().st_mtime_ns
    again = subprocess.run([*ask, "--epochs", "1"], env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert (out / "runs/vit_tiny_data-0/result.json").stat().st_mtime_ns == kept
    with (out / "table.csv").open() as file:
        assert [row["scores"] for row in csv.DictReader(file)] == [plain["scores"], both["scores"]]

    other = subprocess.run([*ask, "--epochs", "2"], env=env, capture_output=True, text=True, timeout=300)
    assert other.returncode == 2
    assert other.stderr == f"smallvit: {out} holds another comparison: choose another --out\n"


def test_ablations_take_models_apart():
    def parts(models: str, ablation: Literal["spt-lsa", "lsa"]) -> dict[str, tuple[str, tuple[str, ...]]]:
        return {
            each.name: (each.model, each.fields) for each in variants(CompareConfig(models=models, ablation=ablation))
        }

    rows = parts("sl_vit_small_data", "spt-lsa")
    assert list(rows) == ["plain", "SPT", "LSA", "SPT and LSA"]
    assert rows["SPT and LSA"] == ("vit_small_data", ("spt=true", "lsa=true"))
    rows = parts("vit_small_data,sl_vit_small_data,pit_tiny_data", "lsa")
    assert list(rows) == [
        f"{model} {part}"
        for model in ("vit_small_data", "pit_tiny_data")
        for part in ("plain", "temperature", "mask", "LSA")
    ]
    assert rows["pit_tiny_data mask"] == ("pit_tiny_data", ("lsa=mask",))
    shift = variants(CompareConfig(models="vit_small_data", ablation="shift", image_size=32))
    assert [each.name for each in shift] == [
        "diagonal, half a patch",
        "cardinal, half a patch",
        "all, half a patch",
        *(f"diagonal, {by} of 4 pixels" for by in (1, 2, 3, 4)),
    ]
    with pytest.raises(ValueError, match="needs --image-size"):
        CompareConfig(models="vit_small_data", ablation="shift")
