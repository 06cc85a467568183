"""Train, validation and test splits of what came without them, and the statistics of the pixels."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int, Int64, UInt8

VAL_FRACTION = TEST_FRACTION = 0.1
Contents = Iterable[Hashable]  # a hash of each image


def stratified(
    labels: Int[np.ndarray, "n"], classes: Sequence[str], fractions: Sequence[float], seed: int, contents: Contents
) -> list[Int64[np.ndarray, "_"]]:
    """Indices of what is left to train on, then of each fraction, in every class alike.

    The first fraction has at least one image of each class, as has what is left. Images of equal content stay together,
    but for a class that has no two different ones.
    """
    first = _first_alike(labels, contents)
    part_of = np.zeros(len(labels), np.int64)
    rng = np.random.default_rng(seed)
    for label, name in enumerate(classes):
        members = rng.permutation(np.flatnonzero((labels == label) & (first == np.arange(len(labels)))))
        if len(members) < 2:
            number = int((labels == label).sum())
            raise ValueError(
                f"class {name!r} has {number} image{'s' * (number != 1)} to train and validate on: "
                "it needs at least 2, add some or leave the class out"
            )
        end = len(members)
        for i, fraction in enumerate(fractions, start=1):
            least = 1 if i == 1 else 0
            size = min(max(least, round(fraction * len(members))), end - 1)
            part_of[members[end - size : end]] = i
            end -= size
    part_of = part_of[first]
    return [np.flatnonzero(part_of == i) for i in range(1 + len(fractions))]


def _first_alike(labels: Int[np.ndarray, "n"], contents: Contents) -> Int64[np.ndarray, "n"]:
    """For each image the first one of the same content, or itself where its class would else have less than two."""
    seen: dict[Hashable, int] = {}
    first = np.array([seen.setdefault(content, i) for i, content in enumerate(contents)], np.int64)
    itself = np.arange(len(labels))
    for label in np.unique(labels):
        if ((labels == label) & (first == itself)).sum() < 2:
            first = np.where(labels == label, itself, first)
    return first


def split_rest(
    given: Mapping[str, Int[np.ndarray, "_"]], classes: Sequence[str], seed: int, contents: Contents
) -> tuple[dict[str, tuple[str, Int64[np.ndarray, "_"] | None]], str]:
    """For each split, which given one it comes from and which rows of it (None: all); and a line that says so.

    `contents` tells which images of train are alike.
    """
    rows: dict[str, tuple[str, np.ndarray | None]]
    percent = f"{VAL_FRACTION:.0%}".replace("%", " %")
    if set(given) == {"train"}:
        train, val, test = stratified(given["train"], classes, (VAL_FRACTION, TEST_FRACTION), seed, contents)
        rows = {"train": ("train", train), "val": ("train", val)}
        how = f"not split, so {percent} of each class are held out to validate and as many to test (seed {seed})"
        if len(test):
            rows["test"] = ("train", test)
        else:
            how = f"not split, so {percent} of each class are held out to validate (seed {seed}), too few to test too"
    elif "val" not in given:
        train, val = stratified(given["train"], classes, (VAL_FRACTION,), seed, contents)
        rows = {"train": ("train", train), "val": ("train", val), "test": ("test", None)}
        how = f"train and test as given, {percent} of each class of train held out to validate (seed {seed})"
    else:
        rows = {part: (part, None) for part in ("train", "val", "test") if part in given}
        how = f"{' and '.join(rows) if len(rows) == 2 else 'train, val and test'} as given"
    sizes = ", ".join(
        f"{len(given[source]) if indices is None else len(indices):,} {part}"
        for part, (source, indices) in rows.items()
    )
    return rows, f"{sizes}: {how}"


def choose_size(sizes: Iterable[tuple[int, int]], short_sides: Int[np.ndarray, "n"]) -> tuple[int, int]:
    """The images' own size if they share a small one, else the largest usual size that most need not be enlarged to."""
    first, *others = set(sizes)
    if not others and max(first) <= 64:
        return first
    side = max([32, *(usual for usual in (64, 96) if usual <= np.median(short_sides))])
    return side, side


def mean_and_std(images: UInt8[np.ndarray, "n H W c"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of the pixels in [0, 1], one for each channel: exact, from counts of the 256 values."""
    channels = images.shape[-1]
    counts = np.zeros((channels, 256), np.int64)
    for start in range(0, len(images), 512):
        chunk = images[start : start + 512]
        for channel in range(channels):
            counts[channel] += np.bincount(chunk[..., channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    means = weights @ values
    variances = (weights * (values - means[:, None]) ** 2).sum(axis=1)
    # At least one grey level, or images of a single colour would divide by zero.
    return tuple(map(float, means)), tuple(float(max(std, 1 / 255)) for std in np.sqrt(variances))
