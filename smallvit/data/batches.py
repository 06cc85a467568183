"""The order of the images: one endless stream with one permutation per epoch, cut into batches of equal size.

Each batch depends only on the seed and its step, so a resumed run sees exactly the batches it would have seen.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Int64


@lru_cache(maxsize=4)
def order(seed: int, epoch: int, n: int) -> Int64[np.ndarray, "n"]:
    permutation = np.random.default_rng((seed, epoch)).permutation(n)
    permutation.flags.writeable = False  # shared by all callers
    return permutation


def batch_indices(seed: int, step: int, batch_size: int, n: int, repeats: int = 1) -> Int64[np.ndarray, "b"]:
    """Returns the indices of batch `step`; a batch may span two epochs, so all batches are full.

    With `repeats`, each image appears that many times in a row and is augmented differently each time
    (https://arxiv.org/abs/1901.09335).
    """
    if min(batch_size, n, repeats) < 1 or step < 0:
        raise ValueError(f"no batch {step=} with {batch_size=}, {n=}, {repeats=}: a step is >= 0, the others >= 1")
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64) // repeats
    epochs = range(positions[0] // n, positions[-1] // n + 1)
    return np.concatenate([order(seed, epoch, n)[positions[positions // n == epoch] % n] for epoch in epochs])


def eval_batches(n: int, batch_size: int) -> Iterator[tuple[Int64[np.ndarray, "b"], Bool[np.ndarray, "b"]]]:
    """Yields each image once, in order; the last batch is padded with image 0, which the mask excludes."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    for start in range(0, n, batch_size):
        indices = np.arange(start, start + batch_size, dtype=np.int64)
        mask = indices < n
        yield np.where(mask, indices, 0), mask
