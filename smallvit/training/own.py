"""A user's own loss, optimiser and augmentation: functions, given from Python."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import optax
from jaxtyping import Array, Float, PRNGKeyArray

Loss = Callable[[Float[Array, "b k"], Float[Array, "b k"]], Float[Array, "b"]]
Optimiser = Callable[[float], optax.GradientTransformation]
Augmentation = Callable[[PRNGKeyArray, Array], Array]


@dataclass(frozen=True)
class Own:
    """Each replaces ours; None leaves it."""

    loss: Loss | None = None  # from logits and targets, which are probabilities, to the loss of each image
    optimiser: Optimiser | None = None  # from the peak learning rate to optax's transformation, as optax.lion does
    augment: Augmentation | None = None  # from a key and uint8 images to images, of levels from 0 to 255

    def __post_init__(self) -> None:
        for name, function in self._given().items():
            if not callable(function):
                raise ValueError(f"{name}={function!r} must be a function")

    @property
    def names(self) -> tuple[str, ...]:
        """For config.json: which they are."""
        return tuple(f"{name}={_name(function)}" for name, function in self._given().items())

    def check(self, begun: tuple[str, ...], folder: object) -> None:
        """Raises if a resumed run does not get what it was started with."""
        started = {text.partition("=")[0]: text for text in begun}
        given = self._given().keys()
        if missing := [text for name, text in started.items() if name not in given]:
            raise ValueError(
                f"{folder} was started with {', '.join(missing)}: resume it from Python, as in "
                f'smallvit.train(resume="{folder}", {", ".join(each.partition("=")[0] + "=..." for each in missing)})'
            )
        if others := [name for name in given if name not in started]:
            raise ValueError(f"{folder} was started without a {', '.join(others)} of your own: leave it out")

    def _given(self) -> dict[str, object]:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: function for name, function in given.items() if function is not None}


def _name(function: object) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"
