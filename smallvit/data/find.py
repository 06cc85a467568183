"""Images to predict or explain: files, folders and patterns, as a user names them."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from smallvit.data.listing import images_below, natural


def find_images(paths: Sequence[str | Path]) -> list[Path]:
    """Each file once, in the order given: a file whatever its name, of a folder all images below it.

    A pattern such as "photos/**/*.jpg" is for where no shell has replaced it. A ValueError names what is not there.
    """
    found: dict[Path, None] = {}
    for path in map(str, paths):
        if os.path.lexists(path):
            named = [path]
        elif named := sorted(glob.glob(os.path.expanduser(path), recursive=True), key=natural):
            # A pattern that ends in ** finds folders beside the files in them.
            named = [each for each in named if os.path.isfile(each)] or named
        else:
            raise ValueError(f"{path}: there is no such file or folder")
        files = [file for each in named for file in _files(Path(each))]
        if not files:
            raise ValueError(f"{path} holds no images: files such as .jpg, .png, .webp, .bmp, .gif or .tif")
        found |= dict.fromkeys(files)
    return list(found)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return list(images_below(path))
    if not path.is_file():
        raise ValueError(f"{path} is neither a file nor a folder")  # a pipe would be waited for
    return [path]
