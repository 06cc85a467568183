"""The order of the images: one endless stream, one permutation an epoch, cut into batches of one size.

Any batch follows from the seed and its step alone, so a resumed run sees exactly what it would have seen.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Int64


@lru_cache(maxsize=4)
def order(seed: int, epoch: int, n: int) -> Int64[np.ndarray, "n"]:
    permutation = np.random.default_rng((seed, epoch)).permutation(n)
    permutation.flags.writeable = False  # it is shared by all who ask for this epoch
    return permutation


def batch_indices(seed: int, step: int, batch_size: int, n: int, repeats: int = 1) -> Int64[np.ndarray, "b"]:
    """The images of batch `step`, which may straddle two epochs: every epoch has every image, and no batch is short.

    With `repeats`, each image stands that many times in a row, to be augmented differently each time
    (https://arxiv.org/abs/1901.09335).
    """
    if min(batch_size, n, repeats) < 1 or step < 0:
        raise ValueError(f"no batch {step=} with {batch_size=}, {n=}, {repeats=}: a step is >= 0, the others >= 1")
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64) // repeats
    epochs = range(positions[0] // n, positions[-1] // n + 1)
    return np.concatenate([order(seed, epoch, n)[positions[positions // n == epoch] % n] for epoch in epochs])


def eval_batches(n: int, batch_size: int) -> Iterator[tuple[Int64[np.ndarray, "b"], Bool[np.ndarray, "b"]]]:
    """Each image once and in order. The last batch is filled up with image 0, which the mask says not to count."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    for start in range(0, n, batch_size):
        indices = np.arange(start, start + batch_size, dtype=np.int64)
        mask = indices < n
        yield np.where(mask, indices, 0), mask
