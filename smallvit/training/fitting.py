"""Image sizes that a model accepts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from smallvit.layers import Classifier


def fitting_size(
    create: Callable[[tuple[int, int]], Classifier], size: tuple[int, int], channels: int
) -> tuple[int, int]:
    """The size itself, or its sides rounded to multiples of the smallest power of two that the model accepts.

    If there is none, raises the model's own ValueError.
    """

    def try_out(size: tuple[int, int]) -> None:
        jax.eval_shape(create(size).init, jax.random.key(0), jnp.zeros((1, *size, channels)))

    try:
        try_out(size)
    except ValueError:
        for step in (2, 4, 8, 16, 32):
            height, width = (max(round(side / step), 1) * step for side in size)
            try:
                try_out((height, width))
            except ValueError:
                continue
            return height, width
        raise
    return size
