"""Image sizes that a model accepts."""

from collections.abc import Callable


def fitting_size(try_out: Callable[[tuple[int, int]], object], size: tuple[int, int]) -> tuple[int, int]:
    """The size itself, or its sides rounded to multiples of the smallest power of two that the model accepts.

    `try_out` creates the model for a size, and raises a ValueError if it does not fit. If none fits, raises the first.
    """
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
