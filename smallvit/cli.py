"""The commands of `smallvit`: parse, call, print. What computes is imported when a command runs."""

import errno
import io
import os
import sys
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from smallvit import __version__
from smallvit.catalogue import catalogue
from smallvit.common.env import keep_compiled, restart_fast
from smallvit.common.errors import Stopped
from smallvit.common.extras import EXTRAS, need
from smallvit.common.words import did_you_mean
from smallvit.training.config import CompareConfig, Data, Folder, Int, TrainConfig

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]
Paths = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH ...", help_behavior_hint="")]
# An output that need not be given; - is standard output.
File = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]

T = TypeVar("T")
MOST_CLASSES = 20  # on the screen


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
    entries = [each for each in catalogue(pattern) if pattern.startswith("sl_") or not each.name.startswith("sl_")]
    if not entries:
        raise ValueError(f"no model matches {pattern!r}: `smallvit models` lists them all")
    if image_size is not None or num_classes != 1000:
        from smallvit.count import describe

        names = _watched([each.name for each in entries], len(entries))
        entries = [describe(name, image_size=image_size, num_classes=num_classes) for name in names]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("name", "paper"):
        table.add_column(title, no_wrap=True)
    for title in ("image", "parameters", "multiply-adds"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in entries:
        paper = each.paper.removeprefix("https://").replace("arxiv.org/abs/", "arXiv ")
        size, millions = "x".join(map(str, each.image_size)), f"{each.multiply_adds / 1e6:,.0f} M"
        table.add_row(each.name, f"[link={each.paper}]{paper}[/link]", size, f"{each.parameters:,}", millions)
    screen = _screen()
    screen.print(table)
    if not pattern.startswith("sl_"):
        screen.print("Every model also exists with SPT and LSA: put sl_ in front of its name.", style="dim")


def train(config: Annotated[TrainConfig, tyro.conf.arg(name="")]) -> None:
    """Train a model on a folder of images, from scratch."""
    from smallvit.training import train

    train(config)


def compare(config: Annotated[CompareConfig, tyro.conf.arg(name="")]) -> None:
    """Train several models with several seeds: the table of a paper."""
    from smallvit.training.comparison import compare, markdown

    table = compare(config)
    print(f"\n{markdown(table)}\n{config.out}/table.md, .csv and .png have it, {config.out}/runs the runs")


def export(
    run: Run,
    /,
    format: Literal["safetensors", "stablehlo", "onnx"],
    out: Path | None = None,
) -> None:
    """Write a trained model for other programs, checked against the original.

    Args:
        run: A run folder or a model folder.
        format: Weights alone, a program for JAX, or a program for ONNX runtimes.
        out: The file to write; export/model.FORMAT in the folder if not given.
    """
    from smallvit.exporting.formats import TOLERANCE, export_model

    path = export_model(run, format, out)
    size = path.stat().st_size / 2**20
    print(f"{path} ({size:.1f} MiB) gives the model's logits to {TOLERANCE:g}; {path.name}.json says how to use it")


def serve(
    run: Run,
    /,
    host: str = "127.0.0.1",
    port: int = 8000,
    examples: Path | None = None,
    upload_mb: float = 32,
    images: int = 64,
    queue: int = 512,
    seconds: float = 30,
) -> None:
    """Serve a trained model: a page to try it in a browser, and JSON for programs.

    Args:
        run: A run folder, or its model/.
        host: The address to listen on; 0.0.0.0 lets other machines in.
        port: The port to listen on; 0 takes any that is free.
        examples: A folder with images that the page offers to try.
        upload_mb: The most megabytes of one request.
        images: The most images of one request.
        queue: The most images that may wait for an answer.
        seconds: The longest that an upload, and that an answer, may take.
    """
    for package in EXTRAS["serve"]:
        need(package, "serving a model")
    from smallvit.serving import Limits
    from smallvit.serving import serve as serve_model

    keep_compiled()
    upload = int(upload_mb * 2**20) if isfinite(upload_mb) else 0
    limits = Limits(upload=upload, memory=max(8 * upload, 1), images=images, queue=queue, seconds=seconds)
    serve_model(run, host=host, port=port, examples=examples, limits=limits)


def predict(
    run: Run,
    paths: Paths,
    /,
    top: int = 3,
    csv: File = None,
    json: File = None,
) -> None:
    """Say what is in images. Exits with 1 if some could not be read; these are named and left out.

    Args:
        run: A run folder, or its model/.
        paths: Files, folders with all below them, patterns such as "photos/*.jpg"; - is an image on standard input.
        top: How many classes of each image.
        csv: Write them there as CSV; - is standard output, in place of the table.
        json: Write them there as JSON; - is standard output, in place of the table.
    """
    from smallvit.common.files import check_file, write_bytes
    from smallvit.data import find_images
    from smallvit.runs.prediction import Prediction, Predictor, as_csv, as_json, predict_files

    outputs = [(file, form) for file, form in ((csv, as_csv), (json, as_json)) if file is not None]
    if len({file for file, _ in outputs}) < len(outputs):
        raise ValueError(f"--csv and --json both go to {csv}: give them different files")
    for file, _ in outputs:
        check_file(Path(file))
    if not paths:
        raise ValueError("there is nothing to predict: give files, folders, patterns, or - for standard input")
    named = find_images([path for path in paths if path != "-"])
    keep_compiled()
    predictor = Predictor(run)
    files = _with_standard_input(named, paths)

    predictions, unreadable = [], 0
    for each in _watched(predict_files(predictor, files, top), len(files)):
        if isinstance(each, Prediction):
            predictions.append(each)
        else:
            unreadable += 1
            print(f"smallvit: {each.reason}", file=sys.stderr)
    for file, form in outputs:
        content = form(predictions).encode(errors="surrogateescape")  # names of files may be any bytes
        if file == "-":
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
        else:
            write_bytes(Path(file), content)
    if predictions and "-" not in (csv, json):
        table = _table("file", *(str(i + 1) for i in range(len(predictions[0].classes))))
        for each in predictions:
            pairs = zip(each.classes, each.probabilities, strict=True)
            table.add_row(_plain(each.file), *(_plain(f"{name} {p:.1%}") for name, p in pairs))
        _screen().print(table)
    if unreadable:
        sys.exit(1)


def evaluate(
    run: Run,
    data: Data = None,
    /,
    out: Folder = None,
    data_dir: Folder = None,
    batch_size: int = 256,
) -> None:
    """Score a model on labelled images: accuracy, classes, confusion, calibration, speed.

    Args:
        run: A run folder, or its model/.
        data: As for `smallvit train`: its test images, else its validation images, or all of what is not split. By
            default the test images of the run's own data.
        out: Where evaluation.json and pictures go; by default RUN/evaluation.
        data_dir: Where known data sets lie, or are downloaded to.
        batch_size: Images of a step.
    """
    from smallvit.evaluation import evaluate_model

    keep_compiled()
    found = evaluate_model(run, data, data_dir=data_dir, batch_size=batch_size)
    out = out or run / "evaluation"
    found.save(out)

    screen, scores = _screen(), found.scores
    which = {"test": "test images", "val": "validation images", "train": "images, all that there are"}[found.part]
    for line in (*found.notes, f"{found.model} on {len(found.split):,} {which}, of {found.data}"):
        screen.print(_plain(line))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("top-1", f"{scores.top1:.2f} %")
    if len(found.classes) > 5:
        table.add_row("top-5", f"{scores.top5:.2f} %")
    table.add_row("loss", f"{scores.loss:.3f}")
    table.add_row("calibration error", f"{scores.ece:.2f} %")
    table.add_row("speed", f"{found.images_per_second:,.0f} images/s in batches of {found.batch_size}, {found.device}")
    screen.print(table)
    table = _table("class", "recall", "precision", "images")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in found.per_class[:MOST_CLASSES]:
        shares = ("-" if row[name] is None else f"{row[name]:.1%}" for name in ("recall", "precision"))
        table.add_row(_plain(str(row["class"])), *shares, f"{row['images']:,}")
    screen.print()
    screen.print(table)
    if (others := len(found.classes) - MOST_CLASSES) > 0:
        screen.print(f"and {others} more in {out / 'evaluation.json'}", style="dim")
    screen.print()
    screen.print(_plain(f"{out} has evaluation.json, confusion.png, reliability.png and worst-mistakes.png"))


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
) -> None:
    """Show what a model looks at: a picture for each image with map, overlay and answer.

    Args:
        run: A run folder, or its model/.
        paths: Files, folders with all below them, patterns such as "photos/*.jpg"; - is an image on standard input.
        out: Where the pictures go; by default RUN/explanations.
        layer: Show what this layer reads, the first is 1, instead of the map of the whole model.
        heads: Show each head of that layer, or of the last one, too.
        compare: Another run, to be shown beside this one.
        temperatures: Show how sharp and how local each layer is: temperatures, entropy and distance of its heads, on
            the images or else the run's own test images.
        receptive_field: Show what one token sees of the image before the first block.
    """
    from smallvit import plots
    from smallvit.common.files import check_folder
    from smallvit.data import find_images
    from smallvit.explanation import pictures
    from smallvit.runs.prediction import Unreadable

    statistics = temperatures or receptive_field
    if not paths and not statistics:
        raise ValueError("there is nothing to explain: give images, --temperatures or --receptive-field")
    if statistics and (heads or layer is not None or "-" in paths):
        raise ValueError("--temperatures and --receptive-field go with neither --heads, --layer nor standard input")
    runs = [run] if compare is None else [run, compare]
    out = out or run / "explanations"
    check_folder(out)
    named = find_images([path for path in paths if path != "-"])
    keep_compiled()
    screen = _screen()
    if temperatures:
        found, figure = pictures.layer_statistics(runs, named)
        plots.save(figure, out / "temperatures.png")
        for name, rows in found.items():
            table = _table(name, "temperature of each head", "sqrt(d)", "entropy", "of at most", "distance")
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
            screen.print(table)
        screen.print(_plain(f"{out / 'temperatures.png'} shows it"))
    if receptive_field:
        fields, figure = pictures.receptive_fields(runs, named)
        plots.save(figure, out / "receptive-field.png")
        for name, field in fields.items():
            screen.print(_plain(f"{name}: one token sees {pictures.describe(field)}"))
        screen.print(_plain(f"{out / 'receptive-field.png'} shows it"))
    if statistics:
        return

    explainer = pictures.Explainer(runs, layer=layer, heads=heads)
    files = _with_standard_input(named, paths)
    targets = pictures.picture_names(files, out)
    table, unreadable = _table("picture", *explainer.models), 0
    for target, each in zip(targets, _watched(explainer(files), len(files)), strict=True):
        if isinstance(each, Unreadable):
            unreadable += 1
            print(f"smallvit: {each.reason}", file=sys.stderr)
            continue
        plots.save(explainer.picture(each), Path(f"{target}-explained.png"))
        if heads:
            plots.save(explainer.heads_picture(each), Path(f"{target}-heads.png"))
        answers = (_plain(f"{model.answers[0][0]} {model.answers[0][1]:.1%}") for model in each)
        table.add_row(_plain(f"{target}-explained.png"), *answers)
    if table.row_count:
        screen.print(table)
    if unreadable:
        sys.exit(1)


def doctor() -> None:
    """Say what this machine and installation have, and test the fast ways against the plain ones."""
    from smallvit.doctor import examine

    findings = examine()
    table = Table(box=None, show_header=False, pad_edge=False)
    for each in findings:
        table.add_row(Text(each.what, "red" if each.wrong else "bold"), _plain(each.found))
    _screen().print(table)
    if any(each.wrong for each in findings):
        sys.exit(1)


def _with_standard_input(named: list[Path], paths: tuple[str, ...]) -> list[Path | io.BytesIO]:
    return [*named, *([io.BytesIO(sys.stdin.buffer.read())] if "-" in paths else [])]


def _watched(results: Iterable[T], number: int) -> Iterable[T]:
    """With a bar, where somebody looks."""
    console = Console(stderr=True)
    return track(results, "", number, console=console, transient=True, disable=not console.is_terminal)


def _screen() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=1000)  # who reads a file or pipe wants no folded lines


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _plain(text: str) -> Text:
    """As it is: no markup, no escape sequences, no bytes that are no letters."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


COMMANDS = {f.__name__: f for f in (train, evaluate, predict, explain, export, serve, compare, models, doctor)}


def main() -> None:
    restart_fast()
    command, *args = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(_overview())
    elif command == "--version":
        print(f"smallvit {__version__}")
    elif command in COMMANDS:
        _run(command, args)
    else:
        what = "option" if command.startswith("-") else "command"
        hint = did_you_mean(command, [*COMMANDS, "--help", "--version"])
        _end(f"unknown {what} {command!r}{hint or ':'} `smallvit --help` lists all commands", 2)


def _overview() -> str:
    lines = [f"  {name:10} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: smallvit [-h] [--version] COMMAND ...",
            "",
            "Vision transformers that learn from small image data sets.",
            "",
            *lines,
            "",
            "`smallvit COMMAND --help` shows the options of a command.",
        )
    )


def _run(command: str, args: list[str]) -> None:
    try:
        tyro.cli(COMMANDS[command], prog=f"smallvit {command}", args=args, config=(tyro.conf.OmitArgPrefixes,))
    except ValueError as error:
        _end(str(error), 2)
    except Stopped as error:
        _end(str(error), 1)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            raise
        _end(f"{error.filename or 'a file'} cannot be written: {error.strerror}", 1)


def _end(line: str, code: int) -> None:
    print(f"smallvit: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
