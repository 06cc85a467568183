"""Known data sets, from tiny files in their official formats."""

import gzip
import hashlib
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from smallvit.data import load_data
from smallvit.data.known import DEBIAN, KNOWN, File

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def nothing_else_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(DEBIAN, "fashion-mnist", Path("/nonexistent"))


def images(n: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (n, *shape), np.uint8)


def tar_of(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def cifar10_members(per_batch: int = 20) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    batches = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    pixels, labels = images(6 * per_batch, 3, 32, 32), np.arange(6 * per_batch, dtype=np.uint8) % 10
    table = np.concatenate([labels[:, None], pixels.reshape(-1, 3072)], axis=1).reshape(6, per_batch, 3073)
    members = {f"cifar-10-batches-bin/{name}": part.tobytes() for name, part in zip(batches, table, strict=True)}
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    members["cifar-10-batches-bin/batches.meta.txt"] = ("\n".join(names) + "\n\n").encode()
    return members, pixels.transpose(0, 2, 3, 1), labels


@pytest.mark.parametrize("below", ["", "cifar10"])
@pytest.mark.parametrize("unpacked", [False, True])
def test_cifar10(tmp_path: Path, below: str, unpacked: bool):
    members, pixels, labels = cifar10_members()
    folder = tmp_path / below
    (folder / "cifar-10-batches-bin").mkdir(parents=True)
    if unpacked:
        for name, content in members.items():
            (folder / name).write_bytes(content)
    else:
        (folder / "cifar-10-batches-bin").rmdir()
        tar_of(folder / "cifar-10-binary.tar.gz", members)
    data = load_data("cifar10", data_dir=tmp_path)
    assert data.name == "cifar10"
    assert data.classes[:2] == ("airplane", "automobile")
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (90, 10, 20)
    rows = [int(name[6:-1]) for name in data.train.names]
    np.testing.assert_array_equal(data.train.images, pixels[rows])
    np.testing.assert_array_equal(data.train.labels, labels[rows])
    np.testing.assert_array_equal(data.test.images, pixels[100:])
    assert data.preprocess.mean == (0.4914, 0.4822, 0.4465)
    assert data.policy == "cifar10"


def test_cifar100_has_fine_labels(tmp_path: Path):
    pixels, fine = images(300, 3072), np.arange(300, dtype=np.uint8) % 100
    table = np.concatenate([fine[:, None] // 5, fine[:, None], pixels], axis=1)
    names = "\n".join(f"class_{i}" for i in range(100)).encode()
    members = {"train.bin": table[:200].tobytes(), "test.bin": table[200:].tobytes(), "fine_label_names.txt": names}
    tar_of(tmp_path / "cifar-100-binary.tar.gz", {f"cifar-100-binary/{k}": v for k, v in members.items()})
    data = load_data("cifar100", data_dir=tmp_path)
    assert data.test is not None
    assert data.classes[99] == "class_99"
    np.testing.assert_array_equal(data.test.labels, fine[200:])
    np.testing.assert_array_equal(data.test.images[0], pixels[200].reshape(3, 32, 32).transpose(1, 2, 0))


def test_svhn(tmp_path: Path):
    pixels, labels = images(40, 32, 32, 3), np.arange(40) % 10 + 1
    for part in ("train", "test"):
        scipy.io.savemat(
            tmp_path / f"{part}_32x32.mat",
            {"X": pixels.transpose(1, 2, 3, 0), "y": labels[:, None].astype(np.uint8)},
            do_compression=True,
        )
    data = load_data("svhn", data_dir=tmp_path)
    assert data.test is not None
    assert data.classes == tuple("0123456789")
    np.testing.assert_array_equal(data.test.labels, labels % 10)
    np.testing.assert_array_equal(data.test.images, pixels)


def write_idx(folder: Path, packed: bool = True, n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = images(n, 28, 28), (np.arange(n) % 10).astype(np.uint8)
    for part in ("train", "t10k"):
        for name, content in (
            (f"{part}-images-idx3-ubyte", struct.pack(">IIII", 0x803, n, 28, 28) + pixels.tobytes()),
            (f"{part}-labels-idx1-ubyte", struct.pack(">II", 0x801, n) + labels.tobytes()),
        ):
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)
    return pixels, labels


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist(tmp_path: Path, name: str, packed: bool):
    pixels, labels = write_idx(tmp_path / name, packed)
    data = load_data(name, data_dir=tmp_path)
    assert data.test is not None
    np.testing.assert_array_equal(data.test.images[..., 0], pixels)
    np.testing.assert_array_equal(data.test.labels, labels)
    assert data.preprocess.channels == 1
    assert data.classes[9] == {"mnist": "9", "fashion-mnist": "Ankle boot"}[name]


def test_fashion_mnist_of_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pixels, _ = write_idx(tmp_path / "debian")
    monkeypatch.setitem(DEBIAN, "fashion-mnist", tmp_path / "debian")
    data = load_data("fashion-mnist", data_dir=tmp_path / "empty")
    assert data.test is not None
    np.testing.assert_array_equal(data.test.images[..., 0], pixels)


def jpeg(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("L" if colour == 90 else "RGB", (64, 64), colour if colour == 90 else (colour,) * 3).save(file, "JPEG")
    return file.getvalue()


def tiny_members() -> dict[str, bytes]:
    top = "tiny-imagenet-200"
    members = {
        f"{top}/wnids.txt": b"n02\nn01\nn03\n",
        f"{top}/words.txt": b"n01\tgoldfish, Carassius auratus\nn02\tcrane\nn03\tcrane, wading bird\nn99\tother\n",
        f"{top}/val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n",
        f"{top}/val/images/val_0.JPEG": jpeg(120),
        f"{top}/val/images/val_1.JPEG": jpeg(110),
    }
    for wnid, colour in (("n02", 60), ("n01", 30), ("n03", 90)):
        members[f"{top}/train/{wnid}/{wnid}_boxes.txt"] = b"x"
        members |= {f"{top}/train/{wnid}/images/{wnid}_{i}.JPEG": jpeg(colour) for i in range(4)}
    return members


def zip_of(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as zipped:
        for name, content in members.items():
            zipped.writestr(name, content)


def test_tiny_imagenet(tmp_path: Path):
    zip_of(tmp_path / "tiny-imagenet-200.zip", tiny_members())
    data = load_data("tiny-imagenet", data_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert data.classes == ("goldfish", "crane (n02)", "crane (n03)")
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (9, 3, 2)
    for split in (data.train, data.val):
        np.testing.assert_array_equal(split.images[:, 5, 5, 0], np.array([30, 60, 90])[split.labels])
    assert data.test.labels.tolist() == [1, 0]
    assert data.test.images[:, 5, 5, 0].tolist() == [120, 110]
    assert data.test.names[0] == "tiny-imagenet-200/val/images/val_0.JPEG"
    assert load_data("tiny-imagenet", image_size=32, data_dir=tmp_path, cache_dir=tmp_path).preprocess.size == (32, 32)


def test_members_never_leave_the_archive(tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()
    members, _, _ = cifar10_members()
    tar_of(folder / "cifar-10-binary.tar.gz", {"../x": b"bad", "/tmp/../x": b"bad", **members})
    zip_of(folder / "tiny-imagenet-200.zip", {"../x": b"bad", **tiny_members()})
    load_data("cifar10", data_dir=folder)
    load_data("tiny-imagenet", data_dir=folder, cache_dir=tmp_path / "cache")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "data"]
    assert len(list(folder.iterdir())) == 2
    # A link in the place of a batch is not followed.
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(ValueError, match=r"has no data_batch_1\.bin"):
        load_data("cifar10", data_dir=folder)


def cut(path: Path, keep: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def damaged_cifar(folder: Path, **changed: bytes) -> None:
    members, _, _ = cifar10_members()
    tar_of(
        folder / "cifar-10-binary.tar.gz", members | {f"cifar-10-batches-bin/{k}.bin": v for k, v in changed.items()}
    )


def test_damaged_files_are_named(tmp_path: Path):
    def refused(name: str, message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            load_data(name, data_dir=tmp_path, cache_dir=tmp_path / "cache")
        assert "\n" not in str(caught.value)

    damaged_cifar(tmp_path)
    cut(tmp_path / "cifar-10-binary.tar.gz")
    refused("cifar10", r"cannot read .*cifar-10-binary\.tar\.gz")
    damaged_cifar(tmp_path, data_batch_3=b"x" * 3072)
    refused("cifar10", r"data_batch_3\.bin of .* has 3072 bytes, not a multiple of 3073")
    damaged_cifar(tmp_path, data_batch_3=b"\x0b" + b"x" * 3072)
    refused("cifar10", r"train labels of .* are not class numbers below 10")
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"no archive")
    refused("cifar10", r"cannot read .*cifar-10-binary\.tar\.gz")

    write_idx(tmp_path)
    cut(tmp_path / "t10k-images-idx3-ubyte.gz")
    refused("mnist", r"cannot read .*t10k-images-idx3-ubyte\.gz")
    write_idx(tmp_path, packed=False)
    for path in tmp_path.glob("*.gz"):
        path.unlink()
    cut(tmp_path / "train-images-idx3-ubyte")
    refused("mnist", r"train-images-idx3-ubyte says it holds 40 x 28 x 28 bytes, but holds 15672")
    write_idx(tmp_path, packed=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x803, 0))
    refused("mnist", r"train-labels-idx1-ubyte starts with 0x00000803, not 0x00000801")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 2) + b"\0\1")
    refused("mnist", r"has 40 images, but .*train-labels-idx1-ubyte has 2 labels")

    (tmp_path / "train_32x32.mat").write_bytes(b"no matrix")
    (tmp_path / "test_32x32.mat").write_bytes(b"no matrix")
    refused("svhn", r"cannot read .*train_32x32\.mat")
    scipy.io.savemat(tmp_path / "train_32x32.mat", {"X": images(3, 4), "y": [1, 2]})
    refused("svhn", r"train_32x32\.mat: X is uint8 of shape \(3, 4\), and there are 2 labels")

    path = tmp_path / "tiny-imagenet-200.zip"
    path.write_bytes(b"no archive")
    refused("tiny-imagenet", r"cannot read .*tiny-imagenet-200\.zip: File is not a zip file")
    zip_of(path, {"tiny-imagenet-200/wnids.txt": b"n01"})
    refused("tiny-imagenet", r"cannot read .*tiny-imagenet-200\.zip: .*words\.txt")
    zip_of(path, tiny_members() | {"tiny-imagenet-200/val/val_annotations.txt": b"val_9.JPEG\tn01\n"})
    refused("tiny-imagenet", r"cannot read .*tiny-imagenet-200\.zip: .*val_9\.JPEG")
    zip_of(path, tiny_members() | {"tiny-imagenet-200/train/n01/images/n01_2.JPEG": jpeg(5)[:400]})
    refused("tiny-imagenet", r"tiny-imagenet-200\.zip has 1 bad images, such as .*n01_2\.JPEG")
    zip_of(path, tiny_members())
    content = path.read_bytes()
    path.write_bytes(content.replace(jpeg(110), jpeg(110)[::-1], 1))
    refused("tiny-imagenet", r"tiny-imagenet-200\.zip has 1 bad images, such as .*val_1\.JPEG: Bad CRC-32")


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site that serves mnist, by file:// instead of http://."""
    site = tmp_path / "site"
    write_idx(site)
    files = tuple(
        File(f.name, (site / f.name).as_uri(), hashlib.md5((site / f.name).read_bytes()).hexdigest(), f.unpacked)
        for f in KNOWN["mnist"].files
    )
    monkeypatch.setitem(KNOWN, "mnist", KNOWN["mnist"]._replace(files=files))  # type: ignore[arg-type]
    return site


def test_download(tmp_path: Path, published: Path):
    assert len(load_data("mnist", data_dir=tmp_path / "data").train) == 30
    assert len(list((tmp_path / "data" / "mnist").iterdir())) == 4
    for path in published.iterdir():
        path.unlink()
    assert len(load_data("mnist", data_dir=tmp_path / "data").train) == 30


def test_download_must_match_its_checksum(tmp_path: Path, published: Path):
    cut(published / "train-images-idx3-ubyte.gz")
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz came with the md5 sum \w+, not \w+: try again"):
        load_data("mnist", data_dir=tmp_path / "data")
    assert not list((tmp_path / "data" / "mnist").iterdir())


def test_without_network_the_file_and_its_place_are_named(tmp_path: Path, published: Path):
    (published / "train-images-idx3-ubyte.gz").unlink()
    place = tmp_path / "data" / "mnist" / "train-images-idx3-ubyte.gz"
    with pytest.raises(ValueError, match=rf"cannot download file:.*: get that file and put it at {place}$") as caught:
        load_data("mnist", data_dir=tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_only_digits_are_not_mirrored(tmp_path: Path):
    assert {name for name, known in KNOWN.items() if not known.mirrors} == {"mnist", "svhn"}
    for name, mirrors in (("mnist", False), ("fashion-mnist", True)):
        write_idx(tmp_path / name)
        assert load_data(name, data_dir=tmp_path).mirrors is mirrors
    assert load_data().mirrors


def test_policies_are_those_found_on_the_set():
    found = {name: known.policy for name, known in KNOWN.items() if known.policy != "imagenet"}
    assert found == {"cifar10": "cifar10", "cifar100": "cifar10", "svhn": "svhn"}


def test_unknown_name_is_guessed():
    with pytest.raises(ValueError, match=r"cifr10: there is no such folder or file, did you mean 'cifar10'"):
        load_data("cifr10")


def test_a_path_with_a_slash_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist").mkdir()
    for source in ("./mnist", str(tmp_path / "mnist"), tmp_path / "mnist"):
        with pytest.raises(ValueError, match="mnist holds no images"):
            load_data(source)
    write_idx(tmp_path / "mnist")
    assert load_data("mnist", data_dir=tmp_path).name == "mnist"
