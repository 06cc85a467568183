"""Recipes: how to train, each a value. Time, data and model are the user's choice."""

from dataclasses import dataclass, field

from smallvit.augment import Augment


@dataclass(frozen=True)
class Recipe:
    learning_rate: float
    weight_decay: float
    batch_size: int = 128
    warmup: float = 0.1  # share of all steps in which the rate grows linearly, from `floor`
    floor: float = 1e-6  # the rate that the cosine ends at
    schedule: bool = True  # False: a constant rate
    decay_all: bool = False  # weight decay on every parameter, not on the kernels alone
    clip: float = 0.0  # largest norm of the gradient; 0 leaves it as it is
    ema: float = 0.0  # decay of the average of the weights, which is then what is evaluated and kept
    passes: int = 1  # how often an epoch goes through the data
    repeats: int = 1  # how often an image stands in a row in a batch, each time augmented anew
    balance: bool = False  # weigh the classes so that each counts the same
    epochs: float | None = None  # unless told otherwise; None: as many as fit into five minutes
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        positive = ("learning_rate", "batch_size", "passes", "repeats")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("weight_decay", "clip", "floor"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("warmup", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.batch_size % self.repeats:
            raise ValueError(f"batch_size={self.batch_size} must be divisible by repeats={self.repeats}")


RECIPES: dict[str, Recipe] = {
    # For the best accuracy in the minutes that a user has; docs/results.md has the comparison.
    "default": Recipe(
        learning_rate=2e-3,
        weight_decay=0.05,
        batch_size=64,
        ema=0.99,
        clip=1.0,
        augment=Augment(flip=True, crop_padding=2, label_smoothing=0.1),
    ),
    # Lee et al., https://arxiv.org/abs/2112.13492. The rate is their ViT's; their other models take 0.001. What their
    # code calls three repetitions are three shuffled passes an epoch.
    "paper": Recipe(
        learning_rate=3e-3,
        weight_decay=0.05,
        decay_all=True,
        passes=3,
        epochs=100.0,
        augment=Augment(
            flip=True, crop_padding=4, policy="cifar10", erasing=0.25, mixup=0.25, cutmix=0.25, label_smoothing=0.1
        ),
    ),
    # The model card of Keras' example; its text says cosine, its code trains at a constant rate, and so do we.
    "keras": Recipe(
        learning_rate=1e-3,
        weight_decay=1e-4,
        batch_size=256,
        schedule=False,
        decay_all=True,
        epochs=50.0,
        augment=Augment(flip=True, rotation=0.02, zoom=0.2),
    ),
}
