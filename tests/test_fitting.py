"""Image sizes that a model accepts."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smallvit.data import Preprocess, scan_data
from smallvit.runs.saved import Spec, abstract_model
from smallvit.training import RunOptions, TrainConfig
from smallvit.training.fitting import fitting_size
from smallvit.training.preparation import fit_size
from smallvit.training.progress import Reporter

pytestmark = pytest.mark.usefixtures("as_a_user")


def create(name: str, size: tuple[int, int]) -> None:
    abstract_model(Spec(name, 3, size, {}), Preprocess(size, 3, "crop", (0.0,) * 3, (1.0,) * 3))


@pytest.mark.parametrize(
    "name, size, fitting",
    [
        ("sl_vit_tiny_data", (32, 32), (32, 32)),
        ("sl_vit_tiny_data", (28, 28), (28, 28)),
        ("sl_vit_tiny_data", (46, 46), (48, 48)),
        ("sl_vit_tiny_data", (47, 45), (48, 44)),
        ("vit_small_data", (37, 64), (36, 64)),
        ("swin_small_data", (46, 46), (46, 46)),
        *((f"{sl}hybrid_vit_small", (side, side), (side, side)) for sl in ("", "sl_") for side in (8, 13, 46, 47, 97)),
    ],
)
def test_sizes_are_rounded_to_what_the_model_takes(name, size, fitting):
    assert fitting_size(partial(create, name), size) == fitting


def test_a_size_that_cannot_be_rounded_is_the_models_error():
    with pytest.raises(ValueError, match="image size 2 x 2 is not divisible by patch size 16 x 16"):
        fitting_size(lambda _: create("vit_tiny_patch16", (2, 2)), (2, 2))


def test_the_data_follows_and_a_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for i in range(8):
        path = tmp_path / "data" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((47, 47, 3), i, np.uint8)).save(path)
    config = TrainConfig(str(tmp_path / "data"), model="sl_vit_tiny_data", run=RunOptions(runs=tmp_path / "runs"))
    scanned = scan_data(config.data, cache_dir=tmp_path / "cache")
    assert scanned.blank.preprocess.size == (47, 47)
    config, scanned = fit_size(config, scanned, Reporter(quiet=False))
    data = scanned.decode()
    assert config.image_size == data.preprocess.size == (48, 48)
    assert data.train.images.shape[1:] == (48, 48, 3)
    printed = " ".join(capsys.readouterr().out.split())
    assert "sl_vit_tiny_data does not take images of 47 x 47: they are resized to 48 x 48" in printed
