"""Recipes: values that define how to train. Time, data and model are the user's choice."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from smallvit.augment import Augment

Optimiser = Literal["adamw", "muon"]
Schedule = Literal["linear", "cosine", "constant"]
Freeze = Literal["none", "backbone"]


@dataclass(frozen=True)
class Recipe:
    learning_rate: float  # peak, of AdamW
    weight_decay: float  # each step subtracts weight_decay x learning_rate x schedule of the weights, as in AdamW
    batch_size: int = 128
    optimiser: Optimiser = "adamw"
    matrix_rate: float = 0.02  # peak learning rate of the matrices that Muon trains; AdamW trains the rest
    schedule: Schedule = "cosine"  # after the warm-up
    warmup: float = 0.1  # fraction of all steps with a linearly growing rate
    floor: float = 0.0  # learning rate at the start and end of a schedule
    decay_all: bool = False  # weight decay on every parameter, not only on the kernels
    clip: float = 0.0  # maximum norm of the gradient; 0 turns clipping off
    ema: float = 0.0  # horizon of the moving average of the weights, as a fraction of all steps; the average is saved
    passes: int = 1  # passes through the data per epoch
    repeats: int = 1  # copies of each image in a row in a batch, each augmented differently
    freeze: Freeze = "none"  # "backbone": only the head is trained
    layer_decay: float = 1.0  # factor of the learning rate from a block to the one before it
    balance: bool = False  # weight the classes so that each counts the same
    progressive: float = 0.0  # fraction of all steps, from the first on, on smaller images
    epochs: float | None = None  # default; None is as many as fit into five minutes
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        positive = ("learning_rate", "matrix_rate", "batch_size", "passes", "repeats")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("weight_decay", "clip", "floor"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("warmup", "ema", "progressive"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay={self.layer_decay} must be above 0 and at most 1; 1 turns it off")
        for name, known in (("freeze", Freeze), ("optimiser", Optimiser), ("schedule", Schedule)):
            if (value := getattr(self, name)) not in get_args(known):
                raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(get_args(known))}")
        if self.batch_size % self.repeats:
            raise ValueError(f"batch_size={self.batch_size} must be divisible by repeats={self.repeats}")


RECIPES: dict[str, Recipe] = {
    # For the best accuracy in the user's time. `make train`: five minutes on two cores, 92 % of the embedded set. Six
    # minutes of one core (benchmarks.accuracy): 2.2 to 5.8 points ahead of a narrow ResNet-9 on three sets
    # (docs/results.md). The plan of a run adds augmentation and progressive resizing.
    "default": Recipe(
        learning_rate=2e-3,
        weight_decay=2.0,  # subtracts 0.004 of a weight per step at the peak
        optimiser="muon",
        schedule="linear",
        batch_size=64,
        ema=0.03,
        clip=1.0,
        augment=Augment(flip=True, crop_padding=0.125, label_smoothing=0.1),
    ),
    # From trained weights: blocks near the image change less than those near the head.
    "finetune": Recipe(
        learning_rate=2e-3,
        weight_decay=0.05,
        batch_size=64,
        layer_decay=0.75,
        ema=0.03,
        clip=1.0,
        augment=Augment(flip=True, crop_padding=0.125, label_smoothing=0.1),
    ),
    # Lee et al., https://arxiv.org/abs/2112.13492. The rate is that of their ViT; their other models use 0.001. The
    # three repetitions in their code are three shuffled passes per epoch. Known data sets use the policy found on them.
    # `smallvit compare FOLDER --models sl_vit_tiny_data --recipes default,paper --minutes 3`: 41.3 % on CIFAR-10,
    # 50.0 % with `default`: this recipe is made for its 100 epochs, not for minutes.
    "paper": Recipe(
        learning_rate=3e-3,
        weight_decay=0.05,
        floor=1e-6,
        decay_all=True,
        passes=3,
        epochs=100.0,
        augment=Augment(
            flip=True,
            crop_padding=4,
            policy="imagenet",
            erasing=0.25,
            mixup=0.25,
            cutmix=0.25,
            label_smoothing=0.1,
            fill="black",
        ),
    ),
    # The model card of the Keras example. Its text says cosine, but its code trains at a constant rate, as we do. Its
    # optimiser subtracts 1e-4 of the weights per step at any rate, which is 0.1 x rate here.
    "keras": Recipe(
        learning_rate=1e-3,
        weight_decay=0.1,
        batch_size=256,
        schedule="constant",
        decay_all=True,
        epochs=50.0,
        augment=Augment(flip=True, rotation=0.02, zoom=0.2),
    ),
}
