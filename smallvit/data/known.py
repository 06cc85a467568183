"""Known data sets, read from the files that their authors publish: found on disk or downloaded."""

import gzip
import hashlib
import struct
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np

from smallvit.common.files import write_safely
from smallvit.data.arrays import Labelled, from_arrays
from smallvit.data.cache import decoded
from smallvit.data.dataset import Dataset, Fit, Policy, Preprocess, Split
from smallvit.data.embedded import FASHION_CLASSES
from smallvit.data.progress import progress_bar
from smallvit.data.splits import GIVEN_TEST, Fold, split_rest

DIGITS = tuple("0123456789")
DEBIAN = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}  # from the Debian package dataset-fashion-mnist


class File(NamedTuple):
    name: str
    url: str
    md5: str
    unpacked: str | None = None  # accepted instead of the archive


class Arrays(NamedTuple):
    classes: tuple[str, ...]
    train: Labelled
    test: Labelled


class Known(NamedTuple):
    files: tuple[File, ...]
    read: Callable[[list[Path]], Arrays] | None  # None: a zip archive of image files
    mean: tuple[float, ...]
    std: tuple[float, ...]
    policy: Policy = "imagenet"  # as in Dataset, like the next field
    mirrors: bool = True


def load_known(
    name: str,
    *,
    image_size: tuple[int, int] | None,
    fit: Fit,
    seed: int,
    data_dir: Path,
    cache_dir: Path,
    fold: Fold | None = None,
) -> Dataset:
    known = KNOWN[name]
    paths = [_find(name, file, data_dir) for file in known.files]
    if known.read is None:
        return _load_tiny_imagenet(name, paths[0], image_size or (64, 64), fit, seed, cache_dir, fold)
    try:
        classes, train, test = known.read(paths)
    except ValueError:
        raise
    except Exception as error:  # tar, gzip and mat readers raise many exceptions on damaged files
        raise ValueError(f"cannot read {' or '.join(map(str, paths))}: {_one_line(error)}") from None
    for part, (_, labels) in (("train", train), ("test", test)):
        if not len(labels) or labels.min() < 0 or labels.max() >= len(classes):
            raise ValueError(f"the {part} labels of {paths[0].parent} are not class numbers below {len(classes)}")
    data = from_arrays(
        name,
        classes,
        {"train": train, "test": test},
        image_size=image_size,
        fit=fit,
        seed=seed,
        mean_std=(known.mean, known.std),
        fold=fold,
    )
    return replace(data, policy=known.policy, mirrors=known.mirrors)


def _find(name: str, file: File, data_dir: Path) -> Path:
    """Finds the user's file, which is used as it is, or downloads it and checks its md5 sum."""
    folders = [data_dir / name, data_dir, *([DEBIAN[name]] if name in DEBIAN else [])]
    for folder in folders:
        for candidate in (file.name, file.unpacked):
            if candidate is not None and (folder / candidate).exists():
                return folder / candidate
    path = data_dir / name / file.name
    write_safely(path, partial(_download, file, path))
    return path


def _download(file: File, path: Path, temporary: Path) -> None:
    try:
        with urlopen(file.url, timeout=30) as response, temporary.open("wb") as out:
            md5 = hashlib.md5(usedforsecurity=False)
            length = response.headers.get("Content-Length")
            with progress_bar(f"downloading {file.url}", int(length) if length else None, of_bytes=True) as advance:
                while block := response.read(1 << 20):
                    out.write(block)
                    md5.update(block)
                    advance(len(block))
    except (OSError, HTTPException) as error:
        raise ValueError(
            f"cannot download {file.url} ({_one_line(error)}): get that file and put it at {path}"
        ) from None
    if md5.hexdigest() != file.md5:
        raise ValueError(f"{file.url} came with the md5 sum {md5.hexdigest()}, not {file.md5}: try again later")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _members(archive: Path, folder: str, names: Iterable[str]) -> dict[str, bytes]:
    """Reads files of a tar archive without unpacking it, or of the folder that it was unpacked to."""
    wanted = {f"{folder}/{name}": name for name in names}
    if archive.is_dir():
        contents = {name: (archive / name).read_bytes() for name in wanted.values() if (archive / name).is_file()}
    else:
        contents = {}
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isreg() and member.name in wanted and (stream := tar.extractfile(member)) is not None:
                    contents[wanted[member.name]] = stream.read()
    if missing := [name for name in wanted.values() if name not in contents]:
        raise ValueError(f"{archive} has no {missing[0]}: it is not the official file, or is incomplete")
    return contents


def _read_cifar(
    paths: list[Path], *, folder: str, train: tuple[str, ...], test: str, names: str, label_bytes: int
) -> Arrays:
    """Reads records of the label bytes (the last is the label) and 3,072 image bytes, channel by channel."""
    (archive,) = paths
    members = _members(archive, folder, (*train, test, names))

    def records(*parts: str) -> Labelled:
        size = label_bytes + 3072
        for part in parts:
            if not members[part] or len(members[part]) % size:
                raise ValueError(f"{part} of {archive} has {len(members[part])} bytes, not a multiple of {size}")
        table = np.frombuffer(b"".join(members[part] for part in parts), np.uint8).reshape(-1, size)
        images = np.ascontiguousarray(table[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return Labelled(images, table[:, label_bytes - 1].astype(np.int32))

    return Arrays(tuple(members[names].decode(errors="replace").split()), records(*train), records(test))


def _read_svhn(paths: list[Path]) -> Arrays:
    import scipy.io  # slow to import

    def part(path: Path) -> Labelled:
        try:
            stored = scipy.io.loadmat(path, variable_names=["X", "y"])
            images, labels = stored["X"], stored["y"].ravel()
            if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2:] != (3, len(labels)):
                raise ValueError(f"X is {images.dtype} of shape {images.shape}, and there are {len(labels)} labels")
        except Exception as error:  # the reader raises almost any exception on damaged files
            raise ValueError(f"cannot read {path}: {_one_line(error)}") from None
        return Labelled(np.ascontiguousarray(images.transpose(3, 0, 1, 2)), (labels % 10).astype(np.int32))  # 10 is 0

    train, test = map(part, paths)
    return Arrays(DIGITS, train, test)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads a big-endian header (0, 0, 8 for bytes, number of dimensions, each dimension), then the bytes."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        magic, *shape = struct.unpack_from(f">I{dimensions}I", content)
    except Exception as error:  # not gzip, truncated, or shorter than its header
        raise ValueError(f"cannot read {path}: {_one_line(error)}") from None
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if magic != 0x0800 + dimensions:
        raise ValueError(
            f"{path} starts with {magic:#010x}, not {0x0800 + dimensions:#010x}: it is not an IDX file of this kind"
        )
    if data.size != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path} says it holds {' x '.join(map(str, shape))} bytes, but holds {data.size}")
    return data.reshape(shape)


def _read_mnist(paths: list[Path], *, classes: tuple[str, ...]) -> Arrays:
    def part(images: Path, labels: Path) -> Labelled:
        pixels, numbers = _read_idx(images, 3)[..., None], _read_idx(labels, 1)
        if len(pixels) != len(numbers):
            raise ValueError(f"{images} has {len(pixels)} images, but {labels} has {len(numbers)} labels")
        return Labelled(pixels, numbers.astype(np.int32))

    return Arrays(classes, part(*paths[:2]), part(*paths[2:]))


def _load_tiny_imagenet(
    name: str, archive: Path, size: tuple[int, int], fit: Fit, seed: int, cache_dir: Path, fold: Fold | None
) -> Dataset:
    try:
        with zipfile.ZipFile(archive) as zipped:
            classes, given = _list_tiny_imagenet(zipped)
    except Exception as error:  # not a zip file, truncated, a missing member, unexpected lines
        raise ValueError(f"cannot read {archive}: {_one_line(error)}") from None
    labels = {part: np.array([entry.label for entry in entries], np.int32) for part, entries in given.items()}
    rows, note = split_rest(labels, classes, seed, (entry.content for entry in given["train"]), fold=fold)
    parts = {
        part: given[source] if indices is None else [given[source][i] for i in indices]
        for part, (source, indices) in rows.items()
    }
    entries = [entry for part in parts.values() for entry in part]

    with zipfile.ZipFile(archive) as zipped:

        def open_member(member: str) -> BytesIO:
            try:
                return BytesIO(zipped.read(member))
            except OSError:  # a disk error, not the image's fault
                raise
            except Exception as error:  # a wrong checksum, damaged deflate data
                raise ValueError(_one_line(error)) from None

        files = [(partial(open_member, entry.member), entry.content) for entry in entries]
        images = decoded(files, size, 3, fit, cache_dir)
    if isinstance(images, dict):
        row, reason = next(iter(images.items()))
        raise ValueError(f"{archive} has {len(images)} bad images, such as {entries[row].member}: {reason}")

    splits, start = {}, 0
    for part, members in parts.items():
        end = start + len(members)
        numbers = np.array([entry.label for entry in members], np.int32)
        splits[part] = Split(images[start:end], numbers, [entry.member for entry in members])
        start = end
    preprocess = Preprocess(size, 3, fit, KNOWN[name].mean, KNOWN[name].std)
    return Dataset(
        name,
        tuple(classes),
        splits["train"],
        splits["val"],
        splits["test"],
        preprocess,
        (note,),
        given_test=splits.get(GIVEN_TEST),
    )


class Member(NamedTuple):
    member: str
    label: int
    content: str  # checksum and size


def _list_tiny_imagenet(zipped: zipfile.ZipFile) -> tuple[list[str], dict[str, list[Member]]]:
    """Lists the images. As usual, val is the test split: the labels of its test images are not public."""
    top = "tiny-imagenet-200"

    def lines(file: str) -> list[list[str]]:
        return [line.split("\t") for line in zipped.read(f"{top}/{file}").decode().splitlines()]

    wnids = sorted(wnid for (wnid,) in lines("wnids.txt"))
    label = {wnid: i for i, wnid in enumerate(wnids)}
    words = {wnid: text.split(",")[0] for wnid, text, *_ in lines("words.txt")}
    first = [words.get(wnid, wnid) for wnid in wnids]
    shared = {word for word, count in Counter(first).items() if count > 1}
    classes = [f"{word} ({wnid})" if word in shared else word for word, wnid in zip(first, wnids, strict=True)]

    def member(info: zipfile.ZipInfo, wnid: str) -> Member:
        return Member(info.filename, label[wnid], f"{info.CRC:08x} {info.file_size}")

    train = []
    for info in zipped.infolist():
        match info.filename.split("/"):
            case [_, "train", wnid, "images", file] if wnid in label and file:
                train.append(member(info, wnid))
    annotated = lines("val/val_annotations.txt")
    test = [member(zipped.getinfo(f"{top}/val/images/{file}"), wnid) for file, wnid, *_ in annotated]
    return classes, {"train": train, "test": test}


def _mnist_files(site: str, *md5: str) -> tuple[File, ...]:
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return tuple(File(f"{name}.gz", f"{site}/{name}.gz", sum_, name) for name, sum_ in zip(names, md5, strict=True))


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_STANFORD = "http://ufldl.stanford.edu/housenumbers"

KNOWN: Mapping[str, Known] = {
    "cifar10": Known(
        (
            File(
                "cifar-10-binary.tar.gz",
                f"{_TORONTO}/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                "cifar-10-batches-bin",
            ),
        ),
        partial(
            _read_cifar,
            folder="cifar-10-batches-bin",
            train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            test="test_batch.bin",
            names="batches.meta.txt",
            label_bytes=1,
        ),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        policy="cifar10",
    ),
    "cifar100": Known(
        (
            File(
                "cifar-100-binary.tar.gz",
                f"{_TORONTO}/cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
                "cifar-100-binary",
            ),
        ),
        partial(
            _read_cifar,
            folder="cifar-100-binary",
            train=("train.bin",),
            test="test.bin",
            names="fine_label_names.txt",
            label_bytes=2,
        ),
        (0.5070, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        policy="cifar10",
    ),
    "svhn": Known(
        (
            File("train_32x32.mat", f"{_STANFORD}/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
            File("test_32x32.mat", f"{_STANFORD}/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
        ),
        _read_svhn,
        (0.4377, 0.4438, 0.4728),
        (0.1980, 0.2010, 0.1970),
        policy="svhn",
        mirrors=False,
    ),
    "tiny-imagenet": Known(
        (
            File(
                "tiny-imagenet-200.zip",
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "90528d7ca1a48142e341f4ef8d21d0de",
            ),
        ),
        None,
        (0.4802, 0.4481, 0.3975),
        (0.2770, 0.2691, 0.2821),
    ),
    "fashion-mnist": Known(
        _mnist_files(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        partial(_read_mnist, classes=FASHION_CLASSES),
        (0.2860,),
        (0.3530,),
    ),
    "mnist": Known(
        _mnist_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist",  # no longer available from the authors' site
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        partial(_read_mnist, classes=DIGITS),
        (0.1307,),
        (0.3081,),
        mirrors=False,
    ),
}
