"""`smallvit predict`."""

import sys
from pathlib import Path

from smallvit.commands.terminal import new_table, open_console, plain, with_progress, with_standard_input
from smallvit.common.arguments import Device, File, Float, Folder, Paths, Run
from smallvit.common.env import prepare
from smallvit.common.text import shown


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
        threshold: Answer "unsure" if the highest probability is below this.
        precision: Choose the threshold that gives this precision on the run's validation images.
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
    prepare(device)
    predictor = Predictor(run, flip=flip)
    if precision is not None:
        choice = predictor.saved.choose_threshold(precision)
        threshold = choice.threshold
        print(f"smallvit: {choice.describe()}", file=sys.stderr)
    files = with_standard_input(named, paths)

    predictions, unreadable = [], 0
    for result in with_progress(predict_files(predictor, files, top, threshold=threshold), len(files)):
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
        table = new_table("file", *["decision"] * decided, *(str(i + 1) for i in range(len(predictions[0].classes))))
        for prediction in predictions:
            pairs = zip(prediction.classes, prediction.probabilities, strict=True)
            cells = [prediction.file, *[prediction.decision or ""] * decided, *(f"{name} {p:.1%}" for name, p in pairs)]
            table.add_row(*map(plain, cells))
        open_console().print(table)
        if decided:
            unsure = sum(prediction.decision == UNSURE for prediction in predictions)
            print(f"{unsure:,} of {len(predictions):,} images are unsure, below {threshold:g}")
    if sort_into is not None:
        done = sorting.sort_into(sort_into, predictions, predictor.saved.classes, link=link)
        what = f"{done.made:,} {'linked' if link else 'copied'}, {done.present:,} there already"
        print(shown(f"sorted {len(predictions):,} images into {sort_into}: {what}"), file=sys.stderr)
    if unreadable:
        sys.exit(1)
