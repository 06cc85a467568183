"""`smallvit explain`."""

import sys

from smallvit.commands.terminal import new_table, open_console, plain, with_progress, with_standard_input
from smallvit.common.arguments import Device, Folder, Int, Paths, Run
from smallvit.common.env import prepare
from smallvit.common.text import shown


def explain(
    run: Run,
    paths: Paths = (),
    /,
    out: Folder = None,
    layer: Int = None,
    heads: bool = False,
    compare: Folder = None,
    temperatures: bool = False,
    receptive_field: bool = False,
    device: Device = None,
) -> None:
    """Draw what a model looks at: one picture per image with map, overlay and answer.

    Args:
        run: A run folder or its model/.
        paths: Files, folders with everything below them, or patterns such as "photos/*.jpg"; - reads an image from
            standard input.
        out: Folder for the pictures; by default RUN/explanations.
        layer: Show what this layer attends to, counted from 1, instead of the saliency of the whole model.
        heads: Also draw each head of that layer, or of the last one.
        compare: Another run, shown side by side.
        temperatures: Show how sharp and how local each layer's attention is: temperature, entropy and distance per
            head, on the given images or the run's own test images.
        receptive_field: Show the part of the image that one token sees before the first block.
        device: Kind of device to compute on.
    """
    from smallvit import plots
    from smallvit.common.files import check_folder
    from smallvit.data import find_images
    from smallvit.explanation import pictures
    from smallvit.runs.answers import Unreadable

    statistics = temperatures or receptive_field
    if not paths and not statistics:
        raise ValueError("nothing to explain: give images, --temperatures or --receptive-field")
    if statistics and (heads or layer is not None or "-" in paths):
        raise ValueError("--temperatures and --receptive-field cannot be combined with --heads, --layer or -")
    runs = [run] if compare is None else [run, compare]
    out = out or run / "explanations"
    check_folder(out)
    named = find_images([path for path in paths if path != "-"])
    prepare(device)
    console = open_console()
    if temperatures:
        by_model, figure = pictures.layer_statistics(runs, named)
        plots.save(figure, out / "temperatures.png")
        for name, rows in by_model.items():
            table = new_table(name, "temperature per head", "sqrt(d)", "entropy", "max entropy", "distance")
            for row in rows:
                learned = row.temperature
                table.add_row(
                    row.path.removesuffix("/attend"),
                    "-" if learned is None else " ".join(f"{value:.2f}" for value in learned),
                    f"{row.initial:.2f}",
                    f"{row.entropy.mean():.2f}",
                    f"{row.even:.2f}",
                    "-" if row.distance is None else f"{row.distance.mean():.2f}",
                )
            console.print(table)
        console.print(plain(f"Wrote {out / 'temperatures.png'}"))
    if receptive_field:
        fields, figure = pictures.receptive_fields(runs, named)
        plots.save(figure, out / "receptive-field.png")
        for name, field in fields.items():
            console.print(plain(f"{name}: one token sees {pictures.describe(field)}"))
        console.print(plain(f"Wrote {out / 'receptive-field.png'}"))
    if statistics:
        return

    explainer = pictures.Explainer(runs, layer=layer, heads=heads)
    files = with_standard_input(named, paths)
    table, unreadable = new_table("picture", *explainer.models), 0
    for picture, explained in with_progress(pictures.draw_explanations(explainer, files, out), len(files)):
        if isinstance(explained, Unreadable):
            unreadable += 1
            print(f"smallvit: {shown(explained.reason)}", file=sys.stderr)
            continue
        answers = (plain(f"{model.answers[0][0]} {model.answers[0][1]:.1%}") for model in explained)
        table.add_row(plain(str(picture)), *answers)
    if table.row_count:
        console.print(table)
    if unreadable:
        sys.exit(1)
