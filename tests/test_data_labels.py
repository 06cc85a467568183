"""Labels from a table, and groups that stay together."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smallvit.common.files import read_json
from smallvit.data import Dataset, Split, load_data
from smallvit.data.labelled import load_held_out
from smallvit.data.splits import Groups, stratified
from smallvit.runs.saved import from_pretrained
from smallvit.runs.source import own_images, source_of
from smallvit.training.config import TrainConfig
from tests.runs import QUICK, command


def save(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(path)


def photos(folder: Path, names: Sequence[str]) -> Path:
    for seed, name in enumerate(names):
        save(folder / name, seed)
    return folder


def table(folder: Path, *rows: str, name: str = "labels.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(rows) + "\n")
    return folder / name


def label_of(data: Dataset) -> dict[str, str]:
    splits = [split for split in (data.train, data.val, data.test) if split is not None]
    return {
        name: data.classes[label] for split in splits for name, label in zip(split.names, split.labels, strict=True)
    }


NAMES = [f"{i}.png" for i in range(20)]
ROWS = [f"{name},{'cat' if i % 2 else 'dog'}" for i, name in enumerate(NAMES)]
LABELS = {name: "cat" if i % 2 else "dog" for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("file", ["file", "file_name", "filename", "path", "image", " File_Name "])
@pytest.mark.parametrize("name", ["labels.csv", "metadata.csv"])
def test_a_table_in_a_flat_folder(tmp_path: Path, file: str, name: str):
    folder = photos(tmp_path / "photos", [*NAMES, "extra.png"])
    table(folder, f"{file},{'class' if name == 'labels.csv' else 'label'}", *ROWS, name=name)
    data = load_data(folder, cache_dir=tmp_path / "cache")
    assert data.classes == ("cat", "dog")
    assert label_of(data) == LABELS
    assert data.test is not None
    assert [len(split) for split in (data.train, data.val, data.test)] == [16, 2, 2]
    for image, place in zip(data.val.images, data.val.names, strict=True):
        np.testing.assert_array_equal(image, np.asarray(Image.open(folder / place)))
    assert f"labels of {name}" in data.notes
    assert f"ignored 1 image that {name} does not list: extra.png" in data.notes


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_ways_tables_are_written(tmp_path: Path, delimiter: str, start: bytes, end: str):
    folder = photos(tmp_path / "photos", NAMES)
    rows = [delimiter.join(["file", "note", "label"]), ""]
    rows += [
        delimiter.join([name, f'"a{delimiter} b"', f" {LABELS[name].replace('cat', 'Kätzchen')} "]) for name in NAMES
    ]
    (folder / "labels.csv").write_bytes(start + end.join(rows).encode())
    assert load_data(folder, cache_dir=tmp_path / "cache").classes == ("dog", "Kätzchen")


def test_the_table_may_lie_elsewhere(tmp_path: Path):
    folder = photos(tmp_path / "photos", NAMES)
    beside = table(tmp_path, "file,label", *(f"photos/{row}" for row in ROWS), name="beside.csv")
    bare = table(tmp_path / "tables", "file,label", *ROWS, name="bare.csv")
    inside = table(folder, "file,label", *ROWS, name="inside.csv")
    for path in (beside, bare, inside, "inside.csv"):
        assert label_of(load_data(folder, labels=path, cache_dir=tmp_path / "cache")) == LABELS
    absolute = table(folder, "file,label", *(f"{folder / name},{label}" for name, label in LABELS.items()))
    windows = table(tmp_path, "file,label", *(f"photos\\{row}" for row in ROWS), name="windows.csv")
    for path in (absolute, windows):
        assert label_of(load_data(folder, labels=path, cache_dir=tmp_path / "cache")) == LABELS


def test_splits_of_the_table_are_kept(tmp_path: Path):
    folder = photos(tmp_path / "photos", NAMES)
    parts = ["train"] * 12 + ["Valid", "validation", "val", "val"] + ["test"] * 4
    table(folder, "file,label,split", *(f"{row},{part}" for row, part in zip(ROWS, parts, strict=True)))
    data = load_data(folder, cache_dir=tmp_path / "cache")
    assert data.test is not None
    assert [list(s.names) for s in (data.train, data.val, data.test)] == [NAMES[:12], NAMES[12:16], NAMES[16:]]
    assert "12 train, 4 val, 4 test: train, val and test as given" in data.notes


def test_tables_in_split_folders(tmp_path: Path):
    for layout in ("inside", "above"):
        folder = tmp_path / layout
        for part, rows in (("train", ROWS[:16]), ("test", ROWS[16:])):
            photos(folder / part, [row.split(",")[0] for row in rows])
            if layout == "inside":
                table(folder / part, "file_name,label", *rows, name="metadata.csv")
        if layout == "above":
            rows = [f"{'train' if i < 16 else 'test'}/{row}" for i, row in enumerate(ROWS)]
            table(folder, "file_name,label", *rows, name="metadata.csv")
        data = load_data(folder, cache_dir=tmp_path / "cache")
        assert data.test is not None
        assert list(data.test.names) == [f"test/{name}" for name in NAMES[16:]]
        assert len(data.train) + len(data.val) == 16
        held = load_held_out(folder, data.classes, data.preprocess)
        assert held.part == "test"
        assert list(held.split.names) == list(data.test.names)
        np.testing.assert_array_equal(held.split.labels, data.test.labels)


def test_class_folders_win_over_a_table_that_is_not_asked_for(tmp_path: Path):
    folder = photos(tmp_path / "photos", [f"{label}/{name}" for name, label in LABELS.items()])
    other = [f"{label}/{name},{'x' if i < 10 else 'y'}" for i, (name, label) in enumerate(LABELS.items())]
    path = table(folder, "file,label", *other)
    data = load_data(folder, cache_dir=tmp_path / "cache")
    assert data.classes == ("cat", "dog")
    assert any(note.startswith("labels.csv is not used, the class folders are") for note in data.notes)
    assert load_data(folder, labels=path, cache_dir=tmp_path / "cache").classes == ("x", "y")
    table(folder, "number,name", "0,cat")
    data = load_data(folder, cache_dir=tmp_path / "cache")
    assert any(note.startswith("labels.csv is not used: ") for note in data.notes)


HEAD = "file,label"
BAD: dict[str, tuple[bytes | list[str], str]] = {
    "missing file": ([HEAD, *ROWS, "lost.png,cat"], r"labels\.csv, row 22: there is no file lost\.png in "),
    "no label": ([HEAD, *ROWS[:2], "2.png, "], r"labels\.csv, row 4: 2\.png has no label"),
    "short row": ([HEAD, "2.png"], r"row 2: 2\.png has no label"),
    "no file": ([HEAD, ",cat"], r"row 2 has no file name"),
    "two labels": ([HEAD, *ROWS, "0.png,cat"], r"row 22: 0\.png has a different label in row 2: remove one"),
    "two splits": (["file,label,split", "0.png,a,train", "0.png,a,test"], r"row 3: 0\.png has a different split in"),
    "file column": (["id,label", "0.png,a"], r"no column with the files, named file, .*: its columns are id, label"),
    "label column": (["file,kind", "0.png,a"], r"no column with the labels, named label or class: its columns"),
    "split": (["file,label,split", "0.png,a,dev"], r"row 2: the split 'dev' must be train, val, .* or test"),
    "no train": (["file,label,split", "0.png,a,test"], r"has no images to train on: some must have the split train"),
    "too many cells": ([HEAD, "0.png,a,b"], r"row 2 has 3 cells, but there are 2 columns: quote text"),
    "above": ([HEAD, "../photos/../other.png,a"], r"row 2: \.\./photos/\.\./other\.png is outside of .*photos, where"),
    "absolute": ([HEAD, "/etc/passwd,a"], r"row 2: /etc/passwd is outside of "),
    "latin-1": ("file,label\n0.png,dog\n1.png,Kätzchen\n".encode("latin-1"), r"row 3 is not UTF-8 \(byte 0xe4\): save"),
    "utf-16": ("file,label\n".encode("utf-16"), r"row 1 is not UTF-8 \(byte 0xff\)"),
    "empty": (b"", r"is empty: it needs a row of column names"),
    "only names": ([HEAD], r"has no rows below its column names"),
    "one class": ([HEAD, "0.png,a", "1.png,a"], r"has only the class 'a'"),
    "one image": ([HEAD, "0.png,a", "1.png,a", "2.png,b"], r"fewer than 2 images: 'b' \(1\)"),
    "unknown class": (["file,label,split", *(f"{r},train" for r in ROWS[:9]), "9.png,c,val"], r"are not in train: c"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_one_line(tmp_path: Path, case: str):
    content, message = BAD[case]
    folder = photos(tmp_path / "photos", NAMES)
    save(tmp_path / "other.png", 99)
    (folder / "labels.csv").write_bytes(content if isinstance(content, bytes) else "\n".join(content).encode())
    with pytest.raises(ValueError, match=message) as caught:
        load_data(folder, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_tables_are_for_folders(tmp_path: Path):
    folder = photos(tmp_path / "photos", [f"{label}/{name}" for name, label in LABELS.items()])
    with pytest.raises(ValueError, match=r"cannot read .*nowhere\.csv: No such file"):
        load_data(folder, labels=tmp_path / "nowhere.csv", cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"the group column 'patient' needs a table: give one with --labels"):
        load_data(folder, group="patient", cache_dir=tmp_path / "cache")
    table(folder, "file,group", "dog/0.png,1")
    with pytest.raises(ValueError, match=r"no column 'patient' for the groups: its columns are file, group"):
        load_data(folder, group="patient", cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"groups needs a folder of images: fashion-mnist-10k has its own"):
        load_data(labels=folder / "labels.csv")


def groups_of(split: Split | None, group: dict[str, str]) -> set[str]:
    return set() if split is None else {group[name] for name in split.names if group[name]}


@pytest.mark.parametrize("layout", ["table", "class folders", "other column"])
def test_a_group_is_on_one_side(tmp_path: Path, layout: str):
    flat = layout != "class folders"
    names = {name if flat else f"{label}/{name}": label for name, label in LABELS.items()}
    folder = photos(tmp_path / "photos", list(names))
    group = {name: f"p{i // 2}" if i < 18 else "" for i, name in enumerate(names)}
    column = "patient" if layout == "other column" else "group"
    label = "" if layout == "class folders" else ",label"
    rows = [f"{name},{group[name]}{',' + names[name] if label else ''}" for name in names]
    table(folder, f"file,{column}{label}", *rows)
    for seed in range(5):
        data = load_data(
            folder,
            cache_dir=tmp_path / "cache",
            seed=seed,
            group="patient" if layout == "other column" else None,
        )
        assert len(label_of(data)) == 20
        sides = [groups_of(split, group) for split in (data.train, data.val, data.test)]
        assert sum(map(len, sides)) == len(set.union(*sides)) == 9
        assert len(data.val) >= 2
        assert data.test is not None
        assert not any("warning" in note for note in data.notes)
        assert any(f"split by 9 groups of `{column}`, none of which is in two splits" in note for note in data.notes)
    if layout == "class folders":
        assert any(note.startswith("2 images without a group in labels.csv: 19.png, 18.png") for note in data.notes)


def test_groups_alone_in_split_folders(tmp_path: Path):
    """One class folder per split, so that the tables are read; they have no labels."""
    folder = tmp_path / "photos"
    for part in ("train", "test"):
        photos(folder / part, [f"cat/{name}" for name in NAMES[:4]])
        table(folder / part, "file,group", "cat/0.png,1", name="metadata.csv")
    with pytest.raises(ValueError, match="has only the class 'cat'"):
        load_data(folder, cache_dir=tmp_path / "cache")


def test_equal_files_join_groups(tmp_path: Path):
    folder = photos(tmp_path / "photos", NAMES)
    for i in range(0, 18, 2):  # each image of a group is also in the next, all of the first ten hang together
        if i < 8:
            (folder / f"{i + 2}.png").write_bytes((folder / f"{i}.png").read_bytes())
    table(folder, "file,label,group", *(f"{row},{i // 2}" for i, row in enumerate(ROWS)))
    for seed in range(5):
        data = load_data(folder, cache_dir=tmp_path / "cache", seed=seed)
        assert data.test is not None
        sides = [{name in NAMES[:10] for name in split.names} for split in (data.train, data.val, data.test)]
        assert sum(True in side for side in sides) == 1
        assert not any("warning" in note for note in data.notes)


def test_groups_across_given_splits_are_named(tmp_path: Path):
    folder = photos(tmp_path / "photos", NAMES)
    rows = [f"{row},{'train' if i < 14 else 'val' if i < 18 else 'test'},p{i // 5}" for i, row in enumerate(ROWS)]
    table(folder, "file,label,split,group", *rows)
    notes = load_data(folder, cache_dir=tmp_path / "cache").notes
    line = "warning: 1 group of `group` both in train and in val, whose score may be too high: p2"
    assert [note for note in notes if "warning" in note] == [line]


def test_groups_that_are_too_large_are_one_line(tmp_path: Path):
    folder = photos(tmp_path / "photos", NAMES)
    table(folder, "file,label,group", *(f"{row},{LABELS[row.split(',')[0]]}" for row in ROWS))
    with pytest.raises(
        ValueError, match=r"no images can be held out .* each of the 2 groups of `group` has all images"
    ):
        load_data(folder, cache_dir=tmp_path / "cache")


def test_groups_are_stratified():
    rng = np.random.default_rng(0)
    for seed in range(10):
        group = np.repeat(np.arange(100), rng.integers(1, 30, 100))
        labels = np.where(rng.random(len(group)) < 0.9, group % 4, rng.integers(0, 4, len(group)))
        names = Groups("group", [str(each) for each in group])
        parts = stratified(labels, list("abcd"), (0.1, 0.1), seed, range(len(group)), names)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(group)))
        for part in parts[1:]:
            shares = np.bincount(labels[part], minlength=4) / np.bincount(labels, minlength=4)
            assert (shares >= 0.05).all()
            assert (shares <= 0.2).all()


def test_a_run_finds_the_images_of_its_table_again(tmp_path: Path, env: dict[str, str]):
    folder = photos(tmp_path / "photos", NAMES)
    path = table(tmp_path, "file,label,who", *(f"photos/{row},{i // 2}" for i, row in enumerate(ROWS)), name="my.csv")
    options = ["--labels", path, "--group", "who", "--runs", tmp_path / "runs", "--name", "run", "--seed", "3"]
    trained = subprocess.run(command(folder, *QUICK, *options), env=env, capture_output=True, text=True, timeout=300)
    assert trained.returncode == 0, trained.stderr
    run = tmp_path / "runs" / "run"
    source = source_of(run)
    assert source is not None
    assert (source.labels, source.group) == (path, "who")
    data = load_data(folder, labels=path, group="who", cache_dir=tmp_path / "cache")
    found = own_images(run, from_pretrained(run))
    assert data.test is not None
    assert list(found.split.names) == list(data.test.names)
    assert not any("changed" in note for note in found.notes)
    resumed = TrainConfig.from_json(read_json(run / "config.json")["config"])
    assert (resumed.labels, resumed.group) == (path, "who")
    path.write_text("file,label\nlost.png,cat\n")
    mistaken = subprocess.run(command(folder, "--labels", path), env=env, capture_output=True, text=True, timeout=300)
    assert mistaken.returncode == 2
    assert mistaken.stderr.splitlines()[-1].endswith(f"my.csv, row 2: there is no file lost.png in {tmp_path}")
    assert "Traceback" not in mistaken.stderr
