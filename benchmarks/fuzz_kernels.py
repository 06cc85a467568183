"""The native kernels on random shapes and types against plain JAX, for as long as one likes.

    python -m benchmarks.fuzz_kernels --minutes 10

It draws from the same ranges as the property tests in tests/kernels, which try a few fixed cases: values and
gradients, with every instruction set of this machine. CONTRIBUTING.md says how to run it under the sanitizers. A case
that fails is printed with the bytes that repeat it: --repeat NAME HEX.
"""

import argparse
import random
import sys
import time
from collections import Counter

import jax

from smallvit import kernels
from tests.kernels import test_attention, test_convolution, test_dense, test_update
from tests.kernels.checks import SETS

TESTS = {
    name.removeprefix("test_"): test
    for module in (test_attention, test_convolution, test_dense, test_update)
    for name, test in vars(module).items()
    if name.startswith("test_") and hasattr(test, "hypothesis")
}
FORGET = 100  # cases after which compiled programs are dropped, for each has shapes of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=None, help="of the draws; by default another each time")
    parser.add_argument("--only", choices=TESTS, nargs="+", default=list(TESTS))
    parser.add_argument("--repeat", nargs=2, metavar=("NAME", "HEX"))
    given = parser.parse_args()
    if kernels.status().instruction_set is None:
        sys.exit(f"there is nothing to test: {kernels.status()}")
    if given.repeat:
        TESTS[given.repeat[0]].hypothesis.fuzz_one_input(bytes.fromhex(given.repeat[1]))
        return
    draw, begun, done = random.Random(given.seed), time.monotonic(), Counter()
    print(f"{kernels.status()}; {', '.join(SETS)}", flush=True)
    while time.monotonic() - begun < 60 * given.minutes:
        name, content = draw.choice(given.only), draw.randbytes(256)
        try:
            # None: these bytes are no case, such as an image that is smaller than its window.
            if TESTS[name].hypothesis.fuzz_one_input(content) is not None:
                done[name] += 1
        except BaseException:
            print(f"python -m benchmarks.fuzz_kernels --repeat {name} {content.hex()}", flush=True)
            raise
        if sum(done.values()) % FORGET == 0:
            jax.clear_caches()
    print(f"{sum(done.values())} cases, all equal: {', '.join(f'{number} {name}' for name, number in done.items())}")


if __name__ == "__main__":
    main()
