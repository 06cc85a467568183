"""Pictures of explanations, and the command that draws them."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smallvit.data import Preprocess
from smallvit.explanation import saliency
from smallvit.explanation.pictures import Explainer, named_models, picture_names, receptive_fields
from smallvit.runs.answers import Unreadable
from smallvit.runs.prediction import Predictor
from smallvit.runs.saved import Spec, save_model
from tests.runs import run_command
from tests.test_explain import some_variables

FIELDS = dict(dim=16, depth=2, heads=2, mlp_dim=16, patch_size=4)


def made(folder: Path, name: str, **changes: object) -> Path:
    """A model for images with height 8 and width 16."""
    spec = Spec(name, 3, (8, 16), {**FIELDS, **changes})
    variables = some_variables(spec.create(), np.zeros((1, 8, 16, 3), np.float32))
    save_model(folder, spec, variables, ("a", "b", "c"), Preprocess((8, 16), 3, "crop", (0.5,) * 3, (0.2,) * 3))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "plain": made(folder / "plain", "vit_tiny_data"),
        "sl": made(folder / "sl", "sl_vit_tiny_data"),
        "mean": made(folder / "mean", "vit_tiny_data", pool="mean"),
    }


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for name, size in (("one.png", (8, 16)), ("two.png", (40, 64)), ("deep/one.png", (8, 16))):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (*size, 3)).astype(np.uint8)).save(path)
    (tmp_path / "pictures/broken.png").write_bytes(b"none")
    return tmp_path / "pictures"


def test_files_are_explained_in_their_own_shape(models: dict[str, Path], pictures: Path):
    explainer = Explainer([models["plain"]])
    broken, one, two = explainer([pictures / "broken.png", pictures / "one.png", pictures / "two.png"])
    assert isinstance(broken, Unreadable)
    predictor = Predictor(models["plain"])
    saved = predictor.saved
    for (explained,), name, shape in ((one, "one.png", (8, 16)), (two, "two.png", (32, 64))):
        image = predictor.decode(pictures / name)[None]
        assert explained.image.shape == (*shape, 3)  # as sharp as the file
        expected = saliency(saved.model, saved.variables, np.asarray(saved.preprocess.normalise(image)))[0]
        np.testing.assert_allclose(explained.heat, expected, atol=1e-4)
        probability = predictor(image)[0]
        assert explained.answers[0] == ("abc"[probability.argmax()], pytest.approx(probability.max(), abs=1e-5))


def test_a_layer_and_its_heads(models: dict[str, Path], pictures: Path):
    file = (pictures / "one.png").read_bytes()
    first, last = (
        next(iter(Explainer([models["mean"]], layer=layer, heads=True)([io.BytesIO(file)])))[0] for layer in (1, 2)
    )
    assert first.heads is not None
    assert first.heads.shape == (2, 2, 4)
    assert first.heat.shape == (2, 4)
    mean = first.heads.mean(axis=0)
    np.testing.assert_allclose(first.heat, (mean - mean.min()) / np.ptp(mean), atol=1e-5)
    assert np.abs(first.heat - last.heat).max() > 0.01
    (without,) = next(iter(Explainer([models["mean"]], heads=True)([io.BytesIO(file)])))
    np.testing.assert_allclose(without.heads, last.heads)


def test_names(tmp_path: Path):
    files = [Path("x/a.png"), Path("x/b.png"), Path("y/b.jpg"), Path("z/x/b.png"), io.BytesIO()]
    names = [path.name for path in picture_names(files, tmp_path)]
    assert names == ["a", "x-b", "y-b", "x-b-2", "stdin"]


def test_models_are_told_apart(models: dict[str, Path]):
    assert list(named_models([models["plain"], models["sl"]])) == ["vit_tiny_data", "sl_vit_tiny_data"]
    assert list(named_models([models["plain"], models["mean"]])) == ["plain", "mean"]


def test_two_fields(models: dict[str, Path]):
    found, figure = receptive_fields([models["plain"], models["sl"]])
    assert [field.theory for field in found.values()] == [(4, 4), (8, 8)]
    text = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert text[0] == "4 x 4 pixels measured, 4 x 4 in theory"


def test_the_command(models: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch, capfd):
    out = tmp_path / "out"
    args = [models["plain"], pictures, "--out", out, "--heads", "--compare", models["sl"]]
    assert run_command(monkeypatch, tmp_path, "explain", *args) == 1
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"smallvit: cannot read {pictures / 'broken.png'}: ")
    names = {f"{name}-{kind}.png" for name in ("pictures-one", "deep-one", "two") for kind in ("explained", "heads")}
    assert {path.name for path in out.iterdir()} == names
    assert all(f"{out / name}" in printed.out for name in names if "explained" in name)
    for path in out.iterdir():
        with Image.open(path) as picture:
            picture.load()
            assert picture.width > picture.height


def test_the_command_on_layers_and_first_tokens(models, pictures: Path, tmp_path: Path, monkeypatch, capfd):
    out = tmp_path / "out"
    args = [models["sl"], pictures / "*.png", "--out", out, "--temperatures", "--receptive-field"]
    (pictures / "broken.png").unlink()
    assert run_command(monkeypatch, tmp_path, "explain", *args) == 0
    printed = capfd.readouterr().out
    assert "block_1/attention" in printed
    assert "sl_vit_tiny_data: one token sees " in printed
    assert {path.name for path in out.iterdir()} == {"temperatures.png", "receptive-field.png"}


MISTAKES = {
    "no model": (["{pictures}", "{pictures}"], "{pictures} holds no model"),
    "nothing": (["{plain}"], "nothing to explain: give images, --temperatures or --receptive-field"),
    "missing": (["{plain}", "{pictures}/x.png"], "{pictures}/x.png: there is no such file or folder"),
    "layer": (["{plain}", "{pictures}", "--layer", "3"], "layer 3 of vit_tiny_data must be from 1 to 2"),
    "layer 0": (["{plain}", "{pictures}", "--layer", "0"], "layer 0 of vit_tiny_data must be from 1 to 2"),
    "itself": (["{plain}", "{pictures}", "--compare", "{plain}"], "{plain} would be compared with itself"),
    "both": (
        ["{plain}", "{pictures}", "--temperatures", "--heads"],
        "--temperatures and --receptive-field cannot be combined",
    ),
    "no test images": (["{plain}", "--temperatures"], "the test images of {plain} are not available: give images"),
    "broken": (["{plain}", "{pictures}", "--temperatures"], "cannot read {pictures}/broken.png"),
    "a file": (["{plain}", "{pictures}", "--out", "{pictures}/one.png"], "{pictures}/one.png is a file"),
    "over": (["{plain}", "{pictures}", "{tmp}/a-explained.png", "{tmp}/a.png", "--out", "{tmp}"], "{tmp}/a-explained"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, models: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch, capfd):
    for name in ("a.png", "a-explained.png"):
        (tmp_path / name).write_bytes((pictures / "one.png").read_bytes())
    args, message = MISTAKES[mistake]
    places = {"plain": models["plain"], "pictures": pictures, "tmp": tmp_path}
    before = sorted([*pictures.rglob("*"), *models["plain"].rglob("*"), *tmp_path.glob("*.png")])
    assert run_command(monkeypatch, tmp_path, "explain", *(arg.format(**places) for arg in args)) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    *_, line = printed.err.splitlines()
    assert line.startswith(f"smallvit: {message.format(**places)}")
    assert sorted([*pictures.rglob("*"), *models["plain"].rglob("*"), *tmp_path.glob("*.png")]) == before
