"""Example images for the page, loaded into memory when the server starts."""

import io
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from smallvit.common.text import shown
from smallvit.data.embedded import FASHION_CLASSES, load_embedded
from smallvit.data.view import as_picture
from smallvit.runs.prediction import Predictor

MOST = 12
LARGEST = 4 * 2**20  # bytes
KINDS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}  # shown by every browser


class Example(NamedTuple):
    name: str
    kind: str
    content: bytes


def from_folder(folder: Path, predictor: Predictor) -> list[Example]:
    """Returns the first images of the folder and its subfolders, taken from each in turn."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give a folder with a few images as --examples")
    try:
        groups = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
        files = [sorted(path for path in group.iterdir() if path.suffix.lower() in KINDS) for group in groups]
    except OSError as error:
        raise ValueError(f"cannot read {folder}: {error.strerror}") from None
    found = []
    for path in chain.from_iterable(zip_longest(*files)):
        if path is None or not path.is_file() or path.stat().st_size > LARGEST:
            continue
        try:
            content = path.read_bytes()
            predictor.decode(io.BytesIO(content))
        except (OSError, ValueError):
            continue
        found.append(Example(shown(path.name), KINDS[path.suffix.lower()], content))
        if len(found) == MOST:
            break
    if not found:
        raise ValueError(f"{folder} has no image that can be shown: use {', '.join(KINDS)} files of up to 4 MB")
    return found


def from_embedded(predictor: Predictor) -> list[Example]:
    """Returns one test image per class for a model of the data set in the package, else no images."""
    if predictor.saved.classes != FASHION_CLASSES:
        return []
    test = load_embedded().test
    assert test is not None
    firsts = [int(np.argmax(test.labels == label)) for label in range(len(FASHION_CLASSES))]
    return [Example(f"{FASHION_CLASSES[test.labels[i]]}.png", "png", png(test.images[i])) for i in firsts]


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    image = as_picture(image)
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "png")
    return file.getvalue()
