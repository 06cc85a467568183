"""Images with 16 bits and any number of channels, from the file to the served model."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from smallvit.augment import Augment, augment_images
from smallvit.data import Dataset, Preprocess, load_data
from smallvit.data.decoding import decode, header
from smallvit.data.labelled import load_held_out
from smallvit.data.view import as_picture
from smallvit.evaluation import evaluate
from smallvit.explanation.pictures import explain
from smallvit.exporting.formats import export
from smallvit.runs.prediction import Predictor, predict
from smallvit.runs.saved import from_pretrained
from smallvit.training.choice import choose
from smallvit.training.config import TrainConfig
from smallvit.training.options import RecipeOptions
from tests.runs import QUICK, command

RNG = np.random.default_rng(0)


def stack(path: Path, planes: np.ndarray) -> None:
    """Saves the planes of the first axis as frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = (Image.fromarray(plane) for plane in planes)
    first.save(path, save_all=True, append_images=others)


def scans(folder: Path, channels: int, dtype: type, side: int = 12) -> Path:
    """Two classes that differ by a few levels: in 8 bits of the full range they would be equal."""
    step = 100 if dtype == np.uint16 else 60
    for i in range(40):
        planes = RNG.integers(0, step, (channels, side, side)).astype(dtype)
        planes[i % channels :: 2] += dtype(step * (i % 2))
        stack(folder / ("low", "high")[i % 2] / f"{i}.tif", planes)
    return folder


@pytest.mark.parametrize("kind", ["png", "tif"])
def test_16_bits_are_kept(tmp_path: Path, kind: str):
    pixels = RNG.integers(0, 4096, (9, 7)).astype(np.uint16)
    path = tmp_path / f"a.{kind}"
    Image.fromarray(pixels).save(path)
    assert header(path).deep
    np.testing.assert_array_equal(decode(path, (9, 7), 1, "crop", depth=16)[..., 0], pixels)
    np.testing.assert_array_equal(decode(path, (9, 7), 3, "crop", depth=16)[..., 2], pixels)
    np.testing.assert_array_equal(decode(path, (9, 7), 1, "crop")[..., 0], np.round(pixels / 65535 * 255))
    for fit in ("crop", "pad"):
        small = decode(path, (4, 4), 1, fit, depth=16)
        assert small.dtype == np.uint16
        assert small.shape == (4, 4, 1)
        assert abs(float(small.mean()) - float(pixels.mean())) < 500
    Image.fromarray((pixels >> 8).astype(np.uint8)).save(path)
    assert not header(path).deep
    np.testing.assert_array_equal(decode(path, (9, 7), 1, "crop", depth=16)[..., 0], (pixels >> 8) * 257)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_frames_are_channels(tmp_path: Path, dtype: type):
    planes = RNG.integers(0, np.iinfo(dtype).max, (5, 6, 8)).astype(dtype)
    stack(tmp_path / "a.tif", planes)
    assert header(tmp_path / "a.tif").frames == 5
    depth = 8 * np.dtype(dtype).itemsize
    seen = decode(tmp_path / "a.tif", (6, 8), 5, "crop", depth=depth)
    np.testing.assert_array_equal(seen, planes.transpose(1, 2, 0))
    assert decode(tmp_path / "a.tif", (3, 4), 5, "pad", depth=depth).shape == (3, 4, 5)
    np.testing.assert_array_equal(decode(tmp_path / "a.tif", (6, 8), 1, "crop", depth=depth)[..., 0], planes[0])
    with pytest.raises(ValueError, match=r"cannot read .*a\.tif: it has 5 channels, not 4"):
        decode(tmp_path / "a.tif", (6, 8), 4, "crop")
    # No stacks: pages in colour, of different sizes, and far too many.
    colour = RNG.integers(0, 255, (2, 6, 8, 3)).astype(np.uint8)
    stack(tmp_path / "pages.tif", colour)
    Image.fromarray(planes[0]).save(
        tmp_path / "sizes.tif", save_all=True, append_images=[Image.fromarray(planes[1, :4])]
    )
    stack(tmp_path / "many.tif", np.repeat(planes[:1], 65, axis=0))
    for name in ("pages", "sizes", "many"):
        assert header(tmp_path / f"{name}.tif").frames == 1
        assert decode(tmp_path / f"{name}.tif", (6, 8), 3, "crop").shape == (6, 8, 3)


def test_folders(tmp_path: Path):
    deep = load_data(scans(tmp_path / "deep", 1, np.uint16), cache_dir=tmp_path / "cache")
    assert (deep.preprocess.depth, deep.preprocess.channels) == (16, 1)
    assert deep.train.images.dtype == np.uint16
    assert isinstance(deep.train.images, np.memmap)
    assert "images have 16 bits per channel, which are kept" in deep.notes
    normal = deep.preprocess.normalise(deep.train.images)
    assert abs(float(normal.mean())) < 1e-3
    assert abs(float(normal.std()) - 1) < 1e-3
    stacks = load_data(scans(tmp_path / "stacks", 4, np.uint8), cache_dir=tmp_path / "cache")
    assert (stacks.preprocess.depth, stacks.preprocess.channels) == (8, 4)
    assert "the 4 frames of each TIFF stack are its channels" in stacks.notes
    stack(tmp_path / "stacks/low/3.tif", np.zeros((2, 12, 12), np.uint8))
    mixed = load_data(tmp_path / "stacks", cache_dir=tmp_path / "cache")
    assert mixed.preprocess.channels == 1
    assert "warning: TIFF stacks have from 2 to 4 frames: only the first one is used" in mixed.notes
    Image.fromarray(np.zeros((12, 12), np.uint8)).save(tmp_path / "deep/low/8bit.png")
    mixed = load_data(tmp_path / "deep", cache_dir=tmp_path / "cache")
    assert mixed.preprocess.depth == 8
    assert "warning: 40 images of 16 bits converted to 8, since others have 8: low/8bit.png" in mixed.notes
    held_out = load_held_out(tmp_path / "deep", mixed.classes, mixed.preprocess)
    assert "warning: 40 images of 16 bits converted to 8, which the model takes" in held_out.notes


def arrays(path: Path, channels: int, dtype: type, n: int = 40) -> Path:
    labels = np.arange(n) % 2
    top = np.iinfo(dtype).max
    images = (RNG.integers(0, top // 2, (n, 12, 12, channels)) + labels[:, None, None, None] * (top // 3)).astype(dtype)
    np.savez(path, images=images, labels=labels)
    return path


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 2, 3, 7])
def test_arrays(tmp_path: Path, dtype: type, channels: int):
    path = arrays(tmp_path / "a.npz", channels, dtype)
    for size in (12, 8):
        data = load_data(path, image_size=size)
        assert data.train.images.dtype == dtype
        assert data.train.images.shape[1:] == (size, size, channels)
        assert data.preprocess.depth == 8 * np.dtype(dtype).itemsize
        normal = data.preprocess.normalise(data.train.images)
        assert abs(float(normal.mean())) < 1e-3
    held = load_held_out(path, data.classes, data.preprocess)
    assert held.split.images.dtype == dtype
    other = replace(data.preprocess, depth=24 - data.preprocess.depth)
    changed = load_held_out(path, data.classes, other).split.images
    factor = 257 if dtype == np.uint8 else 1 / 257
    np.testing.assert_allclose(changed, held.split.images.astype(np.float64) * factor, atol=0.51)
    with pytest.raises(ValueError, match=f"has images of {channels} channels, the model takes 5"):
        load_held_out(path, data.classes, replace(data.preprocess, channels=5))


def test_bad_arrays(tmp_path: Path):
    for shape, hint in (((40, 5, 12, 12), "channels come last"), ((40, 70, 70, 66), "c up to 64")):
        np.savez(tmp_path / "a.npz", images=np.zeros(shape, np.uint8), labels=np.arange(40) % 2)
        with pytest.raises(ValueError, match=hint):
            load_data(tmp_path / "a.npz")
    images = np.zeros((10, 4, 4), np.uint8)
    labels = np.arange(10) % 2
    given: dict[str, Any] = dict(train_images=images, train_labels=labels, test_labels=labels)
    np.savez(tmp_path / "a.npz", test_images=images.astype(np.uint16), **given)
    with pytest.raises(ValueError, match="train are uint8, those of test uint16"):
        load_data(tmp_path / "a.npz")


def test_preprocessing_is_stored():
    plain = Preprocess((4, 4), 3, "crop", (0.5,) * 3, (0.2,) * 3)
    assert "depth" not in plain.to_json()  # the digest of a run's data is as before
    assert Preprocess.from_json(plain.to_json()) == plain
    deep = replace(plain, depth=16)
    assert Preprocess.from_json(json.loads(json.dumps(deep.to_json()))) == deep
    with pytest.raises(ValueError, match="must have the fields size"):
        Preprocess.from_json({**plain.to_json(), "dpeth": 16})


def test_augmentation_keeps_the_levels():
    images = RNG.integers(30_000, 60_000, (6, 10, 10, 4)).astype(np.uint16)
    spec = Augment(flip=True, crop_padding=2, rotation=0.1, zoom=0.2)
    out = np.asarray(augment_images(jax.random.key(0), jnp.asarray(images), spec))
    assert out.dtype == np.uint16
    assert out.min() >= images.min()
    assert out.max() <= images.max()
    flipped = np.asarray(augment_images(jax.random.key(0), jnp.asarray(images), Augment(flip=True)))
    assert all(
        any(np.array_equal(b, a) for a in (image, image[:, ::-1])) for image, b in zip(images, flipped, strict=True)
    )


@pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint16), (4, np.uint8)])
def test_policies_are_for_photographs(tmp_path: Path, channels: int, dtype: type):
    data: Dataset = load_data(arrays(tmp_path / "a.npz", channels, dtype))
    paper = TrainConfig(recipe="paper").recipe_for(data).augment
    assert (paper.policy, paper.colour) == ("none", 0.0)
    config, said = choose(TrainConfig(model="vit_tiny_data", epochs=200.0), data)
    assert config.recipe_for(data).augment.policy == "none"
    assert "randaugment" not in said
    for options in (RecipeOptions(policy="randaugment"), RecipeOptions(colour=0.2)):
        with pytest.raises(ValueError, match="needs 8-bit grey or colour images: leave it out"):
            TrainConfig(in_recipe=options).recipe_for(data)


def test_pictures():
    deep = RNG.integers(200, 300, (5, 5, 1)).astype(np.uint16)
    assert (as_picture(deep).min(), as_picture(deep).max(), as_picture(deep).dtype) == (0, 255, np.uint8)
    many = RNG.integers(0, 256, (5, 5, 6)).astype(np.uint8)
    np.testing.assert_array_equal(as_picture(many), many[..., :3])
    assert as_picture(many[..., :2]).shape == (5, 5, 1)
    np.testing.assert_array_equal(as_picture(many[..., :3]), many[..., :3])
    assert as_picture(np.zeros((5, 5, 1), np.uint16)).max() == 0


@pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint16), (4, np.uint16)])
def test_from_files_to_answers(tmp_path: Path, env: dict[str, str], channels: int, dtype: type):
    """Training, evaluation, prediction, explanation, export and the server's picture."""
    from smallvit.serving.examples import png

    folder = scans(tmp_path / "scans", channels, dtype)
    options = ["--runs", tmp_path / "runs", "--name", "run", "--epochs", "12"]
    trained = subprocess.run(command(folder, *QUICK, *options), env=env, capture_output=True, text=True, timeout=300)
    assert trained.returncode == 0, trained.stderr
    run = tmp_path / "runs/run"
    saved = from_pretrained(run)
    assert saved.preprocess.depth == 16
    assert evaluate(run).scores.top1 == 100  # it would be 50 if the classes were the same in 8 bits
    files = sorted((folder / "low").glob("*.tif"))[:2]
    found = predict(run, files)
    assert [each.classes[0] for each in found] == ["low", "low"]
    predictor = Predictor(saved)
    seen = np.stack([predictor.decode(file) for file in files])
    assert predict(run, seen)[0].probabilities == pytest.approx(found[0].probabilities, abs=1e-5)
    assert png(seen[0]).startswith(b"\x89PNG")
    (drawn,) = explain(run, files[:1], out=tmp_path / "explained")
    assert drawn.stat().st_size > 1000
    assert (run / "augmented.png").exists()
    facts = json.loads(Path(f"{export(run, 'stablehlo', tmp_path / 'model.stablehlo')}.json").read_text())
    assert facts["input"]["type"] == "uint16"
    assert facts["preprocess"]["depth"] == 16
