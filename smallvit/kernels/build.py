"""Compiles the native kernels in place: python -m smallvit.kernels.build [--asan]

It also runs during installation, without the package's dependencies, so it only imports the standard library.
"""

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "native"
LIBRARY = HERE / "libsmallvit_kernels.so"

# contract: a * b + c in one instruction. No fast-math, which ignores NaN and infinity.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi")
_SETS: dict[str, tuple[str, ...]] = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
# Preload the sanitizer's library to run the tests; see CONTRIBUTING.md.
_ASAN = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")


class BuildError(Exception):
    """The build failed; one line says why."""


def build(target: Path = LIBRARY, *, asan: bool = False) -> Path:
    """Compiles the library to `target` and returns the path; raises a BuildError."""
    if os.name == "nt":
        raise BuildError("the kernels are for Linux and macOS")
    compiler, headers = _compiler(), _headers()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = (*_FLAGS, "-isystem", str(headers), *(_ASAN if asan else ()))
    with tempfile.TemporaryDirectory() as folder:
        jobs: list[tuple[str, str, tuple[str, ...]]] = [("bindings", "bindings.cpp", ())]
        for name, special in _SETS.items() if x86 else [("portable", ())]:
            names = (f"-DSMALLVIT_ISA={name}", f'-DSMALLVIT_NAME="{name}"')
            jobs.append((name, "kernels.cpp", (*special, *names)))
        objects = [str(Path(folder, f"{name}.o")) for name, _, _ in jobs]
        commands = [
            [*compiler, *flags, *special, "-c", str(SOURCES / source), "-o", to]
            for (_, source, special), to in zip(jobs, objects, strict=True)
        ]
        running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        errors = [process.communicate()[1] for process in running]
        _check(running, errors)
        # Built under a temporary name, then renamed: a process that uses the old library keeps it intact.
        new = target.with_name(f".{target.name}.{os.getpid()}")
        link = [*compiler, "-shared", *(_ASAN if asan else ()), *objects, "-o", str(new)]
        linking = subprocess.Popen(link, stderr=subprocess.PIPE, text=True)
        _check([linking], [linking.communicate()[1]])
        new.replace(target)
    return target


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "").split()
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler ({' '.join(named) or 'c++, g++, clang++'})")


def _headers() -> Path:
    found = importlib.util.find_spec("jaxlib")
    for folder in (found and found.submodule_search_locations) or ():
        if Path(folder, "include", "xla", "ffi", "api", "ffi.h").exists():
            return Path(folder, "include")
    raise BuildError("no jaxlib with XLA's headers")


def _check(processes: list[subprocess.Popen], errors: list[str]) -> None:
    for process, error in zip(processes, errors, strict=True):
        if process.returncode:
            lines = [line for line in error.splitlines() if "error" in line.lower()] or [f"exit {process.returncode}"]
            raise BuildError(f"the compiler failed: {lines[0].strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile smallvit's native kernels in place.")
    parser.add_argument("--asan", action="store_true", help="with the address and undefined behaviour sanitizers")
    try:
        print(build(asan=parser.parse_args().asan))
    except BuildError as error:
        sys.exit(f"smallvit's native kernels were not built: {error}")


if __name__ == "__main__":
    main()
