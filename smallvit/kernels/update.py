"""The update of the weights: one call for all arrays, since XLA would compile several small kernels for each of them.

Every result may use the memory of an argument.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smallvit.kernels.library import call_whole, like, usable

Arrays = Sequence[Array]
Scalar = float | np.float32 | Float[Array, ""]


def takes_arrays(*lists: Arrays) -> bool:
    """Whether the functions of this module support these lists of arrays, which must not be sharded."""
    return usable() and all(x.dtype == jnp.float32 for arrays in lists for x in arrays)


def clip(arrays: Arrays, most: float) -> Arrays:
    """Scales the arrays such that their norm together is at most `most`."""
    return _call("clip", (), (arrays,), 1, most=np.float64(most))[0]


def weighted_sums(a: Scalar, xs: Arrays, b: Scalar, ys: Arrays) -> Arrays:
    """Returns a x + b y for each pair of arrays."""
    return _call("weighted_sums", (a, b), (xs, ys), 1)[0]


def adam(
    grads: Arrays,
    means: Arrays,
    squares: Arrays,
    corrections: tuple[Scalar, Scalar],
    decays: tuple[float, float],
    epsilon: float,
    rate: float,
) -> tuple[Arrays, Arrays, Arrays]:
    """Returns Adam's updates and the new means of gradients and squares, all of which `corrections` divide."""
    constants = dict(mean_decay=decays[0], square_decay=decays[1], epsilon=epsilon, rate=rate)
    updates, means, squares = _call(
        "adam", corrections, (grads, means, squares), 3, **{name: np.float64(each) for name, each in constants.items()}
    )
    return updates, means, squares


def muon(
    grads: Arrays,
    momentum: Arrays,
    corrections: tuple[Scalar, Scalar],
    decay: float,
    epsilon: float,
    rate: float,
    steps: int,
    coefficients: tuple[float, float, float],
) -> tuple[Arrays, Arrays]:
    """Returns Muon's updates and the new momentum; `corrections` divide gradients and momentum.

    An array is a matrix from all its other axes to the last one.
    """
    updates, momentum = _call(
        "muon",
        corrections,
        (grads, momentum),
        2,
        decay=np.float64(decay),
        epsilon=np.float64(epsilon),
        rate=np.float64(rate),
        steps=np.int64(steps),
        coefficients=np.asarray(coefficients, np.float64),
    )
    return updates, momentum


def _call(
    name: str,
    scalars: Sequence[Scalar],
    lists: Sequence[Arrays],
    returned: int,
    **attributes: np.float64 | np.int64 | np.ndarray,
) -> list[Arrays]:
    """Calls a handler; its results are lists like the first `returned` of `lists`, and use their memory."""
    length = len(lists[0])
    if not length:
        return [[]] * returned
    arrays = [x for each in lists for x in each]
    results = [like(x) for x in arrays[: returned * length]]
    overwrite = {len(scalars) + i: i for i in range(len(results))}
    scalars = [jnp.asarray(each, jnp.float32) for each in scalars]
    found = call_whole(name, results, [*scalars, *arrays], attributes, overwrite)
    return [found[i : i + length] for i in range(0, len(found), length)]
