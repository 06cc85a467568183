"""Sorting image files into one folder per class: files are copied or linked, never moved or overwritten."""

import filecmp
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from smallvit.common.files import temporary_name, truncated
from smallvit.runs.answers import UNSURE, Prediction


class Sorted(NamedTuple):
    made: int  # copies or links
    present: int  # files that were there already


def sort_into(
    folder: str | Path, predictions: Sequence[Prediction], classes: Sequence[str], *, link: bool = False
) -> Sorted:
    """Copies the files of predictions into FOLDER/<class>, or FOLDER/unsure if that is the decision.

    Args:
        folder: Created if it does not exist.
        predictions: Predictions of files, as returned by `predict`.
        classes: All classes of the model.
        link: Make hard links instead of copies, or symbolic links across disks.

    If the name is taken by a different file, a number is added, as in name-2.jpg; a file with the same content is not
    copied again.
    """
    folders = _folders(classes)
    made = present = 0
    for prediction in predictions:
        target = Path(folder) / folders[prediction.decision or prediction.classes[0]]
        try:
            target.mkdir(parents=True, exist_ok=True)
            if _place(Path(prediction.file), target, link):
                made += 1
            else:
                present += 1
        except OSError as error:
            raise ValueError(f"cannot sort {prediction.file} into {target}: {error.strerror}") from None
    return Sorted(made, present)


def _folders(classes: Sequence[str]) -> dict[str, str]:
    """Returns a unique folder name for each class that is valid on every file system."""
    names: dict[str, str] = {}
    for label in dict.fromkeys((UNSURE, *classes)):
        safe = truncated(re.sub(r'[/\\:*?"<>|\x00-\x1f\x7f]', "_", label).strip(" ."), 200) or "_"
        taken = {name.casefold() for name in names.values()}
        names[label] = next(name for name in _numbered(safe, "") if name.casefold() not in taken)
    return names


def _place(file: Path, folder: Path, link: bool) -> bool:
    """Copies or links a file; returns False if it is there already."""
    for name in _numbered(truncated(file.stem, 200), file.suffix):
        target = folder / name
        if target.exists() and filecmp.cmp(file, target, shallow=False):
            return False
        if os.path.lexists(target):
            continue
        with suppress(FileExistsError):  # another process was faster
            if link:
                _link(file.resolve(), target)
            else:
                _copy(file, target)
            return True
    raise AssertionError("the numbers never end")


def _numbered(stem: str, suffix: str) -> Iterator[str]:
    yield f"{stem}{suffix}"
    yield from (f"{stem}-{number}{suffix}" for number in count(2))


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileExistsError:
        raise
    except OSError:  # another disk, or one without hard links
        os.symlink(file, target)


def _copy(file: Path, target: Path) -> None:
    """Copies to a temporary name first, so that a partial copy is never seen."""
    copy = temporary_name(target)
    try:
        shutil.copy2(file, copy)
        try:
            os.link(copy, target)  # fails if it exists, unlike a rename
        except FileExistsError:
            raise
        except OSError:  # a disk without hard links
            os.rename(copy, target)
    finally:
        copy.unlink(missing_ok=True)
