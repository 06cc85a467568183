"""`smallvit evaluate`."""

from rich.table import Table

from smallvit.commands.terminal import new_table, open_console, plain
from smallvit.common.arguments import Data, Device, Folder, Run
from smallvit.common.env import prepare

MAX_CLASSES = 20  # rows of the printed table


def evaluate(
    run: Run,
    data: Data = None,
    /,
    out: Folder = None,
    data_dir: Folder = None,
    batch_size: int = 256,
    flip: bool = False,
    device: Device = None,
) -> None:
    """Score a model on labelled images: accuracy with its interval, per-class scores, mistakes, calibration, speed.

    Args:
        run: A run folder or its model/; or the folder of a cross-validation, for the ensemble of its models.
        data: As for `smallvit train`. Scores its test images, or else its validation images, or all images of data
            without a split. By default, the test images of the run's own data.
        out: Folder for evaluation.json, mistakes.csv and the pictures; by default RUN/evaluation.
        data_dir: Folder of known data sets; missing ones are downloaded to it.
        batch_size: Images per step.
        flip: Test-time flips: average the logits of each image and its mirror image, in twice the time.
        device: Kind of device to compute on.
    """
    from smallvit.evaluation import evaluate
    from smallvit.runs.scores import with_interval

    prepare(device)
    out = out or run / "evaluation"
    evaluation = evaluate(run, data, out=out, data_dir=data_dir, batch_size=batch_size, flip=flip)

    console, scores = open_console(), evaluation.scores
    which = {"test": "test images", "val": "validation images", "train": "images (the data has no split)"}
    which |= {"folds": "images, out of fold,"}
    images = f"{evaluation.model} on {len(evaluation.split):,} {which[evaluation.part]} of {evaluation.data}"
    for line in (*evaluation.notes, images, evaluation.warning):
        if line is not None:
            console.print(plain(line))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("top-1", with_interval(scores.top1, scores.interval))
    if len(evaluation.classes) > 5:
        table.add_row("top-5", f"{scores.top5:.2f} %")
    loss, calibration = f"{scores.loss:.3f}", f"{scores.ece:.2f} %"
    if evaluation.temperature != 1:
        before = evaluation.uncalibrated
        loss += f", {before.loss:.3f} before temperature scaling"
        calibration += f", {before.ece:.2f} % before (temperature {evaluation.temperature:.3g})"
    table.add_row("loss", loss)
    table.add_row("calibration error", calibration)
    speed = f"{evaluation.images_per_second:,.0f} images/s, batch size {evaluation.batch_size}, {evaluation.device}"
    table.add_row("speed", speed)
    console.print(table)
    table = new_table("class", "recall", "precision", "images")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in evaluation.per_class[:MAX_CLASSES]:
        shares = ("-" if row[name] is None else f"{row[name]:.1%}" for name in ("recall", "precision"))
        table.add_row(plain(str(row["class"])), *shares, f"{row['images']:,}")
    console.print()
    console.print(table)
    if (others := len(evaluation.classes) - MAX_CLASSES) > 0:
        console.print(plain(f"and {others} more in {out / 'evaluation.json'}"), style="dim")
    console.print()
    wrote = "evaluation.json, mistakes.csv, confusion.png, reliability.png and worst-mistakes.png"
    console.print(plain(f"Wrote {wrote} to {out}"))
