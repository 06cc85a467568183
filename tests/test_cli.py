"""The command line, run as a user does."""

import subprocess
import sys


def smallvit(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smallvit.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_models_lists_size_and_cost():
    run = smallvit("models", "vit_small_data", "--num-classes", "200", "--image-size", "64")
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("vit_small_data"))
    assert line.split() == ["vit_small_data", "arXiv", "2010.11929", "64x64", "2,756,744", "190", "M", "yes", "yes"]


def test_no_match_is_one_line():
    run = smallvit("models", "resnet*")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == "smallvit: no model matches 'resnet*': `smallvit models` lists them all\n"
