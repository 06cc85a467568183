"""Every module and a whole run without Unix-only features."""

import subprocess
import sys
from pathlib import Path

from tests.runs import QUICK

BLOCKED = """
import os, signal, sys, warnings
warnings.filterwarnings("ignore")  # the lock says that it is a soft one
for name in ("fcntl", "resource", "pwd", "grp", "termios", "syslog"):
    sys.modules[name] = None
for module, names in (
    (signal, ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGKILL")),
    (os, ("posix_fallocate", "getuid", "geteuid", "getpgid", "killpg", "fork", "sched_getaffinity")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""

IMPORTS = """
from importlib import import_module
from pathlib import Path
import smallvit
root = Path(smallvit.__file__).parent
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root.parent).with_suffix("").parts
    if parts[-1] != "__main__":
        import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
"""

TRAIN = """
from smallvit.cli import main
sys.argv = ["smallvit", "train", *ARGS]
main()
"""


def run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_every_module_is_imported(env: dict[str, str]):
    done = run(BLOCKED + IMPORTS, env)
    assert done.returncode == 0, done.stderr


def test_a_run_ends_in_a_report(photos: Path, env: dict[str, str], tmp_path: Path):
    args = [str(photos), *QUICK, "--epochs", "1", "--image-size", "12", "--runs", str(tmp_path), "--name", "a"]
    done = run(f"{BLOCKED}ARGS = {args!r}\n{TRAIN}", env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a/report.html").exists()
