"""The commands of `smallvit`: parse, call, print. Heavy modules are imported when a command runs."""

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
from rich.text import Text as RichText

from smallvit import __version__
from smallvit.catalogue import catalogue
from smallvit.common.arguments import parse
from smallvit.common.env import keep_compiled, use_device
from smallvit.common.errors import Stopped
from smallvit.common.extras import EXTRAS, need
from smallvit.common.text import shown
from smallvit.common.words import did_you_mean
from smallvit.training.config import CompareConfig, Data, Device, Float, Folder, Int, Text, TrainConfig

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]
Paths = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH ...", help_behavior_hint="")]
Repo = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REPO", help_behavior_hint="")]
ModelFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
File = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]

T = TypeVar("T")
MAX_CLASSES = 20  # rows of the printed table


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


def export(
    run: Run,
    /,
    format: Literal["safetensors", "stablehlo", "onnx"],
    out: File = None,
    opset: Int = None,
    quantize: Annotated[Literal["int8"] | None, tyro.conf.arg(metavar="int8", help_behavior_hint="")] = None,
    half: bool = False,
) -> None:
    """Export a trained model for other programs, checked against the original.

    Args:
        run: A run folder or its model/.
        format: Weights only, a program for JAX, or a program for ONNX runtimes.
        out: File to write; by default RUN/export/model.FORMAT, or model-int8.onnx or model-half.onnx.
        opset: Version of the ONNX operators.
        quantize: ONNX in 8-bit integers, calibrated on the run's validation images and scored on its test images.
        half: ONNX in 16-bit floats, scored on the run's test images.
    """
    from smallvit.common.files import read_json
    from smallvit.exporting.compression import describe
    from smallvit.exporting.formats import TOLERANCE, export

    path = export(run, format, out, opset=opset, quantize=quantize, half=half)
    if quantize or half:
        print(shown(f"{path}; {path.name}.json describes its use"))
        print("\n".join(describe(read_json(path.with_name(f"{path.name}.json"))["measured"])))
        return
    size = path.stat().st_size / 2**20
    wrote = f"{path} ({size:.1f} MiB) matches the model's logits to {TOLERANCE:g}; {path.name}.json describes its use"
    print(shown(wrote))


def push(run: Run, repo: Repo, /, private: bool = False) -> None:
    """Upload a trained model to the Hugging Face hub, with a model card.

    Args:
        run: A run folder or its model/.
        repo: Repository on the hub, such as owner/name; created if it does not exist.
        private: Create it as a private repository.
    """
    from smallvit.exporting.hub import push

    print(shown(f"The model is at {push(run, repo, private=private)}"))


def pull(repo: Repo, folder: ModelFolder, /, revision: Text = None) -> None:
    """Download a model that was pushed to the Hugging Face hub.

    Args:
        repo: Repository on the hub, such as owner/name.
        folder: New folder for the model; every command that takes a run takes it.
        revision: Branch, tag or commit of the repository.
    """
    from smallvit.exporting.hub import pull

    saved = pull(repo, folder, revision=revision)
    print(shown(f"Wrote {saved.spec.name} for {len(saved.classes)} classes to {folder}"))


def serve(
    run: Run,
    /,
    host: str = "127.0.0.1",
    port: int = 8000,
    threshold: Float = None,
    precision: Float = None,
    examples: Folder = None,
    upload_mb: float = 32,
    images: int = 64,
    queue: int = 512,
    seconds: float = 30,
    decoders: int = 2,
    token: Text = None,
    allow_host: tuple[str, ...] = (),
    device: Device = None,
) -> None:
    """Serve a trained model: a page for the browser, and a JSON API.

    Args:
        run: A run folder or its model/; or the folder of a cross-validation, for the ensemble of its models.
        host: Address to listen on; 0.0.0.0 accepts connections from other machines.
        port: Port to listen on; 0 takes any free port.
        threshold: Answer "unsure" where the highest probability is below this.
        precision: Choose the threshold: answers are right as often as this on the run's validation images.
        examples: Folder of images that the page offers as examples.
        upload_mb: Maximum upload size per request, in MB.
        images: Maximum number of images per request.
        queue: Maximum number of images waiting for an answer.
        seconds: Timeout of an upload, and of an answer, in seconds.
        decoders: Processes that decode images; one more decodes large images.
        token: Token that requests must send; generated and printed if other machines can connect.
        allow_host: Other host names accepted in requests, such as that of a reverse proxy.
        device: Kind of device to compute on.
    """
    for package in EXTRAS["serve"]:
        need(package, "serving a model")
    from smallvit.serving import Limits
    from smallvit.serving import serve as serve_model

    _prepare(device)
    upload = int(upload_mb * 2**20) if isfinite(upload_mb) else 0
    limits = Limits(
        upload=upload,
        memory=max(8 * upload, 1),
        images=images,
        queue=queue,
        seconds=seconds,
        decoders=decoders,
    )
    serve_model(
        run,
        host=host,
        port=port,
        threshold=threshold,
        precision=precision,
        examples=examples,
        limits=limits,
        token=token,
        hosts=allow_host,
    )


def predict(
    run: Run,
    paths: Paths,
    /,
    top: int = 3,
    threshold: Float = None,
    precision: Float = None,
    csv: File = None,
    json: File = None,
    sort_into: Folder = None,
    link: bool = False,
    flip: bool = False,
    device: Device = None,
) -> None:
    """Classify images. Files that cannot be read are reported and skipped; the exit code is then 1.

    Args:
        run: A run folder or its model/; or the folder of a cross-validation, for the ensemble of its models.
        paths: Files, folders with everything below them, or patterns such as "photos/*.jpg"; - reads an image from
            standard input.
        top: Number of classes per image.
        threshold: Answer "unsure" where the highest probability is below this.
        precision: Choose the threshold: answers are right as often as this on the run's validation images.
        csv: Write CSV to this file; - is standard output, instead of the table.
        json: Write JSON to this file; - is standard output, instead of the table.
        sort_into: Copy the images into PATH/<class>/ and PATH/unsure/; nothing is moved or overwritten.
        link: Make links instead of copies.
        flip: Test-time flips: average the logits of each image and its mirror image, in twice the time.
        device: Kind of device to compute on.
    """
    from smallvit.common.files import check_file, check_folder, write_bytes
    from smallvit.data import find_images
    from smallvit.runs import sorting
    from smallvit.runs.answers import UNSURE, Prediction, as_csv, as_json, check_threshold
    from smallvit.runs.prediction import Predictor, predict_files

    outputs = [(file, form) for file, form in ((csv, as_csv), (json, as_json)) if file is not None]
    if len({file for file, _ in outputs}) < len(outputs):
        raise ValueError(f"--csv and --json both write to {csv}: give them different files")
    for file, _ in outputs:
        check_file(Path(file))
    if not paths:
        raise ValueError("no images given: give files, folders, patterns, or - for standard input")
    check_threshold(threshold, precision)
    if link and sort_into is None:
        raise ValueError("--link needs --sort-into: give the folder to sort into")
    named = find_images([path for path in paths if path != "-"])
    if sort_into is not None:
        if "-" in paths:
            raise ValueError("--sort-into cannot copy standard input: give files")
        check_folder(sort_into)
        sorted_before = sort_into.resolve()
        named = [file for file in named if sorted_before not in file.resolve().parents]
        if not named:
            raise ValueError(f"all images are in {sort_into} already: give others, or another --sort-into")
    _prepare(device)
    predictor = Predictor(run, flip=flip)
    if precision is not None:
        choice = predictor.saved.choose_threshold(precision)
        threshold = choice.threshold
        print(f"smallvit: {choice.describe()}", file=sys.stderr)
    files = _with_standard_input(named, paths)

    predictions, unreadable = [], 0
    for result in _watched(predict_files(predictor, files, top, threshold=threshold), len(files)):
        if isinstance(result, Prediction):
            predictions.append(result)
        else:
            unreadable += 1
            print(f"smallvit: {shown(result.reason)}", file=sys.stderr)
    for file, form in outputs:
        content = form(predictions).encode(errors="surrogateescape")  # file names may be any bytes
        if file == "-":
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
        else:
            write_bytes(Path(file), content)
    if predictions and "-" not in (csv, json):
        decided = threshold is not None
        table = _table("file", *["decision"] * decided, *(str(i + 1) for i in range(len(predictions[0].classes))))
        for prediction in predictions:
            pairs = zip(prediction.classes, prediction.probabilities, strict=True)
            cells = [prediction.file, *[prediction.decision or ""] * decided, *(f"{name} {p:.1%}" for name, p in pairs)]
            table.add_row(*map(_plain, cells))
        _screen().print(table)
        if decided:
            unsure = sum(each.decision == UNSURE for each in predictions)
            print(f"{unsure:,} of {len(predictions):,} images are unsure, below {threshold:g}")
    if sort_into is not None:
        done = sorting.sort_into(sort_into, predictions, predictor.saved.classes, link=link)
        what = f"{done.made:,} {'linked' if link else 'copied'}, {done.present:,} there already"
        print(shown(f"sorted {len(predictions):,} images into {sort_into}: {what}"), file=sys.stderr)
    if unreadable:
        sys.exit(1)


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
        data: As for `smallvit train`: its test images, or else its validation images, or all images of data without a
            split. By default the test images of the run's own data.
        out: Folder for evaluation.json, mistakes.csv and the pictures; by default RUN/evaluation.
        data_dir: Folder of known data sets; missing ones are downloaded to it.
        batch_size: Images per step.
        flip: Test-time flips: average the logits of each image and its mirror image, in twice the time.
        device: Kind of device to compute on.
    """
    from smallvit.evaluation import evaluate
    from smallvit.runs.scores import with_interval

    _prepare(device)
    out = out or run / "evaluation"
    evaluation = evaluate(run, data, out=out, data_dir=data_dir, batch_size=batch_size, flip=flip)

    screen, scores = _screen(), evaluation.scores
    which = {"test": "test images", "val": "validation images", "train": "images (the data has no split)"}
    which |= {"folds": "images, out of fold,"}
    images = f"{evaluation.model} on {len(evaluation.split):,} {which[evaluation.part]} of {evaluation.data}"
    for line in (*evaluation.notes, images, evaluation.warning):
        if line is not None:
            screen.print(_plain(line))
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
    screen.print(table)
    table = _table("class", "recall", "precision", "images")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in evaluation.per_class[:MAX_CLASSES]:
        shares = ("-" if row[name] is None else f"{row[name]:.1%}" for name in ("recall", "precision"))
        table.add_row(_plain(str(row["class"])), *shares, f"{row['images']:,}")
    screen.print()
    screen.print(table)
    if (others := len(evaluation.classes) - MAX_CLASSES) > 0:
        screen.print(_plain(f"and {others} more in {out / 'evaluation.json'}"), style="dim")
    screen.print()
    wrote = "evaluation.json, mistakes.csv, confusion.png, reliability.png and worst-mistakes.png"
    screen.print(_plain(f"Wrote {wrote} to {out}"))


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
    _prepare(device)
    screen = _screen()
    if temperatures:
        by_model, figure = pictures.layer_statistics(runs, named)
        plots.save(figure, out / "temperatures.png")
        for name, rows in by_model.items():
            table = _table(name, "temperature per head", "sqrt(d)", "entropy", "at most", "distance")
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
        screen.print(_plain(f"Wrote {out / 'temperatures.png'}"))
    if receptive_field:
        fields, figure = pictures.receptive_fields(runs, named)
        plots.save(figure, out / "receptive-field.png")
        for name, field in fields.items():
            screen.print(_plain(f"{name}: one token sees {pictures.describe(field)}"))
        screen.print(_plain(f"Wrote {out / 'receptive-field.png'}"))
    if statistics:
        return

    explainer = pictures.Explainer(runs, layer=layer, heads=heads)
    files = _with_standard_input(named, paths)
    table, unreadable = _table("picture", *explainer.models), 0
    for picture, explained in _watched(pictures.draw_explanations(explainer, files, out), len(files)):
        if isinstance(explained, Unreadable):
            unreadable += 1
            print(f"smallvit: {shown(explained.reason)}", file=sys.stderr)
            continue
        answers = (_plain(f"{model.answers[0][0]} {model.answers[0][1]:.1%}") for model in explained)
        table.add_row(_plain(str(picture)), *answers)
    if table.row_count:
        screen.print(table)
    if unreadable:
        sys.exit(1)


def doctor() -> None:
    """Report what this machine and installation have, and test the native kernels."""
    from smallvit.doctor import examine

    findings = examine()
    table = Table(box=None, show_header=False, pad_edge=False)
    for each in findings:
        table.add_row(RichText(each.what, "red" if each.wrong else "bold"), _plain(each.found))
    _screen().print(table)
    if any(each.wrong for each in findings):
        sys.exit(1)


def _prepare(device: str | None) -> None:
    use_device(device)
    keep_compiled()


def _with_standard_input(named: list[Path], paths: tuple[str, ...]) -> list[Path | io.BytesIO]:
    return [*named, *([io.BytesIO(sys.stdin.buffer.read())] if "-" in paths else [])]


def _watched(results: Iterable[T], number: int) -> Iterable[T]:
    """Adds a progress bar on a terminal."""
    console = Console(stderr=True)
    return track(results, "", number, console=console, transient=True, disable=not console.is_terminal)


def _screen() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=1000)  # no wrapped lines in files and pipes


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(_plain(title), overflow="fold")
    return table


def _plain(text: str) -> RichText:
    """Removes markup, escape sequences and undecodable bytes."""
    return RichText(shown(text))


COMMANDS = {
    f.__name__: f for f in (train, evaluate, predict, explain, export, serve, push, pull, compare, models, doctor)
}


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # pipes on Windows cannot encode all characters
            stream.reconfigure(errors="backslashreplace")
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
        parse(COMMANDS[command], f"smallvit {command}", args)()
    except ValueError as error:
        _end(str(error), 2)
    except Stopped as error:
        _end(str(error), error.code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            raise
        _end(f"{error.filename or 'a file'} cannot be written: {error.strerror}", 1)


def _end(line: str, code: int) -> None:
    print(f"smallvit: {shown(line)}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
