"""Where the time of a step goes: milliseconds by kind of operation, as XLA's profiler sees them.

    .venv-peers/bin/python -m benchmarks.profile swin_tiny --job train [--side pure] [--operations 20]

The steps are those of benchmarks.peers, and `whole_step` that of benchmarks.whole_step. Of each operation the faster
half of its runs counts. Operations may run side by side, each on a part of the cores: the sum is then more than the
time of a step.
"""

import argparse
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from benchmarks.peers import PEERS, sides
from benchmarks.whole_step import Ours

WHOLE = "whole_step"
STEPS = 8


def durations(folder: str) -> dict[str, list[float]]:
    """Milliseconds of each run of each operation in a trace."""
    found = defaultdict(list)
    for path in Path(folder).rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    operation = dict(event.stats).get("hlo_op")
                    if operation is not None:
                        found[str(operation)].append(event.duration_ns / 1e6)
    return found


def kinds(program: Any) -> dict[str, str]:
    """Names of our kernels by operation; XLA calls them all ffi_call."""
    calls = re.findall(r'%?(ffi_call[.\d]*) = .*?custom_call_target="smallvit_([^"]+)"', program.as_text())
    return dict(calls)


def largest(times: dict[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])[:count]


def prepare(args: argparse.Namespace) -> tuple[Callable[[], None], Any]:
    """Returns a step, and its compiled program."""
    if args.model == WHOLE:
        ours = Ours(size=32, batch=64)
        return lambda: ours.run(1), ours.program
    side = next(sides(args.model, args.dtype, [args.side]))
    run = getattr(side, args.job)
    run()  # compiles it
    return run, side.programs[args.job]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*PEERS, WHOLE])
    parser.add_argument("--job", choices=("train", "infer"), default="train")
    parser.add_argument("--side", choices=("kernels", "pure"), default="kernels")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--operations", type=int, default=0, help="also the slowest so many, one by one")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    run, program = prepare(args)
    for _ in range(3):
        run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                run()
        found = durations(folder)

    names = kinds(program)
    by_kind: dict[str, float] = defaultdict(float)
    by_operation: dict[str, float] = {}
    for operation, times in found.items():
        fast = sorted(times)[: max(1, len(times) // 2)]
        milliseconds = sum(fast) / len(fast) * len(times) / STEPS
        by_operation[operation] = milliseconds
        by_kind[names.get(operation, re.sub(r"[.\d]+$", "", operation))] += milliseconds
    print(f"{args.model}, {args.job}, {args.side}, {args.dtype}: {sum(by_kind.values()):.0f} ms of operations")
    for kind, milliseconds in largest(by_kind, 15):
        print(f"{milliseconds:9.1f}  {kind}")
    for operation, milliseconds in largest(by_operation, args.operations):
        print(f"{milliseconds:9.1f}  {operation} {names.get(operation, '')}")


if __name__ == "__main__":
    main()
