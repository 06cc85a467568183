"""Images that are nearly equal across splits: the same picture saved again, resized or brightened, frames of a video.

The nearest training image is sought among grey thumbnails of 8 x 8, and it counts if thumbnails of 16 x 16 in all
channels correlate almost fully. How much is "almost" depends on the set: photographs of many things hardly correlate,
but trousers on a black background all do. docs/training.md has what it finds in real sets.
"""

from collections.abc import Container, Mapping

import numpy as np
from jaxtyping import Float, Float32, UInt

from smallvit.data.dataset import Split
from smallvit.data.listing import count, some

COARSE, FINE = 8, 16
ALIKE = 0.025  # 1 - correlation: of photographs saved again as JPEG of quality 30, 99 % are nearer
USUAL = 8  # so many times nearer than images of different classes are to each other
SAMPLED = 128  # held-out images that tell how near these are
CHUNK = 2**24  # values of a matrix at once


def near_notes(splits: Mapping[str, Split], known: Mapping[str, Container[int]] | None = None) -> list[str]:
    """A warning for each held-out split with images that nearly equal training images, but for those rows of it."""
    notes = []
    for part, pairs in near_duplicates(splits).items():
        pairs = [(a, b) for a, b in pairs if known is None or b not in known[part]]
        if pairs:
            names = [f"{splits['train'].names[a]} ~ {splits[part].names[b]}" for a, b in pairs]
            notes.append(f"warning: {count(pairs, 'image')} of {part} nearly equal in train: {some(names)}")
    return notes


def near_duplicates(splits: Mapping[str, Split]) -> dict[str, list[tuple[int, int]]]:
    """By held-out split, nearest first: the row in train and the row of the image that nearly equals it."""
    train = splits["train"]
    seen = _unit(_thumbnails(train.images, COARSE, grey=True))
    return {part: _near(train, seen, split) for part, split in splits.items() if part != "train"}


def _near(train: Split, seen: Float32[np.ndarray, "n m"], held_out: Split) -> list[tuple[int, int]]:
    asked = _unit(_thumbnails(held_out.images, COARSE, grey=True))
    nearest = np.empty(len(held_out), np.int64)
    step = max(CHUNK // len(train), 1)
    for start in range(0, len(held_out), step):
        nearest[start : start + step] = (asked[start : start + step] @ seen.T).argmax(axis=1)

    sample = np.unique(np.linspace(0, len(held_out) - 1, SAMPLED).astype(np.int64))
    others = asked[sample] @ seen.T
    others[held_out.labels[sample][:, None] == train.labels[None]] = -1
    limit = min(ALIKE, float(np.median(1 - others.max(axis=1))) / USUAL)

    distance = np.empty(len(held_out), np.float32)
    for start in range(0, len(held_out), 512):
        rows = slice(start, start + 512)
        a = _unit(_thumbnails(held_out.images[rows], FINE, grey=False))
        b = _unit(_thumbnails(train.images[nearest[rows]], FINE, grey=False))
        distance[rows] = 1 - (a * b).sum(axis=1)
    found = np.flatnonzero(distance <= limit)
    return [(int(nearest[row]), int(row)) for row in found[np.argsort(distance[found], kind="stable")]]


def _thumbnails(images: UInt[np.ndarray, "n H W c"], side: int, *, grey: bool) -> Float32[np.ndarray, "n side k"]:
    """Means over the squares of a grid, of all channels together or each; k is the width times the channels."""
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
    """What each pixel of a line counts in each of `side` equal parts of it."""
    ends = np.arange(side + 1) * size / side
    pixels = np.arange(size)
    overlap = np.minimum(ends[1:, None], pixels + 1) - np.maximum(ends[:-1, None], pixels)
    return overlap.clip(0) * side / size


def _unit(thumbnails: Float32[np.ndarray, "n side k"]) -> Float32[np.ndarray, "n m"]:
    """Of mean 0 in each channel and length 1, so that a product is the correlation; flat ones are 0 and equal none."""
    n, side, width = thumbnails.shape
    flat = thumbnails.reshape(n, side * side, width // side)
    flat = (flat - flat.mean(axis=1, keepdims=True)).reshape(n, -1)
    spread = np.sqrt((flat**2).mean(axis=1, keepdims=True))
    return np.where(spread >= 1, flat, 0) / np.maximum(spread * flat.shape[1] ** 0.5, 1)
