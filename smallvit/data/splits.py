"""Train, validation and test splits of what came without them, and the statistics of the pixels."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int, Int64, UInt8

VAL_FRACTION = TEST_FRACTION = 0.1


def stratified(
    labels: Int[np.ndarray, "n"], classes: Sequence[str], fractions: Sequence[float], seed: int
) -> list[Int64[np.ndarray, "_"]]:
    """Indices of what is left to train on, then of each fraction, in every class alike.

    The first fraction has at least one image of each class, as has what is left.
    """
    rng = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[] for _ in range(1 + len(fractions))]
    for label, name in enumerate(classes):
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(members) < 2:
            raise ValueError(
                f"class {name!r} has {len(members)} image{'s' * (len(members) != 1)} to train and validate on: "
                "it needs at least 2, add some or leave the class out"
            )
        end = len(members)
        for i, fraction in enumerate(fractions, start=1):
            least = 1 if i == 1 else 0
            size = min(max(least, round(fraction * len(members))), end - 1)
            parts[i].append(members[end - size : end])
            end -= size
        parts[0].append(members[:end])
    return [np.sort(np.concatenate(part)) for part in parts]


def split_rest(
    given: Mapping[str, Int[np.ndarray, "_"]], classes: Sequence[str], seed: int
) -> tuple[dict[str, tuple[str, Int64[np.ndarray, "_"] | None]], str]:
    """For each split, which given one it comes from and which rows of it (None: all); and a line that says so."""
    rows: dict[str, tuple[str, np.ndarray | None]]
    percent = f"{VAL_FRACTION:.0%}".replace("%", " %")
    if set(given) == {"train"}:
        train, val, test = stratified(given["train"], classes, (VAL_FRACTION, TEST_FRACTION), seed)
        rows = {"train": ("train", train), "val": ("train", val)}
        how = f"not split, so {percent} of each class are held out to validate and as many to test (seed {seed})"
        if len(test):
            rows["test"] = ("train", test)
        else:
            how = f"not split, so {percent} of each class are held out to validate (seed {seed}), too few to test too"
    elif "val" not in given:
        train, val = stratified(given["train"], classes, (VAL_FRACTION,), seed)
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
