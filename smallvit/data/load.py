"""`load_data`: a data set from any source, by name or path."""

from pathlib import Path
from typing import Literal, get_args

from smallvit.common.files import user_cache
from smallvit.common.words import did_you_mean
from smallvit.data.arrays import load_npz
from smallvit.data.dataset import Dataset, Fit, Scanned
from smallvit.data.embedded import NAME, load_embedded
from smallvit.data.folder import scan_folder
from smallvit.data.known import KNOWN, load_known
from smallvit.data.splits import Fold, check_fold


def load_data(
    source: str | Path | None = None,
    *,
    image_size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    seed: int = 0,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    labels: str | Path | None = None,
    group: str | None = None,
    fold: Fold | None = None,
) -> Dataset:
    """Loads a data set by name, from a folder of images or from an `.npz` file.

    Args:
        source: None or "fashion-mnist-10k" is the data set in the package. A known name such as "cifar10" is looked up
            in `data_dir` or else downloaded. Anything else is a path. If a folder has the name of a known data set,
            the known set is loaded; use "./cifar10", or any path with a slash, for the folder.
        image_size: Height and width, or one number for both. By default, small images that all have the same size keep
            it. Others become 32, 64 or 96 pixels, the largest of these that at least half of the images reach.
        fit: How images of a different aspect ratio are fitted: "crop" takes the centre, "pad" fills up with the mean
            colour.
        seed: Determines which images are held out if the source is not split. Keep it fixed when comparing runs.
        data_dir: The folder with the files of known data sets. Defaults to a folder in the user's cache.
        cache_dir: The folder for decoded images. Defaults to a folder in the user's cache.
        labels: A CSV file that lists the images of a folder in the columns file and label, and optionally split and
            group. Defaults to labels.csv or metadata.csv in the folder if it has no class folders.
        group: The column of the table with groups that a split keeps together. Defaults to "group".
        fold: (2, 5) is the second of five folds of all images except a test split of the source. The fold becomes the
            test split, and the validation images are taken from the other folds. The source's test split becomes
            `given_test`.
    """
    return scan_data(
        source,
        image_size=image_size,
        fit=fit,
        seed=seed,
        data_dir=data_dir,
        cache_dir=cache_dir,
        labels=labels,
        group=group,
        fold=fold,
    ).decode()


def scan_data(
    source: str | Path | None = None,
    *,
    image_size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    seed: int = 0,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    labels: str | Path | None = None,
    group: str | None = None,
    fold: Fold | None = None,
    reserve: float = 1.0,
) -> Scanned:
    """Does the first half of `load_data`: lists the files and reads their headers; `decode` does the second half.

    Sources other than a folder are loaded at once. Of a folder whose files are large enough, the images to train on are
    also decoded `reserve` times as high and wide, for random resized crops.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if size is not None and min(size) < 1:
        raise ValueError(f"image_size={image_size} must be at least 1")
    if fit not in get_args(Fit):
        raise ValueError(f"fit={fit!r} must be {' or '.join(map(repr, get_args(Fit)))}")
    if fold is not None:
        check_fold(fold)
    cache = Path(cache_dir).expanduser() if cache_dir is not None else user_cache() / "decoded"

    kind, path = find_source(source)
    if kind != "folder" and (labels is not None or group is not None):
        raise ValueError(f"a table of labels and groups needs a folder of images: {path} has its own labels")
    if kind == "folder":
        table = None if labels is None else Path(labels).expanduser()
        return scan_folder(
            path,
            image_size=size,
            fit=fit,
            seed=seed,
            cache_dir=cache,
            labels=table,
            group=group,
            fold=fold,
            reserve=reserve,
        )
    match kind, path:
        case "embedded", _:
            data = load_embedded(image_size=size, fit=fit, seed=seed, fold=fold)
        case "known", name:
            folder = Path(data_dir).expanduser() if data_dir is not None else user_cache() / "data"
            data = load_known(
                str(name), image_size=size, fit=fit, seed=seed, data_dir=folder, cache_dir=cache, fold=fold
            )
        case _, path:
            data = load_npz(path, image_size=size, fit=fit, seed=seed, fold=fold)
    return Scanned(data, lambda: data)


def find_source(source: str | Path | None) -> tuple[Literal["embedded", "known", "folder", "npz"], Path]:
    """The type of a source, with its path or name; a ValueError if it does not exist."""
    if source is None or source == NAME:
        return "embedded", Path(NAME)
    if source in KNOWN:
        return "known", Path(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return "folder", path
    if path.is_file():
        if path.suffix.lower() != ".npz":
            raise ValueError(f"{path} is neither a folder of images nor an .npz file of images and labels")
        return "npz", path
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    names = [] if len(path.parts) > 1 or isinstance(source, Path) or path.suffix else [NAME, *KNOWN]
    known = f" Known data sets: {', '.join(names)}" if names else ""
    hint = did_you_mean(path.name, [*siblings, *names]) or ("." if known else "")
    raise ValueError(f"{path}: there is no such folder or file{hint}{known}")
