"""Folders of images: layouts, splits, skipped files, warnings, the cache."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from smallvit.data import find_images, load_data, scan_data
from smallvit.data.listing import natural


def save(path: Path, seed: int, size: tuple[int, int] = (8, 8), channels: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, channels), np.uint8)
    Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(path)


def make(folder: Path, **counts: int) -> Path:
    """{"a": 3, "train/b": 2} becomes a/0.png ... with a different image in each."""
    seed = 0
    for name, count in counts.items():
        for i in range(count):
            save(folder / name / f"{i}.png", seed := seed + 1)
    return folder


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_plain_folder_is_split(tmp_path: Path, cache: Path):
    folder = make(tmp_path / "pets", class10=20, class9=10, Class2=2)
    data = load_data(folder, cache_dir=cache)
    assert data.name == "pets"
    assert data.classes == ("Class2", "class9", "class10")
    assert data.test is not None
    assert [np.bincount(s.labels, minlength=3).tolist() for s in (data.train, data.val, data.test)] == [
        [1, 8, 16],
        [1, 1, 2],
        [0, 1, 2],
    ]
    assert data.notes[:2] == (
        "32 images of 3 classes, from 2 (Class2) to 20 (class10) of each, all 8 x 8",
        "25 train, 4 val, 3 test: not split, so 10 % of each class are held out for validation and as many for testing "
        "(seed 0)",
    )
    names = [*data.train.names, *data.val.names, *data.test.names]
    assert sorted(names) == sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    for split in (data.train, data.val, data.test):
        assert isinstance(split.images, np.memmap)
        for image, label, name in zip(split.images, split.labels, split.names, strict=True):
            assert data.classes[label] == name.split("/")[0]
            np.testing.assert_array_equal(image, np.asarray(Image.open(folder / name)))
    assert load_data(folder, cache_dir=cache).val.names == data.val.names
    assert load_data(folder, cache_dir=cache, seed=1).val.names != data.val.names


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Val"])
def test_split_folder_is_kept(tmp_path: Path, cache: Path, val: str):
    folder = make(tmp_path, **{"train/a": 3, "train/b": 4, f"{val}/a": 2, f"{val}/b": 1, "test/a": 1, "test/b": 1})
    data = load_data(folder, cache_dir=cache)
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (7, 3, 2)
    assert {name.split("/")[0] for name in data.val.names} == {val}
    assert "7 train, 3 val, 2 test: train, val and test as given" in data.notes


def test_train_and_val_have_no_test(tmp_path: Path, cache: Path):
    data = load_data(make(tmp_path, **{"train/a": 3, "train/b": 1, "val/a": 2, "val/b": 1}), cache_dir=cache)
    assert data.test is None
    assert (len(data.train), len(data.val)) == (4, 3)


def test_val_is_taken_from_train(tmp_path: Path, cache: Path):
    data = load_data(make(tmp_path, **{"train/a": 20, "train/b": 3, "test/a": 2, "notes": 0}), cache_dir=cache)
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (20, 3, 2)
    assert np.bincount(data.val.labels).tolist() == [2, 1]
    assert "test has no images of b" in data.notes


def test_train_alone_is_split(tmp_path: Path, cache: Path):
    data = load_data(make(tmp_path, **{"train/a": 20, "train/b": 10}), cache_dir=cache)
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (24, 3, 3)


def test_nested_files_count_and_others_do_not(tmp_path: Path, cache: Path):
    folder = make(tmp_path, a=2, b=2)
    save(folder / "a" / "deep" / "er" / "x.PNG", 90)
    save(folder / ".hidden" / "x.png", 91)
    save(folder / "a" / ".x.png", 92)
    save(folder / "a" / ".thumbnails" / "x.png", 93)
    save(folder / "stray.png", 94)
    (folder / "a" / "Thumbs.db").write_bytes(b"x")
    (folder / "b" / "notes.txt").write_text("x")
    data = load_data(folder, cache_dir=cache)
    assert sorted([*data.train.names, *data.val.names]) == [
        "a/0.png",
        "a/1.png",
        "a/deep/er/x.PNG",
        "b/0.png",
        "b/1.png",
    ]
    assert data.test is None
    assert f"ignored 1 images in {folder.name} outside of class folders" in data.notes


def test_grey_only_if_all_are(tmp_path: Path, cache: Path):
    for i in range(4):
        save(tmp_path / "ab"[i % 2] / f"{i}.png", i, channels=1)
    assert load_data(tmp_path, cache_dir=cache).train.images.shape[1:] == (8, 8, 1)
    save(tmp_path / "a" / "9.png", 9)
    assert load_data(tmp_path, cache_dir=cache).preprocess.channels == 3


def test_sizes(tmp_path: Path, cache: Path):
    for i in range(4):
        save(tmp_path / "ab"[i % 2] / f"{i}.png", i, size=(70 + i, 100))
    data = load_data(tmp_path, cache_dir=cache)
    assert data.preprocess.size == (64, 64)
    assert "from 70 x 100 to 73 x 100 pixels" in data.notes[0]
    assert load_data(tmp_path, image_size=(20, 30), fit="pad", cache_dir=cache).train.images.shape[1:] == (20, 30, 3)


def test_images_to_train_on_have_a_reserve(tmp_path: Path, cache: Path):
    for i in range(30):
        save(tmp_path / "data" / "ab"[i % 2] / f"{i}.png", i, size=(40, 70 + i))
    folder = tmp_path / "data"
    settings: dict[str, Any] = dict(image_size=(20, 30), cache_dir=cache)
    plain, large = load_data(folder, **settings), load_data(folder, **{**settings, "image_size": (28, 42)})
    blank, decode = scan_data(folder, **settings, reserve=1.4)
    data = decode()
    assert data.test is not None
    assert plain.test is not None
    assert plain.larger is None
    assert plain.to_augment is plain.train.images
    for a, b in ((data.train, plain.train), (data.val, plain.val), (data.test, plain.test)):
        np.testing.assert_array_equal(a.images, b.images)
    assert (data.preprocess, data.notes) == (plain.preprocess, plain.notes)
    np.testing.assert_array_equal(data.to_augment, large.train.images)
    assert blank.to_augment.shape == data.to_augment.shape
    assert not blank.to_augment.any()

    both = data.with_validation_in_training()
    wanted = np.concatenate([large.train.images, large.val.images])
    np.testing.assert_array_equal(both.to_augment, wanted)
    assert len(both.train) == len(wanted)


@pytest.mark.parametrize(
    "fit, sides, reserve, larger",
    [
        ("crop", [(40, 90)] * 4, 2.0, (40, 40)),
        ("crop", [(40, 90)] * 4, 1.5, (30, 30)),
        ("crop", [(40, 90)] * 2 + [(20, 20)] * 2, 2.0, (40, 40)),
        ("crop", [(40, 90)] + [(32, 26)] * 2 + [(20, 20)], 2.0, (26, 26)),
        ("pad", [(40, 10)] * 4, 2.0, (40, 40)),
        ("crop", [(40, 90)] * 4, 1.0, None),
        ("crop", [(40, 90)] + [(20, 20)] * 3, 2.0, None),
        ("crop", [(21, 21)] * 4, 2.0, None),
    ],
)
def test_the_reserve_is_one_that_half_of_the_files_reach(
    tmp_path: Path,
    cache: Path,
    fit: Literal["crop", "pad"],
    sides: list[tuple[int, int]],
    reserve: float,
    larger: tuple[int, int] | None,
):
    for i, size in enumerate(sides):
        save(tmp_path / "ab"[i % 2] / f"{i}.png", i, size=size)
    blank, _ = scan_data(tmp_path, image_size=20, fit=fit, cache_dir=cache, reserve=reserve)
    assert (None if blank.larger is None else blank.larger.shape[1:3]) == larger


def test_grey_images_with_a_reserve_become_rgb(tmp_path: Path, cache: Path):
    for i in range(4):
        save(tmp_path / "ab"[i % 2] / f"{i}.png", i, size=(16, 16), channels=1)
    data = scan_data(tmp_path, image_size=8, cache_dir=cache, reserve=2.0).decode()
    assert data.to_augment.shape[1:] == (16, 16, 1)
    coloured = data.normalised((0.5,) * 3, (0.2,) * 3).to_augment
    np.testing.assert_array_equal(coloured, np.repeat(data.to_augment, 3, axis=3))


def test_unreadable_files_are_skipped_and_named(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]):
    folder = make(tmp_path / "pets", a=4, b=4)
    (folder / "a" / "empty.jpg").write_bytes(b"")
    (folder / "b" / "text.jpg").write_text("no image")
    whole = (folder / "a" / "0.png").read_bytes()
    (folder / "b" / "torn.png").write_bytes(whole[: len(whole) // 2])
    for expected in ("decoding", None):  # the second time, what is torn is known from the cache
        data = load_data(folder, cache_dir=cache)
        printed = capfd.readouterr().err
        assert ("decoding" in printed) == (expected is not None)
        assert len(data.train) + len(data.val) == 8
        note = next(note for note in data.notes if note.startswith("skipped"))
        assert note.startswith("skipped 3 files that cannot be read: a/empty.jpg: ")
        assert "b/torn.png" in note
    # The last image of a class may be a torn one.
    (folder / "c").mkdir()
    for i in range(3):
        (folder / "c" / f"{i}.png").write_bytes(whole[: len(whole) // 2 + i])
    with pytest.raises(ValueError, match=r"fewer than 2 images: 'c' \(0\).*skipped 6 files"):
        load_data(folder, cache_dir=cache)


def test_what_is_known_before_anything_is_decoded(tmp_path: Path, cache: Path):
    folder = make(tmp_path / "pets", a=30, b=20)
    torn = folder / "b" / "torn.png"
    torn.write_bytes((folder / "a" / "0.png").read_bytes()[:-40])
    blank, decode = scan_data(folder, cache_dir=cache)
    assert not [*cache.iterdir()]
    assert len(blank.train) + len(blank.val) + len(blank.test or ()) == 51
    assert not blank.train.images.any()
    assert (blank.preprocess.mean, blank.preprocess.std) == ((0, 0, 0), (1, 1, 1))
    data = decode()
    assert (data.classes, data.preprocess.size) == (blank.classes, blank.preprocess.size)
    assert data.train.images.shape[1:] == blank.train.images.shape[1:]
    assert data.train.images.any()
    assert len(data.train) + len(data.val) + len(data.test or ()) == 50
    assert data.names != blank.names
    torn.unlink()
    blank, decode = scan_data(folder, cache_dir=cache)
    data = decode()
    assert data.names == blank.names
    np.testing.assert_array_equal(data.train.labels, blank.train.labels)


def test_duplicates_are_named(tmp_path: Path, cache: Path):
    folder = make(tmp_path, **{"train/a": 3, "train/b": 3, "val/a": 1, "val/b": 1, "test/a": 1, "test/b": 1})
    same = (folder / "train/a/1.png").read_bytes()
    (folder / "val/a/copy.png").write_bytes(same)
    (folder / "test/b/copy.png").write_bytes(same)
    notes = load_data(folder, cache_dir=cache).notes
    assert "warning: 1 image of val also in train: val/a/copy.png = train/a/1.png" in notes
    assert "warning: 1 image of test also in train: test/b/copy.png = train/a/1.png" in notes
    assert "warning: 1 image in two classes: train/a/1.png = test/b/copy.png" in notes
    assert not any("warning" in note for note in load_data(make(tmp_path / "x", a=3, b=3), cache_dir=cache).notes)


def test_duplicates_stay_on_one_side(tmp_path: Path, cache: Path):
    folder = make(tmp_path, a=20, b=20)
    for path in list(folder.rglob("*.png")):
        path.with_name(f"copy-of-{path.name}").write_bytes(path.read_bytes())
    for seed in range(3):
        data = load_data(folder, cache_dir=cache, seed=seed)
        assert data.test is not None
        assert (len(data.train), len(data.val), len(data.test)) == (64, 8, 8)
        assert not any("warning" in note for note in data.notes)


def test_cache_is_reused_and_mended(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]):
    folder = make(tmp_path / "pets", a=4, b=4)

    def loaded() -> tuple[np.ndarray, bool]:
        data = load_data(folder, cache_dir=cache)
        return np.concatenate([data.train.images, data.val.images]), "decoding" in capfd.readouterr().err

    first, decoded = loaded()
    assert decoded
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    again, decoded = loaded()
    assert not decoded
    np.testing.assert_array_equal(again, first)
    for damaged in (whole[:-1], whole[:50], b"", whole + b"x", b"x" * len(whole)):
        entry.write_bytes(damaged)
        again, decoded = loaded()
        assert decoded
        np.testing.assert_array_equal(again, first)
        assert [path.name for path in cache.iterdir()] == [entry.name]
    # Other content under the same name, of the same length and age, is another image.
    target, source = folder / "a" / "0.png", folder / "b" / "0.png"
    times = target.stat()
    target.write_bytes(source.read_bytes().ljust(times.st_size, b"\0")[: times.st_size])
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    again, decoded = loaded()
    assert decoded
    assert not np.array_equal(again, first)


def test_two_processes_at_once(tmp_path: Path, cache: Path):
    folder = make(tmp_path / "pets", a=40, b=40)
    program = (
        "import sys; from smallvit.data import load_data; d = load_data(sys.argv[1], cache_dir=sys.argv[2]); "
        "print(d.train.images.sum(), d.val.images.sum())"
    )
    command = [sys.executable, "-c", program, str(folder), str(cache)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {run.communicate(timeout=120)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    data = load_data(folder, cache_dir=cache)
    assert printed == {f"{data.train.images.sum()} {data.val.images.sum()}\n"}
    assert len(list(cache.iterdir())) == 1


def test_unusable_cache_folder_is_one_line(tmp_path: Path):
    folder = make(tmp_path / "pets", a=2, b=2)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file.*; choose another"):
        load_data(folder, cache_dir=tmp_path / "file")


BAD = {
    "missing": ({}, "nowhere", r"nowhere: there is no such folder or file"),
    "empty": ({}, "", r"holds no images: expected one folder per class, .*\.jpg, \.png"),
    "no images": ({"a/x.txt": b"x", "b/x.txt": b"x"}, "", r"holds no images"),
    "a file": ({"a.zip": b"x"}, "a.zip", r"a\.zip is neither a folder of images nor an \.npz file"),
    "flat": ({"1.png": None, "2.png": None}, "", r"has 2 images outside of class folders: expected one folder"),
    "flat splits": ({"train/1.png": None, "test/2.png": None}, "", r"1 images outside of class folders"),
    "one class": ({"a/1.png": None, "a/2.png": None}, "", r"has only the class 'a', at least 2"),
    "one image": ({"a/1.png": None, "a/2.png": None, "b/1.png": None}, "", r"fewer than 2 images: 'b' \(1\); add some"),
    "one to train and validate": (
        {"train/a/1.png": None, "train/a/2.png": None, "train/b/1.png": None, "test/b/1.png": None},
        "",
        r"fewer than 2 images in train: 'b' \(1\); add some",
    ),
    "unknown class": (
        {f"{name}/{i}.png": None for name in ("train/a", "train/b", "val/a", "val/c") for i in range(2)},
        "",
        r"val has classes that are not in .*train: c",
    ),
    "nothing to train on": (
        {"train/a/1.png": None, "train/b/1.png": b"torn", "val/a/1.png": None, "val/b/1.png": None},
        "",
        r"fewer than 1 image in train: 'b' \(0\); add some or remove them \(skipped 1 file that cannot be read",
    ),
    "two vals": ({f"{name}/a/1.png": None for name in ("train", "val", "valid")}, "", r"has both val and valid"),
    "no train": ({f"{name}/a/1.png": None for name in ("val", "test")}, "", r"has test and val but no train"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folder_is_one_line(tmp_path: Path, cache: Path, case: str):
    files, source, message = BAD[case]
    folder = tmp_path / "pets"
    folder.mkdir()
    for seed, (name, content) in enumerate(files.items()):
        if content is None:
            save(folder / name, seed)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_data(folder / source, cache_dir=cache)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_names_sort_as_people_do():
    assert sorted(["b", "a10", "A9", "10", "9", "a"], key=natural) == ["9", "10", "a", "A9", "a10", "b"]


def test_an_error_of_the_disk_is_not_kept_as_a_verdict(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make(tmp_path / "pets", a=4, b=4)
    read, fails = Path.read_bytes, {"left": 0, "after": 0}

    def flaky(path: Path) -> bytes:
        if path.name == "1.png":
            fails["after"] -= 1
            if fails["after"] < 0 and fails["left"] > 0:
                fails["left"] -= 1
                raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", flaky)
    monkeypatch.setattr("smallvit.data.folder.WAITS", (0.0, 0.0))
    for after in (0, 2):  # while it is hashed, and while it is decoded
        fails.update(left=100, after=after)
        with pytest.raises(ValueError, match=r"cannot read .*1\.png: Input/output error"):
            load_data(folder, cache_dir=cache)
        assert not list(cache.glob("*"))
    fails.update(left=2, after=0)  # it passes
    data = load_data(folder, cache_dir=cache)
    assert len(data.train) + len(data.val) + len(data.test or ()) == 8


def test_a_file_that_changes_in_between_is_not_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make(tmp_path / "pets", a=4, b=4)
    read, other = Path.read_bytes, (folder / "b/0.png").read_bytes()
    seen: list[Path] = []

    def changing(path: Path) -> bytes:
        seen.append(path)
        return other if path.name == "2.png" and seen.count(path) > 1 else read(path)

    monkeypatch.setattr(Path, "read_bytes", changing)
    with pytest.raises(ValueError, match=r"2\.png: it changed while the folder was read"):
        load_data(folder, cache_dir=cache)
    assert not list(cache.glob("*"))


@pytest.mark.parametrize("age", [0, 3600])
def test_a_file_that_is_replaced_before_decoding_is_noticed(tmp_path: Path, cache: Path, age: int):
    folder = make(tmp_path / "pets", a=4, b=4)
    for path in folder.rglob("*.png"):
        os.utime(path, (time.time() - age,) * 2)
    scanned = scan_data(folder, cache_dir=cache)
    changed, before = folder / "a/2.png", (folder / "a/2.png").stat()
    changed.write_bytes((folder / "b/0.png").read_bytes())
    if os.name == "posix":  # a copy may keep the time; elsewhere, nothing else tells
        os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match=r"2\.png: it changed while the folder was read"):
        scanned.decode()


def test_files_that_have_not_changed_are_hashed_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make(tmp_path / "pets", a=4, b=4)
    for path in folder.rglob("*.png"):
        os.utime(path, (time.time() - 3600,) * 2)
    hashed = []
    monkeypatch.setattr("smallvit.data.folder._hash", lambda content: hashed.append(content) or str(hash(content)))
    load_data(folder, cache_dir=cache)
    assert len(hashed) == 8


def test_a_disk_that_fills_up_is_one_line(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"decoded images take .* choose a smaller image size or another cache folder"):
        load_data(make(tmp_path / "pets", a=4, b=4), cache_dir=cache)


def test_the_cache_is_trimmed_oldest_first(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    sets = [make(tmp_path / f"set{i}", a=4 + i, b=4) for i in range(3)]
    entries = []
    for age, folder in zip((300, 200, 100), sets, strict=True):
        load_data(folder, cache_dir=cache)
        (new,) = set(cache.iterdir()) - set(entries)
        os.utime(new, (time.time() - age,) * 2)
        entries.append(new)
    load_data(sets[0], cache_dir=cache)  # used again: now the second is the oldest
    size = sum(entry.stat().st_size for entry in entries)
    monkeypatch.setattr("smallvit.data.cache.LIMIT", size + 1000)
    load_data(make(tmp_path / "more", a=5, b=5), cache_dir=cache)
    assert [entry.exists() for entry in entries] == [True, False, True]


def test_folders_that_cannot_be_read_are_said(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make(tmp_path / "pets", **{"a": 4, "b": 4, "b/closed": 2})
    listing = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", scandir)
    notes = load_data(folder, cache_dir=cache).notes
    assert "warning: skipped 1 folder that cannot be read: b/closed (Permission denied)" in notes
    with pytest.raises(ValueError, match="closed: Permission denied"):
        find_images([folder])
    whole = make(tmp_path / "class", a=4, b=4, closed=4)
    with pytest.raises(ValueError, match=r"^cannot read .*class/closed: Permission denied$"):
        load_data(whole, cache_dir=cache)
