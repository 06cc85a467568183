"""The command line, run like a user does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from smallvit import __version__, cli, kernels
from smallvit.common.env import fast_env
from smallvit.doctor import examine

ENV = {**os.environ, "SMALLVIT_FAST_ENV": "0"}


def smallvit(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smallvit", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_models_lists_size_and_cost():
    run = smallvit("models", "vit_small_data", "--num-classes", "200", "--image-size", "64")
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("vit_small_data"))
    assert line.split() == ["vit_small_data", "arXiv", "2010.11929", "64x64", "2,756,744", "190", "M"]


@pytest.mark.skipif(os.name == "nt", reason="no such shell")
def test_closed_streams_do_not_matter(tmp_path: Path):
    """What is printed to a closed stream must not end up in a file that was opened later."""
    command = [sys.executable, "-m", "smallvit", "models", "vit_tiny*"]
    run = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    code = """
import os, sys
from smallvit import __main__
sys.argv = ["smallvit", "--version"]
__main__.main()
with open(os.environ["OPENED"], "w") as file:
    os.write(1, b"printed")
    os.write(2, b"printed")
    file.write(str(file.fileno()))
"""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, env={**ENV, "OPENED": str(tmp_path / "opened")}, timeout=60).returncode == 0
    assert int((tmp_path / "opened").read_text()) > 2


def test_models_is_immediate():
    """It shows stored figures: nothing that computes is imported."""
    code = """
import sys
from smallvit.cli import main
sys.argv = ["smallvit", "models", "*vit_tiny_patch16"]
main()
assert not {"jax", "flax"} & sys.modules.keys()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENV)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[1].split()[:5] == ["vit_tiny_patch16", "arXiv", "2010.11929", "224x224", "5,717,416"]


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["trian"], ["train", "--batchsize", "3"], ["train", "--help"]]
)
def test_no_command_waits_for_what_it_does_not_need(args: list[str]):
    code = f"""
import sys
from smallvit.cli import main
sys.argv = ["smallvit", *{args}]
try:
    main()
except SystemExit as ended:
    print("code", ended.code)
assert not {{"jax", "flax", "orbax", "matplotlib"}} & sys.modules.keys()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENV)
    assert run.returncode == 0, run.stderr
    printed = {
        "--help": "evaluate",
        "--version": f"smallvit {__version__}",
        "trian": "did you mean 'train'? `smallvit --help` lists all commands",
    }.get(args[0], "--batch-size")
    assert printed in run.stdout + run.stderr
    assert ("─ recipe options ─" in run.stdout) == (args == ["train", "--help"])
    assert ("code 2" in run.stdout) == (args[0] == "trian" or "--batchsize" in args)


@pytest.mark.parametrize("name", ["train", "explain"])
def test_checkpoints_and_pictures_wait_for_their_libraries(name: str):
    code = f"import sys, smallvit; smallvit.{name}; assert not {{'orbax', 'matplotlib'}} & sys.modules.keys()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENV)
    assert run.returncode == 0, run.stderr


def test_the_process_restarts_once_with_the_memory_settings():
    if not fast_env():
        pytest.skip("the settings are for glibc")
    code = "import os, sys; from smallvit.common.env import restart_fast; print(len(sys.modules)); restart_fast(); "
    code += "print(os.environ['GLIBC_TUNABLES'])"
    env = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "SMALLVIT_FAST_ENV")}
    run = subprocess.run([sys.executable, "-uc", code], capture_output=True, text=True, timeout=60, env=env)
    first, second, settings = run.stdout.splitlines()
    assert first == second  # one restart, and nothing more is loaded the second time
    assert settings == fast_env()["GLIBC_TUNABLES"]


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


@pytest.mark.parametrize(
    ("args", "said"),
    {
        "train --lrr 3": "unknown --lrr, 3, did you mean --lr? `smallvit train --help` lists the options",
        "train --recipe papre": "--recipe takes one of 'default', 'finetune', 'keras', 'paper', not 'papre'",
        "train --batch-size many": "--batch-size takes INT, not 'many'",
        "train --image-size 3 a 5": "--image-size takes INT or INT INT, not '3' 'a' '5'",
        "train --learning-rate": "--lr/--learning-rate needs a value",
        "evaluate run --batch-size many": "--batch-size: invalid literal for int() with base 10: 'many'",
        "export run --format onnx --quantize int4": "--quantize takes 'int8', not 'int4'",
        "predict": "RUN is missing",
        "export run": "--format is missing",
        "train photos more": "unknown more:",
    }.items(),
)
def test_wrong_arguments_get_one_line(
    args: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["smallvit", *args.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr().err
    assert end.value.code == 2
    assert printed.startswith(f"smallvit: {said}")
    assert printed.count("\n") == 1
