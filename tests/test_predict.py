"""Prediction with a saved model."""

import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from smallvit.data import Preprocess
from smallvit.predict import Predictor
from smallvit.saved import Spec, save_model

SPEC = Spec("sl_vit_tiny_data", 3, (8, 12), dict(dim=16, depth=1, heads=2, mlp_dim=16, patch_size=4))
PREPROCESS = Preprocess((8, 12), 3, "crop", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    variables = jax.jit(SPEC.create().init)(jax.random.key(0), jnp.zeros((1, 8, 12, 3)))
    save_model(folder, SPEC, variables, ("a", "b", "c"), PREPROCESS)
    return folder


def test_any_number_of_images_with_few_compilations(folder: Path):
    predict = Predictor(folder, largest=8)
    images = np.random.default_rng(0).integers(0, 256, (19, 8, 12, 3)).astype(np.uint8)
    all_at_once = predict(images)
    np.testing.assert_allclose(all_at_once.sum(axis=1), 1, atol=1e-5)
    for number in (1, 2, 3, 5, 8, 9):
        np.testing.assert_allclose(predict(images[:number]), all_at_once[:number], atol=1e-5)
    assert predict._predict._cache_size() == 3  # 1, 4 and 8


def test_a_file_is_decoded_as_in_training(folder: Path):
    predict = Predictor(folder)
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    np.testing.assert_array_equal(predict.decode(io.BytesIO(file.getvalue())), image)
    with pytest.raises(ValueError):
        predict.decode(io.BytesIO(b"no image"))
