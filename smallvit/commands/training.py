"""`smallvit train` and `smallvit compare`."""

from typing import Annotated

import tyro

from smallvit.common.text import shown
from smallvit.training.config import CompareConfig, TrainConfig


def train(config: Annotated[TrainConfig, tyro.conf.arg(name="")]) -> None:
    """Train a model on a folder of images, from scratch or from trained weights."""
    from smallvit.training.keywords import train

    train(config)


def compare(config: Annotated[CompareConfig, tyro.conf.arg(name="")]) -> None:
    """Train several models with several seeds and print a table."""
    from smallvit.training.comparison import markdown
    from smallvit.training.keywords import compare

    table = compare(config)
    wrote = f"Wrote {config.out}/table.md, .csv and .png; the runs are in {config.out}/runs"
    print(f"\n{markdown(table)}\n{shown(wrote)}")
