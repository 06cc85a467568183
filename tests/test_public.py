"""The Python functions that are named like the commands."""

import inspect
from pathlib import Path

import jax
import numpy as np
import pytest

import smallvit
from smallvit import cli
from smallvit.training.choice import STRONG
from smallvit.training.config import CompareConfig, TrainConfig
from smallvit.training.keywords import from_options
from smallvit.training.options import PLANNED, SHORT
from tests.runs import QUICK

pytestmark = pytest.mark.usefixtures("as_a_user")


def test_every_command_has_its_function():
    commands = {*cli.COMMANDS} - {"models", "doctor"}
    assert commands <= {*smallvit.__all__}
    assert all(callable(getattr(smallvit, name)) for name in commands)


def test_options_become_a_config():
    config = from_options(
        TrainConfig,
        Path("photos"),
        dict(minutes=30, flip=False, lr=1e-3, batch_size=16, runs="here", fields={"dim": 96, "spt": "all"}),
    )
    assert (config.data, config.minutes, config.run.runs) == ("photos", 30.0, Path("here"))
    assert (config.in_recipe.flip, config.in_recipe.learning_rate, config.in_recipe.batch_size) == (False, 1e-3, 16)
    assert config.model_fields == {"dim": 96, "spt": "all"}
    config = from_options(TrainConfig, None, dict(color_jitter=0.4, scale=[0.5, 1.0], magnitude=9, drop_path=0.1))
    augment = config.full_recipe.augment
    assert (augment.colour, augment.resized_crop, augment.magnitude) == (0.4, (0.5, 1.0), 9)
    assert config.model_fields == {"drop_path": 0.1}
    assert TrainConfig.from_json(config.to_json()) == config
    several = from_options(CompareConfig, None, dict(models=["vit_tiny_data", "vit_small_data"], seeds=2, epochs=1))
    assert (several.models, several.seeds, several.epochs) == ("vit_tiny_data,vit_small_data", 2, 1.0)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(minuts=3), "unknown option 'minuts', did you mean 'minutes'"),
        (dict(optimizer=print), "unknown option 'optimizer', did you mean 'optimiser'"),
        (dict(flips=False), "did you mean 'flip'"),
        (dict(model="vit_tinny_data"), "did you mean 'vit_tiny_data'"),
        (dict(minutes=3, epochs=2), "both minutes and epochs"),
    ],
)
def test_a_mistake_is_said_before_anything_is_read(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        smallvit.train("no such folder", **options)


def test_compare_checks_every_model_first(tmp_path: Path):
    with pytest.raises(ValueError, match="unknown model 'resnet'"):
        smallvit.compare("no such folder", models=["vit_tiny_data", "resnet"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_help_shows_every_option():
    shown = inspect.signature(smallvit.train).parameters
    assert {"data", "minutes", "flip", "batch_size", "device", "runs"} <= shown.keys()
    assert not {"in_recipe", "machine", "run", "options"} & shown.keys()
    assert {*SHORT.values()} <= shown.keys()


def test_what_the_plan_chooses_is_said_in_help():
    assert {*PLANNED} == {"progressive", "weight_decay", *STRONG}


def test_a_device_that_is_missing():
    if jax.default_backend() != "cpu":
        pytest.skip("there is another device")
    with pytest.raises(ValueError, match="device tpu is not available: jax finds only cpu"):
        smallvit.train(device="tpu")


def test_switches_and_short_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr("smallvit.training.keywords.train", seen.append)
    monkeypatch.setenv("SMALLVIT_FAST_ENV", "0")
    for args in (
        ["--no-flip", "--lr", "0.5", "--scale", "0.5", "1", "--smoothing", "0.2"],
        ["--flip", "--balance", "--learning-rate", "0.5", "--resized-crop", "0.5", "1", "--label-smoothing", "0.2"],
        [],
    ):
        monkeypatch.setattr("sys.argv", ["smallvit", "train", *args])
        cli.main()
    options = [config.in_recipe for config in seen]
    assert [each.flip for each in options] == [False, True, None]
    assert [each.balance for each in options] == [None, True, None]
    assert [each.learning_rate for each in options] == [0.5, 0.5, None]
    assert [each.resized_crop for each in options] == [(0.5, 1.0), (0.5, 1.0), None]
    assert [each.label_smoothing for each in options] == [0.2, 0.2, None]
    monkeypatch.setattr("sys.argv", ["smallvit", "train", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Peak learning rate. (by recipe: default 0.002, finetune 0.002, paper 0.003, keras 0.001)" in shown
    assert "--flip, --no-flip" in shown
    assert "--color-jitter FLOAT, --colour FLOAT" in shown
    assert "paper AutoAugment for the data set" in shown


@pytest.mark.filterwarnings("default")
def test_a_run_from_python(photos: Path, tmp_path: Path):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as a user has it
        train_and_use(photos, tmp_path)


def train_and_use(photos: Path, tmp_path: Path) -> None:
    fields = dict(text.split("=") for text in QUICK[QUICK.index("--fields") + 1 : QUICK.index("--epochs")])
    result = smallvit.train(
        photos, model="sl_vit_tiny_data", fields=[f"{k}={v}" for k, v in fields.items()],
        epochs=2, batch_size=16, lr=0.01, image_size=12, runs=str(tmp_path),
    )  # fmt: skip
    run = result["folder"]
    evaluation = smallvit.evaluate(run)
    assert evaluation.scores.top1 == pytest.approx(result["test_top1"], abs=1e-3)

    model = smallvit.load(run)
    assert model.classes == ("blue", "green", "red")
    red = photos / "red" / "0.png"
    (one,) = model.predict(red, top=2)
    assert (one.file, len(one.classes)) == (str(red), 2)
    assert smallvit.predict(run, [red], top=2) == [one]
    assert len(model.predict(str(photos))) == 72
    (same,) = model.predict(np.stack([smallvit.Predictor(model).decode(red)]), top=2)
    assert same.classes == one.classes
    assert same.probabilities == pytest.approx(one.probabilities)
    with pytest.raises(ValueError, match=r"the model takes uint8 with shape \(batch, 12, 12, 3\)"):
        model.predict(np.zeros((1, 8, 8, 3), np.uint8))

    drawn = smallvit.explain(run, red, out=tmp_path / "pictures")
    ((picture, (explained,)),) = drawn.items()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert explained.answers[0][0] == one.classes[0]
    assert smallvit.export(run, "safetensors", tmp_path / "m.safetensors").exists()

    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"cannot read .*broken.png"):
        model.predict([red, broken])


def test_a_mistyped_run_is_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "runs" / "pets").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="runs/pet: there is no such folder, did you mean 'pets'"):
        smallvit.load("runs/pet")
    with pytest.raises(ValueError, match="nowhere: there is no such folder"):
        smallvit.load("nowhere")
    with pytest.raises(ValueError, match="pets holds no model"):
        smallvit.load("runs/pets")
