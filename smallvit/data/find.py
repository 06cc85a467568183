"""Image files to predict or explain, from files, folders and patterns."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from smallvit.data.listing import images_below, natural


def find_images(paths: Sequence[str | Path]) -> list[Path]:
    """Lists each file once, in the given order: files of any name, and all images below a folder.

    Patterns such as "photos/**/*.jpg" are expanded, for shells that do not. A ValueError names a path that does not
    exist.
    """
    found: dict[Path, None] = {}
    for path in map(str, paths):
        if os.path.lexists(path):
            matches = [path]
        elif matches := sorted(glob.glob(os.path.expanduser(path), recursive=True), key=natural):
            # A pattern that ends in ** matches folders as well as the files in them.
            matches = [match for match in matches if os.path.isfile(match)] or matches
        else:
            raise ValueError(f"{path}: there is no such file or folder")
        files = [file for match in matches for file in _files(Path(match))]
        if not files:
            raise ValueError(f"{path} holds no images: files such as .jpg, .png, .webp, .bmp, .gif or .tif")
        found |= dict.fromkeys(files)
    return list(found)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return list(images_below(path))
    if not path.is_file():
        raise ValueError(f"{path} is neither a file nor a folder")  # reading a pipe would block
    return [path]
