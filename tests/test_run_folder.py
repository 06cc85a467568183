"""The files of a run: made once, whole or not there, enough to load the model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit.common.files import read_json, write_bytes
from smallvit.runs.folder import create_run, locked, open_run
from smallvit.runs.prediction import make_predict
from smallvit.runs.saved import Spec, from_pretrained, save_model
from tests.small import FIELDS, PREPROCESS


def test_a_run_folder_is_made_once(tmp_path: Path):
    first, second = (create_run(tmp_path, None, "x", {}) for _ in range(2))
    assert (first.name, second.name) == ("x", "x-2")
    with pytest.raises(ValueError, match="exists: choose another --name"):
        create_run(tmp_path, "x", "y", {})
    with locked(first), pytest.raises(ValueError, match="in use by another process"), locked(first):
        pass


def test_only_an_unfinished_run_is_gone_on_with(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no such folder"):
        open_run(tmp_path / "none")
    with pytest.raises(ValueError, match="is not a run folder"):
        open_run(tmp_path)
    run = create_run(tmp_path, "x", "", {"a": 1})
    assert open_run(run) == {"a": 1}
    (run / "result.json").write_text("{}")
    with pytest.raises(ValueError, match="is finished"):
        open_run(run)


def test_a_file_is_whole_or_not_there(tmp_path: Path):
    path = tmp_path / "x.json"
    write_bytes(path, b'{"a": 1}')
    with pytest.raises(TypeError):
        write_bytes(path, "no bytes")  # pyright: ignore
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is not valid JSON"):
        read_json(path)


def test_a_model_folder_says_all_that_is_needed(tmp_path: Path):
    spec = Spec("sl_vit_tiny_data", 3, (8, 8), {**FIELDS, "dtype": "bfloat16"})
    model = spec.create()
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    save_model(tmp_path / "run/model", spec, variables, ("a", "b", "c"), PREPROCESS)
    images = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3)).astype(np.uint8)
    expected = jax.jit(make_predict(model, PREPROCESS))(variables, images, PREPROCESS.normalisation)
    for folder in (tmp_path / "run", tmp_path / "run/model"):
        saved = from_pretrained(folder)
        assert (saved.classes, saved.preprocess, saved.spec) == (("a", "b", "c"), PREPROCESS, spec)
        np.testing.assert_array_equal(
            jax.jit(make_predict(saved.model, saved.preprocess))(
                saved.variables, images, saved.preprocess.normalisation
            ),
            expected,
        )

    weights = tmp_path / "run/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        from_pretrained(tmp_path / "run")
    with pytest.raises(ValueError, match="holds no model"):
        from_pretrained(tmp_path)
