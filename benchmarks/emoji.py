"""Folders of images to judge the default on that it was not tuned on: emoji by kind, drawn by four companies.

    npm pack emoji-datasource-apple emoji-datasource-facebook emoji-datasource-google emoji-datasource-twitter
    .venv-peers/bin/python -m benchmarks.emoji emoji-datasource-*.tgz --out emoji
    .venv-peers/bin/python -m benchmarks.emoji emoji-datasource-*.tgz --out emoji_kinds --by subcategory --fewest 20

Images of 64 pixels on white, one folder for each category. An emoji is in the training set with all its drawings, or in
the test set with all of them (three of ten): the model is asked about things that it has never seen.
"""

import argparse
import io
import json
import tarfile
import zlib
from collections import Counter
from pathlib import Path

from PIL import Image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--by", choices=["category", "subcategory"], default="category")
    parser.add_argument("--fewest", type=int, default=50, help="minimum number of emoji in a class")
    args = parser.parse_args()
    if missing := [str(archive) for archive in args.archives if not archive.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}; download the archives with `npm pack`, as --help shows")
    written = Counter(split for archive in args.archives for split in write(archive, args.out, args.by, args.fewest))
    print(f"{args.out}: {written['train']:,} images to train on, {written['test']:,} to test on")


def write(archive: Path, out: Path, by: str, fewest: int) -> list[str]:
    """Writes the images of one company, and returns the split of each."""
    splits = []
    with tarfile.open(archive) as tar:
        company = next(name.split("/")[2] for name in tar.getnames() if name.startswith("package/img/"))
        emoji = json.loads(read(tar, "package/emoji.json"))
        sizes = Counter(one[by] for one in emoji)
        for one in emoji:
            if sizes[one[by]] < fewest or not one[f"has_img_{company}"]:
                continue
            split = "test" if zlib.crc32(one["unified"].encode()) % 10 < 3 else "train"
            path = out / split / one[by].lower().replace(" & ", "_").replace(" ", "_") / f"{company}-{one['image']}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.open(io.BytesIO(read(tar, f"package/img/{company}/64/{one['image']}"))).convert("RGBA")
            Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB").save(path)
            splits.append(split)
    return splits


def read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} in {tar.name} is not a file")
    return file.read()


if __name__ == "__main__":
    main()
