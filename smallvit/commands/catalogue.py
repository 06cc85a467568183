"""`smallvit models`."""

from typing import Annotated

import tyro
from rich.table import Table

from smallvit.catalogue import catalogue
from smallvit.commands.terminal import open_console, with_progress
from smallvit.common.arguments import Int


def models(
    pattern: Annotated[str, tyro.conf.Positional] = "*",
    /,
    image_size: Int = None,
    num_classes: int = 1000,
) -> None:
    """List the models with paper, parameters and multiply-adds.

    Args:
        pattern: Names to list, as in "vit*".
        image_size: Count at this image size instead of each model's own.
        num_classes: Number of classes of the head.
    """
    entries = [entry for entry in catalogue(pattern) if pattern.startswith("sl_") or not entry.name.startswith("sl_")]
    if not entries:
        raise ValueError(f"no model matches {pattern!r}: `smallvit models` lists them all")
    if image_size is not None or num_classes != 1000:
        from smallvit.count import describe

        names = with_progress([entry.name for entry in entries], len(entries))
        entries = [describe(name, image_size=image_size, num_classes=num_classes) for name in names]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("name", "paper"):
        table.add_column(title, no_wrap=True)
    for title in ("image", "parameters", "multiply-adds"):
        table.add_column(title, justify="right", no_wrap=True)
    for entry in entries:
        paper = entry.paper.removeprefix("https://").replace("arxiv.org/abs/", "arXiv ")
        size, millions = "x".join(map(str, entry.image_size)), f"{entry.multiply_adds / 1e6:,.0f} M"
        table.add_row(entry.name, f"[link={entry.paper}]{paper}[/link]", size, f"{entry.parameters:,}", millions)
    console = open_console()
    console.print(table)
    if not pattern.startswith("sl_"):
        console.print("Every model also exists with SPT and LSA: put sl_ in front of its name.", style="dim")
