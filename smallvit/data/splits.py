"""Train, validation and test splits of data that has none, and pixel statistics."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64, UInt

VAL_FRACTION = TEST_FRACTION = 0.1
Contents = Iterable[Hashable]  # a hash of each image
Fold = tuple[int, int]  # number, from 1, and count
GIVEN_TEST = "given test"  # the test split of the source, if a fold is the test split


class Groups(NamedTuple):
    """Images that must stay in one split: of one patient, one video, one place."""

    column: str  # column name in the table
    names: Sequence[str]  # per image; "" for no group

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
    """Splits the images by class; returns the indices to train on, then those of each fraction.

    The first fraction and the training images have at least one image of each class. Images of equal content stay
    together, unless a class has no two different ones. Images of a group always stay together: a class may then be
    missing in a fraction, and a fraction may be empty or up to twice as large as requested.
    """
    first = _first_alike(labels, contents)
    block = first if groups is None else _joined(first, groups.names)
    distinct = np.flatnonzero(first == np.arange(len(labels)))  # equal images count once
    sizes: dict[int, dict[int, int]] = {}  # images per class, by block
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

    part_of = np.zeros(len(labels), np.int64)  # per block: 0 is train
    have = [[0] * len(classes) for _ in fractions]

    def comes_nearer(number: int, part: int) -> bool:
        """Whether adding this block brings the part no further from the wanted counts."""
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
        if have[0][label] == 0:  # large groups: take the smallest one that can be spared
            free = [number for number in blocks if label in sizes[number] and part_of[number] == 0 and can_go(number)]
            if free:
                hold_out(min(free, key=lambda number: sum(sizes[number].values())), 0)
    if not any(have[0]):
        raise ValueError(
            f"no images can be held out for validation: each of the {groups} has all images of a class; "
            "use smaller groups, or give a split"
        )
    parts = part_of[block]
    return [np.flatnonzero(parts == i) for i in range(1 + len(fractions))]


def _first_alike(labels: Int[np.ndarray, "n"], contents: Contents) -> Int64[np.ndarray, "n"]:
    """The first image with the same content; each image is its own if its class would have fewer than two."""
    seen: dict[Hashable, int] = {}
    first = np.array([seen.setdefault(content, i) for i, content in enumerate(contents)], np.int64)
    itself = np.arange(len(labels))
    for label in np.unique(labels):
        if ((labels == label) & (first == itself)).sum() < 2:
            first = np.where(labels == label, itself, first)
    return first


def _joined(first: Int64[np.ndarray, "n"], groups: Sequence[str]) -> Int64[np.ndarray, "n"]:
    """The first image that is connected to each image by a chain of equal contents and equal groups."""
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
    """Assigns each image to a fold, numbered from 1, and balances the classes over the folds.

    Images of equal content or of one group stay together. Blocks are assigned from the largest to the smallest, each to
    the fold where it increases the sum of the squared class shares least.
    """
    first = _first_alike(labels, contents)
    block = first if groups is None else _joined(first, groups.names)
    for label, name in enumerate(classes):
        if (distinct := len(np.unique(block[labels == label]))) < number:
            what = "different images" if groups is None else f"different images or groups of `{groups.column}`"
            raise ValueError(
                f"class {name!r} has {distinct} {what}, fewer than {number} folds: use fewer folds, or add images"
            )
    sizes: dict[int, dict[int, int]] = {}  # images per class, by block
    order = np.random.default_rng(seed).permutation(len(labels))
    for i, label in zip(block[order].tolist(), labels[order].tolist(), strict=True):
        size = sizes.setdefault(i, {})
        size[label] = size.get(label, 0) + 1

    total = np.bincount(labels, minlength=len(classes))
    have, filled = np.zeros((number, len(classes))), np.zeros(number)
    fold_of = np.zeros(len(labels), np.int64)  # per block
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
        raise ValueError(f"{number} fold{'s' * (number != 1)} cannot be both trained and tested on: use at least 2")
    if not 1 <= which <= number:
        raise ValueError(f"fold {which} of {number} does not exist: folds are numbered from 1")


def _split_fold(
    labels: Int[np.ndarray, "n"],
    classes: Sequence[str],
    seed: int,
    contents: Contents,
    groups: Groups | None,
    fold: Fold,
) -> tuple[Int64[np.ndarray, "_"], Int64[np.ndarray, "_"], Int64[np.ndarray, "_"]]:
    """The indices of train, validation and the fold. Fails if any fold is impossible."""
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
            raise ValueError(f"without fold {i} of {number}, {error}; or use another number of folds") from None
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
    """Maps each split to the given split and the rows it is made of (None: all), with a line that describes it.

    `contents` identifies equal training images, `groups` those that belong together. A `fold` of train becomes the test
    split, and a given test split is kept separately.
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
            f"fold {fold[0]} of {fold[1]} for testing, {percent} of each class of the others for validation "
            f"(seed {seed}){by}"
        )
    elif set(given) == {"train"}:
        train, val, test = stratified(given["train"], classes, (VAL_FRACTION, TEST_FRACTION), seed, contents, groups)
        rows = {"train": ("train", train), "val": ("train", val)}
        how = (
            f"not split, so {percent} of each class are held out for validation and as many for testing "
            f"(seed {seed}){by}"
        )
        if len(test):
            rows["test"] = ("train", test)
        else:
            how = (
                f"not split, so {percent} of each class are held out for validation (seed {seed}), "
                f"too few for testing{by}"
            )
    elif "val" not in given:
        train, val = stratified(given["train"], classes, (VAL_FRACTION,), seed, contents, groups)
        rows = {"train": ("train", train), "val": ("train", val), "test": ("test", None)}
        how = f"train and test as given, {percent} of each class of train held out for validation (seed {seed}){by}"
    else:
        rows = {part: (part, None) for part in ("train", "val", "test") if part in given}
        how = f"{' and '.join(rows) if len(rows) == 2 else 'train, val and test'} as given"
    sizes = ", ".join(
        f"{len(given[source]) if indices is None else len(indices):,} {part}"
        for part, (source, indices) in rows.items()
    )
    return rows, f"{sizes}: {how}"


def choose_size(sizes: Iterable[tuple[int, int]], short_sides: Int[np.ndarray, "n"]) -> tuple[int, int]:
    """The images' own size if they share a small one, else the largest usual size that most of them reach."""
    first, *others = set(sizes)
    if not others and max(first) <= 64:
        return first
    side = max([32, *(usual for usual in (64, 96) if usual <= np.median(short_sides))])
    return side, side


def mean_and_std(images: UInt[np.ndarray, "n H W c"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and standard deviation per channel of pixels in [0, 1], exact, from a histogram of all levels."""
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
    # At least one grey level: images of a single colour would divide by zero.
    return tuple(map(float, means)), tuple(float(max(std, 1 / top)) for std in np.sqrt(variances))
