"""Near-duplicates across splits: a picture saved again, resized or brightened, or frames of a video.

The nearest training image is found by grey thumbnails of 8 x 8. It counts if colour thumbnails of 16 x 16 are almost
perfectly correlated. The threshold depends on the data set: photographs of many things hardly correlate, but trousers
on a black background all do. docs/training.md shows what it finds in real data sets.
"""

from collections.abc import Container, Mapping

import numpy as np
from jaxtyping import Float, Float32, UInt

from smallvit.data.dataset import Split
from smallvit.data.listing import count, first_few

COARSE, FINE = 8, 16
ALIKE = 0.025  # 1 - correlation; 99 % of photographs saved again as JPEG of quality 30 are below this
USUAL = 8  # how many times nearer than images of different classes are to each other
SAMPLED = 128  # held-out images used to estimate that distance
CHUNK = 2**24  # matrix elements computed at once


def near_notes(splits: Mapping[str, Split], known: Mapping[str, Container[int]] | None = None) -> list[str]:
    """Warns of images in each held-out split that nearly equal training images, except the rows in `known`."""
    notes = []
    for part, pairs in near_duplicates(splits).items():
        pairs = [(a, b) for a, b in pairs if known is None or b not in known[part]]
        if pairs:
            names = [f"{splits[part].names[b]} ~ {splits['train'].names[a]}" for a, b in pairs]
            notes.append(f"warning: {count(pairs, 'image')} of {part} nearly equal in train: {first_few(names)}")
    return notes


def near_duplicates(splits: Mapping[str, Split]) -> dict[str, list[tuple[int, int]]]:
    """The near-duplicates of each held-out split, nearest first: the row in train and the row in the split."""
    train = splits["train"]
    seen = _unit(_thumbnails(train.images, COARSE, grey=True))
    return {part: _near(train, seen, split) for part, split in splits.items() if part != "train"}


def _near(train: Split, seen: Float32[np.ndarray, "n m"], held_out: Split) -> list[tuple[int, int]]:
    queries = _unit(_thumbnails(held_out.images, COARSE, grey=True))
    nearest = np.empty(len(held_out), np.int64)
    step = max(CHUNK // len(train), 1)
    for start in range(0, len(held_out), step):
        nearest[start : start + step] = (queries[start : start + step] @ seen.T).argmax(axis=1)

    sample = np.unique(np.linspace(0, len(held_out) - 1, SAMPLED).astype(np.int64))
    others = queries[sample] @ seen.T
    others[held_out.labels[sample][:, None] == train.labels[None]] = -1
    limit = min(ALIKE, float(np.median(1 - others.max(axis=1))) / USUAL)

    distance = np.empty(len(held_out), np.float32)
    for start in range(0, len(held_out), 512):
        rows = slice(start, start + 512)
        a = _unit(_thumbnails(held_out.images[rows], FINE, grey=False))
        b = _unit(_thumbnails(train.images[nearest[rows]], FINE, grey=False))
        distance[rows] = 1 - (a * b).sum(axis=1)
    rows_found = np.flatnonzero(distance <= limit)
    return [(int(nearest[row]), int(row)) for row in rows_found[np.argsort(distance[rows_found], kind="stable")]]


def _thumbnails(images: UInt[np.ndarray, "n H W c"], side: int, *, grey: bool) -> Float32[np.ndarray, "n side k"]:
    """Averages over the cells of a grid, of all channels together or each; k is the width times the channels."""
    n, height, width, channels = images.shape
    mixed = np.full((channels, 1), 1 / channels) if grey else np.eye(channels)
    across = np.kron(_means(width, side).T, mixed).astype(np.float32)
    down = _means(height, side).astype(np.float32)
    small = np.empty((n, side, across.shape[1]), np.float32)
    for start in range(0, n, 512):
        rows = images[start : start + 512].astype(np.float32).reshape(-1, width * channels) @ across
        small[start : start + 512] = down @ rows.reshape(-1, height, across.shape[1])
    return small


def _means(size: int, side: int) -> Float[np.ndarray, "side size"]:
    """The weight of each pixel of a line in each of `side` equal parts."""
    ends = np.arange(side + 1) * size / side
    pixels = np.arange(size)
    overlap = np.minimum(ends[1:, None], pixels + 1) - np.maximum(ends[:-1, None], pixels)
    return overlap.clip(0) * side / size


def _unit(thumbnails: Float32[np.ndarray, "n side k"]) -> Float32[np.ndarray, "n m"]:
    """Centres each channel and scales to unit length, so a product is the correlation; flat thumbnails become 0."""
    n, side, width = thumbnails.shape
    flat = thumbnails.reshape(n, side * side, width // side)
    flat = (flat - flat.mean(axis=1, keepdims=True)).reshape(n, -1)
    spread = np.sqrt((flat**2).mean(axis=1, keepdims=True))
    return np.where(spread >= 1, flat, 0) / np.maximum(spread * flat.shape[1] ** 0.5, 1)
