"""Train, validation and test splits of what came without them, and the statistics of the pixels."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64, UInt

VAL_FRACTION = TEST_FRACTION = 0.1
Contents = Iterable[Hashable]  # a hash of each image
Fold = tuple[int, int]  # its number, from 1, and how many there are
GIVEN_TEST = "given test"  # the test images that the data came with, where a fold is the test split


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


def deal_folds(
    labels: Int[np.ndarray, "n"],
    classes: Sequence[str],
    number: int,
    seed: int,
    contents: Contents,
    groups: Groups | None = None,
) -> Int64[np.ndarray, "n"]:
    """The fold of each image, from 1: every class in all folds alike, images of equal content or of one group together.

    The largest blocks are dealt first, each to the fold in which the squares of the classes' shares then grow least.
    """
    first = _first_alike(labels, contents)
    block = first if groups is None else _joined(first, groups.names)
    for label, name in enumerate(classes):
        if (found := len(np.unique(block[labels == label]))) < number:
            what = "different images" if groups is None else f"different images or groups of `{groups.column}`"
            raise ValueError(
                f"class {name!r} has {found} {what}, fewer than {number} folds: take fewer folds, or add some"
            )
    sizes: dict[int, dict[int, int]] = {}  # images of each class, by the block's number
    order = np.random.default_rng(seed).permutation(len(labels))
    for i, label in zip(block[order].tolist(), labels[order].tolist(), strict=True):
        size = sizes.setdefault(i, {})
        size[label] = size.get(label, 0) + 1

    total = np.bincount(labels, minlength=len(classes))
    have, filled = np.zeros((number, len(classes))), np.zeros(number)
    fold_of = np.zeros(len(labels), np.int64)  # of each block
    for i, size in sorted(sizes.items(), key=lambda item: (-sum(item[1].values()), min(item[1]))):
        present, counts = np.array([*size]), np.array([*size.values()])
        share = (have[:, present] / total[present]) @ counts
        fold = np.lexsort((filled, share))[0]
        have[fold, present] += counts
        filled[fold] += counts.sum()
        fold_of[i] = fold + 1
    return fold_of[block]


def check_fold(fold: Fold) -> None:
    which, number = fold
    if number < 2:
        raise ValueError(f"{number} fold{'s' * (number != 1)} cannot be trained on and tested: take at least 2")
    if not 1 <= which <= number:
        raise ValueError(f"fold {which} of {number} does not exist: they are numbered from 1")


def _split_fold(
    labels: Int[np.ndarray, "n"],
    classes: Sequence[str],
    seed: int,
    contents: Contents,
    groups: Groups | None,
    fold: Fold,
) -> tuple[Int64[np.ndarray, "_"], Int64[np.ndarray, "_"], Int64[np.ndarray, "_"]]:
    """Indices to train on, to validate on, and of the fold. All folds must be possible, or none is."""
    check_fold(fold)
    which, number = fold
    contents = list(contents)
    fold_of = deal_folds(labels, classes, number, seed, contents, groups)
    parts = []
    for i in range(1, number + 1):
        rest = np.flatnonzero(fold_of != i)
        inside = None if groups is None else Groups(groups.column, [groups.names[row] for row in rest.tolist()])
        try:
            train, val = stratified(
                labels[rest], classes, (VAL_FRACTION,), seed, [contents[row] for row in rest], inside
            )
        except ValueError as error:
            raise ValueError(f"without fold {i} of {number}, {error}; or take another number of folds") from None
        parts.append((rest[train], rest[val], np.flatnonzero(fold_of == i)))
    return parts[which - 1]


def split_rest(
    given: Mapping[str, Int[np.ndarray, "_"]],
    classes: Sequence[str],
    seed: int,
    contents: Contents,
    groups: Groups | None = None,
    fold: Fold | None = None,
) -> tuple[dict[str, tuple[str, Int64[np.ndarray, "_"] | None]], str]:
    """For each split, which given one it comes from and which rows of it (None: all); and a line that says so.

    `contents` tells which images of train are alike, `groups` which of them belong together. A `fold` of train becomes
    the test split, and a given one is kept apart.
    """
    rows: dict[str, tuple[str, np.ndarray | None]]
    percent = f"{'about ' * (groups is not None)}{VAL_FRACTION:.0%}".replace("%", " %")
    by = "" if groups is None else f", split by {groups}, none of which is in two splits"
    if fold is not None:
        train, val, test = _split_fold(given["train"], classes, seed, contents, groups, fold)
        rows = {"train": ("train", train), "val": ("train", val), "test": ("train", test)}
        if "test" in given:
            rows[GIVEN_TEST] = ("test", None)
        how = (
            f"fold {fold[0]} of {fold[1]} to test, {percent} of each class of the others to validate (seed {seed}){by}"
        )
    elif set(given) == {"train"}:
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
