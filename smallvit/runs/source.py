"""The data of a run, and the images held out from it."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from smallvit.common.files import read_json
from smallvit.data import Dataset, HeldOut, held_out, load_data
from smallvit.data.embedded import NAME
from smallvit.data.known import KNOWN
from smallvit.data.splits import Fold
from smallvit.runs.folder import CACHE, CONFIG, PLAN, run_folder
from smallvit.runs.saved import Saved


@dataclass(frozen=True)
class Source:
    """The origin of a run's images, and which of them were held out."""

    data: str | None
    split_seed: int
    data_dir: Path | None
    cache_dir: Path
    labels: Path | None = None
    group: str | None = None
    fold: Fold | None = None  # held out for testing
    all_images: bool = False  # validation images were used for training

    def is_same(self, source: str | Path) -> bool:
        mine, other = self.data or NAME, str(source)
        names = {NAME, *KNOWN}
        if mine in names or other in names:
            return mine == other
        return Path(mine).expanduser().resolve() == Path(other).expanduser().resolve()


def source_of(run: str | Path) -> Source | None:
    """Returns the source of a run's data; None if only its model folder is left."""
    path = run_folder(run) / CONFIG
    config = (read_json(path) if path.exists() else {}).get("config")
    if config is None:
        return None
    options = config["run"]
    data_dir, cache_dir = (options[name] and Path(options[name]) for name in ("data_dir", "cache_dir"))
    labels = Path(config["labels"]) if config.get("labels") else None
    cache_dir = cache_dir or Path(options["runs"]) / CACHE
    fold = (config["fold"], config["folds"]) if config.get("fold") else None
    others = labels, config.get("group"), fold, config.get("all_images", False)
    return Source(config["data"], config["split_seed"], data_dir, cache_dir, *others)


def own_data(run: str | Path, saved: Saved) -> Dataset:
    """Loads the data that a run was trained on; raises a ValueError if it is not available."""
    source = source_of(run)
    if source is None:
        raise ValueError(f"the data that {run} was trained on is unknown: give the data to evaluate it on")
    try:
        data = load_data(
            source.data,
            image_size=saved.preprocess.size,
            fit=saved.preprocess.fit,
            seed=source.split_seed,
            data_dir=source.data_dir,
            cache_dir=source.cache_dir,
            labels=source.labels,
            group=source.group,
            fold=source.fold,
        )
    except ValueError as error:
        raise ValueError(f"the data that {run} was trained on is not available ({error}): give other data") from None
    data = data.with_validation_in_training() if source.all_images else data
    return data.normalised(saved.preprocess.mean, saved.preprocess.std)


def own_images(run: str | Path, saved: Saved) -> HeldOut:
    """Loads the held-out images of the run's own data; raises a ValueError if they are not available."""
    data = own_data(run, saved)
    found = held_out(data, saved.classes, saved.preprocess)
    return replace(found, notes=(*found.notes, *_changed(run, data)))


def given_test(fold: str | Path, saved: Saved) -> HeldOut | None:
    """Returns the original test images of a cross-validation's data, which are in no fold; None if there are none."""
    data = own_data(fold, saved)
    if data.given_test is None:
        return None
    found = held_out(replace(data, test=data.given_test), saved.classes, saved.preprocess)
    line = "the test images of the data set, which are in none of the folds"
    return replace(found, notes=(line, *_changed(fold, data)))


def _changed(run: str | Path, data: Dataset) -> list[str]:
    plan = run_folder(run) / PLAN
    if not plan.exists() or read_json(plan)["data"] == data_digest(data):
        return []
    return ["warning: the data has changed since training, so these images may have been used for training"]


def data_digest(data: Dataset) -> str:
    """Returns a hash of everything a run uses of its data: images, labels, class names and preprocessing.

    Larger images for random resized crops are of the same files.
    """
    digest = hashlib.sha256(json.dumps([data.classes, data.preprocess.to_json()]).encode())
    for part, split in (("train", data.train), ("val", data.val), ("test", data.test)):
        if split is None:
            continue
        digest.update(f"{part} {split.images.shape}".encode())
        digest.update(split.labels.astype("<i4").tobytes())
        for start in range(0, len(split), 1024):  # memory-mapped images may exceed memory
            digest.update(np.ascontiguousarray(split.images[start : start + 1024]).data)
    return digest.hexdigest()
