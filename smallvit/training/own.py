"""The user's own loss, optimiser and augmentation functions, given from Python."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import optax
from jaxtyping import Array, Float, PRNGKeyArray

Loss = Callable[[Float[Array, "b k"], Float[Array, "b k"]], Float[Array, "b"]]
Optimiser = Callable[[float], optax.GradientTransformation]
Augmentation = Callable[[PRNGKeyArray, Array], Array]


@dataclass(frozen=True)
class Own:
    """Replacements for our functions; None keeps ours."""

    loss: Loss | None = None  # from logits and targets (probabilities) to the loss per image
    optimiser: Optimiser | None = None  # from the peak learning rate to an optax transformation, such as optax.lion
    augment: Augmentation | None = None  # from a key and uint8 images to images with levels from 0 to 255

    def __post_init__(self) -> None:
        for name, function in self._given().items():
            if not callable(function):
                raise ValueError(f"{name}={function!r} must be a function")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions, for config.json."""
        return tuple(f"{name}={_name(function)}" for name, function in self._given().items())

    def check(self, stored: tuple[str, ...], folder: object) -> None:
        """Raises a ValueError if a resumed run does not get the functions it was started with."""
        started = {text.partition("=")[0]: text for text in stored}
        given = self._given().keys()
        if missing := [text for name, text in started.items() if name not in given]:
            raise ValueError(
                f"{folder} was started with {', '.join(missing)}: resume it from Python, as in "
                f'smallvit.train(resume="{folder}", {", ".join(text.partition("=")[0] + "=..." for text in missing)})'
            )
        if others := [name for name in given if name not in started]:
            raise ValueError(f"{folder} was started without your own {', '.join(others)}: leave it out")

    def _given(self) -> dict[str, object]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: function for name, function in given.items() if function is not None}


def _name(function: object) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"
