"""Progressive resizing: a run starts with smaller images, which take less time, and ends with whole ones."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smallvit.layers import Classifier, abstract_variables, resample_positions
from smallvit.ops import pair

FROM = 28  # pixels per side: smaller images are left as they are


class Phase(NamedTuple):
    share: float  # of the steps of a run
    until: float  # progress of the run
    side: float  # of an image, relative to a whole one
    cost: float  # of a step, relative to one on whole images; measured with HybridViT on a CPU


def phases(progressive: float) -> tuple[Phase, ...]:
    """The phases of a run of which this fraction is on smaller images."""
    last = Phase(1 - progressive, 1.0, 1.0, 1.0)
    if not progressive:
        return (last,)
    first = Phase(0.4 * progressive, 0.4 * progressive, 0.5, 0.27)
    return first, Phase(0.6 * progressive, progressive, 0.75, 0.65), last


def mean_cost(progressive: float) -> float:
    """The mean cost of a step over the whole run."""
    return sum(phase.share * phase.cost for phase in phases(progressive))


def smaller(model: Classifier, size: tuple[int, int], channels: int, side: float) -> Classifier:
    """Returns the model for images of a part of the size, with the same weights except for its positions."""

    def image(size: tuple[int, int]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *size, channels), jnp.float32)

    height, width = (4 * round(side * whole / 4) for whole in size)
    small = model.clone(image_size=(height, width))
    try:
        if min(size) < FROM:
            raise ValueError(f"images of {size[0]} x {size[1]} pixels are small already")
        variables = abstract_variables(model, image(size))  # type: ignore[arg-type], flax adds the hash
        jax.eval_shape(lambda variables: resample_positions(variables, small, image((height, width))), variables)
    except ValueError as error:
        raise ValueError(f"{error}; --progressive makes images smaller: leave it out") from None
    return small


def shrink(images: Float[Array, "b H W c"], small: Classifier) -> Float[Array, "b h w c"]:
    """Resizes images to those of a model for smaller ones; each pixel becomes an average over an area."""
    height, width = pair(small.image_size)
    return jax.image.resize(images, (len(images), height, width, images.shape[-1]), "linear")
