"""Unfolding of the windows that a convolution reads, which makes it one matrix product."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smallvit.kernels.library import call, some, usable

Pair = tuple[int, int]


class Geometry(NamedTuple):
    images: tuple[int, ...]  # b h w c
    size: Pair
    stride: Pair
    padding: Pair

    def windows(self) -> tuple[int, ...]:
        """The shape of the unfolded windows, (b, i, j, p q c)."""
        (b, *sides, c), (tall, wide) = self.images, self.size
        axes = zip(sides, self.size, self.stride, self.padding, strict=True)
        steps = ((side + 2 * padding - size) // stride + 1 for side, size, stride, padding in axes)
        return b, *steps, tall * wide * c

    def back(self, result: tuple[int, ...]) -> "Geometry | None":
        """The geometry of the derivative, which is a convolution of `result` if the stride is 1; else None."""
        above, before = self.size[0] - 1 - self.padding[0], self.size[1] - 1 - self.padding[1]
        if self.stride != (1, 1) or min(above, before) < 0:
            return None
        return Geometry(result, self.size, (1, 1), (above, before))

    @classmethod
    def of(cls, x: Array, kernel: Array, stride: Pair, padding: Pair) -> "Geometry":
        return cls(x.shape, (kernel.shape[0], kernel.shape[1]), stride, padding)

    def attributes(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(getattr(self, name), np.int64) for name in ("size", "stride", "padding")}


def unfolds(x: Array, size: Pair, stride: Pair, padding: Pair) -> bool:
    """Whether `unfold` supports these."""
    return (
        usable()
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and x.ndim == 4
        and some(*x.shape)
        and some(*Geometry(x.shape, size, stride, padding).windows())
    )


def unfold(x: Float[Array, "b h w c"], size: Pair, stride: Pair, padding: Pair) -> Float[Array, "b i j d"]:
    """Returns the windows of the zero-padded grid at every stride, flattened row by row, channels fastest."""
    return _unfold(Geometry(x.shape, size, stride, padding), x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unfold(geometry: Geometry, x: Array) -> Array:
    return call("unfold", [jax.ShapeDtypeStruct(geometry.windows(), x.dtype)], x, **geometry.attributes())[0]


def fold(geometry: Geometry, windows: Float[Array, "b i j d"]) -> Float[Array, "b h w c"]:
    """Transpose of `unfold`: adds every window to the place where it was read."""
    return call("fold", [jax.ShapeDtypeStruct(geometry.images, windows.dtype)], windows, **geometry.attributes())[0]


_unfold.defvjp(lambda geometry, x: (_unfold(geometry, x), None), lambda geometry, _, dy: (fold(geometry, dy),))
