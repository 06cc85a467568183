"""The command line, run as a user does."""

import re
import subprocess
import sys

import jax
import pytest

from smallvit import kernels
from smallvit.doctor import examine


def smallvit(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smallvit.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_models_lists_size_and_cost():
    run = smallvit("models", "vit_small_data", "--num-classes", "200", "--image-size", "64")
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("vit_small_data"))
    assert line.split() == ["vit_small_data", "arXiv", "2010.11929", "64x64", "2,756,744", "190", "M", "yes", "yes"]


def test_doctor_examines_and_tests_itself():
    run = smallvit("doctor")
    assert run.returncode == 0, run.stderr
    found = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in run.stdout.splitlines())
    assert found["packages"].startswith(f"jax {jax.__version__}")
    assert found["devices"].startswith("1 x cpu")
    assert ("self-test" in found) == kernels.usable()


def test_doctor_says_when_kernels_are_wrong(monkeypatch: pytest.MonkeyPatch):
    right = kernels.layer_norm
    monkeypatch.setattr(kernels, "layer_norm", lambda x, *args: right(x, *args) * 1.01)
    wrong = [each for each in examine() if each.wrong]
    assert [each.what for each in wrong] == (["self-test"] if kernels.usable() else [])


def test_no_match_is_one_line():
    run = smallvit("models", "resnet*")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == "smallvit: no model matches 'resnet*': `smallvit models` lists them all\n"
