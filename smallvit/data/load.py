"""Any source by its name or path."""

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
    """A data set by its name, from a folder of images or from an `.npz` file.

    Args:
        source: None or "fashion-mnist-10k" is the set in the package; a known name such as "cifar10" is looked for in
            `data_dir` and else downloaded; anything else is a path. A name that is also a folder here means the known
            set: write "./cifar10", or any path with a slash, for the folder.
        image_size: Height and width, or both in one. Without it, small images that are all of one size keep it, others
            become 32, 64 or 96 pixels, the largest of those that at least half of them have.
        fit: How images of another shape fit in: "crop" takes the middle, "pad" fills up with the mean colour.
        seed: Which images are held out where the source is not split. Leave it when comparing runs.
        data_dir: Where the files of known sets are; without it a folder in the user's cache.
        cache_dir: Where decoded images are kept; without it a folder in the user's cache.
        labels: A table of the images in a folder, a CSV file with the columns file and label and perhaps split and
            group; without it labels.csv or metadata.csv in the folder, if that has no class folders.
        group: The column of the table whose groups are not torn apart by a split, if it is not "group".
        fold: (2, 5) is the second of five folds of all images but those of a test split of the source: the fold is the
            test split, and validation images are taken from the others. The source's own become `given_test`.
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
) -> Scanned:
    """`load_data` in two parts: what is known once the files are listed and their headers read, then the images.

    Sources other than a folder are loaded at once: there is nothing to decode, or it is one archive.
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
        raise ValueError(f"labels and groups in a table are for a folder of images: {path} has labels of its own")
    if kind == "folder":
        table = None if labels is None else Path(labels).expanduser()
        return scan_folder(
            path, image_size=size, fit=fit, seed=seed, cache_dir=cache, labels=table, group=group, fold=fold
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
    """What kind of source is meant, with its path or name; a ValueError if there is none."""
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
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    names = [] if len(path.parts) > 1 or isinstance(source, Path) or path.suffix else [NAME, *KNOWN]
    known = f" Known data sets: {', '.join(names)}" if names else ""
    hint = did_you_mean(path.name, [*beside, *names]) or ("." if known else "")
    raise ValueError(f"{path}: there is no such folder or file{hint}{known}")
