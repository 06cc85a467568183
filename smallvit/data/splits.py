"""Train, validation and test splits of what came without them, and the statistics of the pixels."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64, UInt

VAL_FRACTION = TEST_FRACTION = 0.1
Contents = Iterable[Hashable]  # a hash of each image


class Groups(NamedTuple):
    """Images that must not be torn apart: of one patient, one video, one place."""

    column: str  # its name in the table
    names: Sequence[str]  # of each image; "" belongs to no group

    def __str__(self) -> str:
        number = len({*self.names} - {""})
        return f"{number:,} group{'s' * (number != 1)} of `{self.column}`"


def stratified(
    labels: Int[np.ndarray, "n"],
    classes: Sequence[str],
    fractions: Sequence[float],
    seed: int,
    contents: Contents,
    groups: Groups | None = None,
) -> list[Int64[np.ndarray, "_"]]:
    """Indices of what is left to train on, then of each fraction, in every class alike.

    The first fraction has at least one image of each class, as has what is left. Images of equal content stay together,
    but for a class that has no two different ones. Images of one group stay together always: a class may then be
    missing in a fraction, and a fraction may be up to twice as large as asked for, or empty.
    """
    first = _first_alike(labels, contents)
    block = first if groups is None else _joined(first, groups.names)
    distinct = np.flatnonzero(first == np.arange(len(labels)))  # of equal images only one counts
    sizes: dict[int, dict[int, int]] = {}  # images of each class, by the block's number
    for number, label in zip(block[distinct].tolist(), labels[distinct].tolist(), strict=True):
        size = sizes.setdefault(number, {})
        size[label] = size.get(label, 0) + 1

    left, order = [], []
    wanted = [[0] * len(classes) for _ in fractions]
    rng = np.random.default_rng(seed)
    for label, name in enumerate(classes):
        members = rng.permutation(distinct[labels[distinct] == label])
        if len(members) < 2:
            number = int((labels == label).sum())
            raise ValueError(
                f"class {name!r} has {number} image{'s' * (number != 1)} to train and validate on: "
                "it needs at least 2, add some or leave the class out"
            )
        end = len(members)
        for i, fraction in enumerate(fractions):
            wanted[i][label] = min(max(1 if i == 0 else 0, round(fraction * len(members))), end - 1)
            end -= wanted[i][label]
        left.append(len(members))
        order += block[members[::-1]].tolist()
    blocks = list(dict.fromkeys(order))

    part_of = np.zeros(len(labels), np.int64)  # of each block: 0 is to train on
    have = [[0] * len(classes) for _ in fractions]

    def comes_nearer(number: int, part: int) -> bool:
        """Whether the part, with this block, is no further from what is wanted."""
        further = 0
        for label, count in sizes[number].items():
            missing = wanted[part][label] - have[part][label]
            further += abs(missing - count) - abs(missing)
        return further <= 0

    def can_go(number: int) -> bool:
        return all(count < left[label] for label, count in sizes[number].items())

    def hold_out(number: int, part: int) -> None:
        part_of[number] = part + 1
        for label, count in sizes[number].items():
            have[part][label] += count
            left[label] -= count

    for number in blocks:
        for part in range(len(fractions)):
            if comes_nearer(number, part) and can_go(number):
                hold_out(number, part)
                break
    for label in range(len(classes)):
        if have[0][label] == 0:  # its groups are large: the smallest of them, if it can be spared
            free = [number for number in blocks if label in sizes[number] and part_of[number] == 0 and can_go(number)]
            if free:
                hold_out(min(free, key=lambda number: sum(sizes[number].values())), 0)
    if not any(have[0]):
        raise ValueError(
            f"no images can be held out to validate: each of the {groups} has all images of a class; "
            "make smaller groups, or give a split"
        )
    parts = part_of[block]
    return [np.flatnonzero(parts == i) for i in range(1 + len(fractions))]


def _first_alike(labels: Int[np.ndarray, "n"], contents: Contents) -> Int64[np.ndarray, "n"]:
    """For each image the first one of the same content, or itself where its class would else have less than two."""
    seen: dict[Hashable, int] = {}
    first = np.array([seen.setdefault(content, i) for i, content in enumerate(contents)], np.int64)
    itself = np.arange(len(labels))
    for label in np.unique(labels):
        if ((labels == label) & (first == itself)).sum() < 2:
            first = np.where(labels == label, itself, first)
    return first


def _joined(first: Int64[np.ndarray, "n"], groups: Sequence[str]) -> Int64[np.ndarray, "n"]:
    """For each image the first one that a chain of equal contents and equal groups leads to."""
    parent = first.tolist()

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    seen: dict[str, int] = {}
    for i, group in enumerate(groups):
        if group:
            a, b = sorted((root(i), root(seen.setdefault(group, i))))
            parent[b] = a
    return np.array([root(i) for i in range(len(parent))], np.int64)


def split_rest(
    given: Mapping[str, Int[np.ndarray, "_"]],
    classes: Sequence[str],
    seed: int,
    contents: Contents,
    groups: Groups | None = None,
) -> tuple[dict[str, tuple[str, Int64[np.ndarray, "_"] | None]], str]:
    """For each split, which given one it comes from and which rows of it (None: all); and a line that says so.

    `contents` tells which images of train are alike, `groups` which of them belong together.
    """
    rows: dict[str, tuple[str, np.ndarray | None]]
    percent = f"{'about ' * (groups is not None)}{VAL_FRACTION:.0%}".replace("%", " %")
    by = "" if groups is None else f", split by {groups}, none of which is in two splits"
    if set(given) == {"train"}:
        train, val, test = stratified(given["train"], classes, (VAL_FRACTION, TEST_FRACTION), seed, contents, groups)
        rows = {"train": ("train", train), "val": ("train", val)}
        how = f"not split, so {percent} of each class are held out to validate and as many to test (seed {seed}){by}"
        if len(test):
            rows["test"] = ("train", test)
        else:
            how = (
                f"not split, so {percent} of each class are held out to validate (seed {seed}), too few to test too{by}"
            )
    elif "val" not in given:
        train, val = stratified(given["train"], classes, (VAL_FRACTION,), seed, contents, groups)
        rows = {"train": ("train", train), "val": ("train", val), "test": ("test", None)}
        how = f"train and test as given, {percent} of each class of train held out to validate (seed {seed}){by}"
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


def mean_and_std(images: UInt[np.ndarray, "n H W c"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of the pixels in [0, 1], one for each channel: exact, from counts of all levels, 256 or 65,536."""
    channels, top = images.shape[-1], np.iinfo(images.dtype).max
    counts = np.zeros((channels, top + 1), np.int64)
    for start in range(0, len(images), 512):
        chunk = images[start : start + 512]
        for channel in range(channels):
            counts[channel] += np.bincount(chunk[..., channel].ravel(), minlength=top + 1)
    values = np.arange(top + 1) / top
    weights = counts / counts.sum(axis=1, keepdims=True)
    means = weights @ values
    variances = (weights * (values - means[:, None]) ** 2).sum(axis=1)
    # At least one grey level, or images of a single colour would divide by zero.
    return tuple(map(float, means)), tuple(float(max(std, 1 / top)) for std in np.sqrt(variances))
