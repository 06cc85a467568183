"""Nearly equal images across splits."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from smallvit.data import Split, load_data
from smallvit.data.near import near_duplicates


def photo(seed: int, side: int = 120) -> Image.Image:
    """Blobs of colour and fine structure, like a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    fine = Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    return Image.blend(coarse, fine, 0.3)


def album(folder: Path) -> Path:
    for i in range(60):
        part = "train" if i < 40 else "val" if i < 50 else "test"
        (folder / part / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        photo(i).save(folder / part / "ab"[i % 2] / f"{i}.png")
    return folder


CHANGES = {
    "jpeg": lambda image, path: image.save(path.with_suffix(".jpg"), quality=30),
    "smaller": lambda image, path: image.resize((60, 60)).save(path),
    "brighter": lambda image, path: ImageEnhance.Brightness(image).enhance(1.1).save(path),
    "other bytes": lambda image, path: image.save(path.with_suffix(".bmp")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_altered_copy_is_named(tmp_path: Path, change: str):
    folder = album(tmp_path / "album")
    CHANGES[change](photo(4), folder / "val/b/copy.png")
    (folder / "test/a/same.png").write_bytes((folder / "train/a/2.png").read_bytes())
    warnings = [note for note in load_data(folder, cache_dir=tmp_path / "cache").notes if "warning" in note]
    (copy,) = (folder / "val/b").glob("copy.*")
    assert warnings == [
        "warning: 1 image of test also in train: test/a/same.png = train/a/2.png",
        f"warning: 1 image of val nearly equal in train: val/b/{copy.name} ~ train/a/4.png",
    ]


def split(images: np.ndarray) -> Split:
    return Split(images, (np.arange(len(images)) % 2).astype(np.int32), [str(i) for i in range(len(images))])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_flat_and_unlike_images_are_none(dtype: type, channels: int):
    rng = np.random.default_rng(0)
    top = np.iinfo(dtype).max
    flat = np.broadcast_to(rng.integers(0, top, (40, 1, 1, 1)), (40, 20, 24, channels)).astype(dtype)
    noise = rng.integers(0, top, (40, 20, 24, channels)).astype(dtype)
    assert near_duplicates({"train": split(flat), "test": split(flat)}) == {"test": []}
    assert near_duplicates({"train": split(noise[:20]), "test": split(noise[20:])}) == {"test": []}
    swapped = np.concatenate([noise[30:], noise[5:6] // 2 + top // 4])
    found = near_duplicates({"train": split(noise[:30]), "val": split(noise[25:35]), "test": split(swapped)})
    assert sorted(found["val"]) == [(25 + i, i) for i in range(5)]
    assert found["test"] == [(5, 10)]


def test_sets_whose_images_are_all_alike():
    """A shape that all images share does not make them copies of each other."""
    rng = np.random.default_rng(0)
    shape = np.zeros((28, 28, 1))
    shape[4:24, 8:20] = 200
    images = (shape + rng.integers(0, 40, (200, 28, 28, 1))).astype(np.uint8)
    assert near_duplicates({"train": split(images[:150]), "test": split(images[150:])}) == {"test": []}
    copy = np.concatenate([images[150:], images[7:8]])
    assert near_duplicates({"train": split(images[:150]), "test": split(copy)}) == {"test": [(7, 50)]}


def test_arrays_are_compared_too(tmp_path: Path):
    images = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3)).astype(np.uint8)
    labels = np.arange(40) % 2
    test = np.concatenate([images[30:], images[3:4]])
    np.savez(
        tmp_path / "a.npz",
        train_images=images[:30],
        train_labels=labels[:30],
        test_images=test,
        test_labels=labels[:11],
    )
    notes = load_data(tmp_path / "a.npz").notes
    assert [note for note in notes if "warning" in note][-1].endswith(
        "of test nearly equal in train: test[10] ~ train[3]"
    )
