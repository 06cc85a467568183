"""Each test may choose an instruction set; the next one starts with the best."""

from collections.abc import Iterator

import pytest

from smallvit.kernels import library
from tests.kernels.checks import SETS


@pytest.fixture(autouse=True)
def best_set() -> Iterator[None]:
    yield
    if SETS:
        library.choose(SETS[0])
