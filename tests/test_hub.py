"""The hub without a network: the uploaded folder, and a folder in place of the hub."""

import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import smallvit
from smallvit.data import Preprocess
from smallvit.exporting.hub import pull, write_hub_folder
from smallvit.runs.saved import Spec, save_model
from tests.runs import run_command

SPEC = Spec("sl_vit_tiny_data", 3, (8, 12), dict(dim=16, depth=1, heads=2, mlp_dim=16, patch_size=4))
PREPROCESS = Preprocess((8, 12), 3, "pad", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
CLASSES = ("a dog", "b```\n# c", "猫")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    variables = jax.jit(SPEC.create().init)(jax.random.key(0), jnp.zeros((1, 8, 12, 3)))
    save_model(folder / "model", SPEC, variables, CLASSES, PREPROCESS)
    (folder / "result.json").write_text(json.dumps({"test_top1": None, "val_top1": 81.25}))
    return folder


class Url(str):
    @property
    def repo_id(self) -> str:
        return self.removeprefix("https://huggingface.co/")


class Hub:
    """The part of huggingface_hub's API that we call, with a folder in place of the hub."""

    def __init__(self, root: Path):
        self.root, self.private = root, False

    def HfApi(self) -> "Hub":
        return self

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> "Url":
        assert exist_ok
        self.private = private
        return Url(f"https://huggingface.co/{repo_id if '/' in repo_id else f'me/{repo_id}'}")

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)

    def snapshot_download(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if not (self.root / repo_id).exists():
            raise RuntimeError(f"\n404 Client Error for {repo_id}\nand much more")
        return str(self.root / repo_id)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_what_is_pushed_can_be_pulled(run: Path, hub: Hub):
    assert smallvit.push(run, "pets", private=True) == "https://huggingface.co/me/pets"
    assert hub.private
    assert sorted(path.name for path in (hub.root / "me/pets").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    pulled, ours = smallvit.load("me/pets"), smallvit.load(run)
    assert (pulled.spec, pulled.classes, pulled.preprocess) == (ours.spec, ours.classes, ours.preprocess)
    jax.tree.map(np.testing.assert_array_equal, pulled.variables, ours.variables)


@pytest.mark.parametrize("part", ["", "model"])
def test_the_model_card(run: Path, part: str, tmp_path: Path):
    write_hub_folder(run / part, tmp_path / "out", "me/pets")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: smallvit\n")
    assert "# sl_vit_tiny_data, 3 classes" in card
    assert "| validation | 81.25 % |" in card
    assert "| test |" not in card
    assert "from scratch" not in card  # nor is it known: a run may have started from trained weights
    assert 'smallvit.load("me/pets")' in card
    assert json.loads(card.split("```json\n")[1].split("\n```")[0]) == list(CLASSES)
    assert "RGB, padded with its mean colour and resized to 8 x 12" in card
    assert "mean 0.5000, 0.4000, 0.3000 and std 0.2000, 0.2000, 0.2000" in card


def test_the_card_says_how_to_load_it(
    run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_hub_folder(run, hub.root / "me/pets", "me/pets")
    card = (hub.root / "me/pets/README.md").read_text()
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save("photo.jpg")
    exec(card.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.startswith(CLASSES)


def test_a_model_folder_alone_has_no_accuracy(run: Path, tmp_path: Path):
    shutil.copytree(run / "model", tmp_path / "pets")
    (tmp_path / "result.json").write_text(json.dumps({"val_top1": 1.0}))  # of something else
    write_hub_folder(tmp_path / "pets", tmp_path / "out")
    assert "Accuracy" not in (tmp_path / "out" / "README.md").read_text()


def test_mistakes_are_one_line(run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def message(call, *args: object) -> str:
        with pytest.raises(ValueError) as error:
            call(*args)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert message(pull, "me/none") == (
        "cannot pull me/none (404 Client Error for me/none): check the name and the network"
    )
    (hub.root / "me/foreign").mkdir(parents=True)
    (hub.root / "me/foreign/config.json").write_text("{}")
    assert message(pull, "me/foreign").startswith("me/foreign on the hub is not a smallvit model: ")
    assert message(smallvit.push, tmp_path, "pets").startswith(f"{tmp_path} holds no model")
    monkeypatch.setattr(hub, "upload_folder", lambda **_: 1 / 0)
    assert message(smallvit.push, run, "pets").startswith("cannot push to pets (division by zero): check the name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if not installed
    assert message(smallvit.push, run, "pets") == "pushing to pets needs huggingface_hub: pip install 'smallvit[hub]'"
    assert message(pull, "pets") == "pulling pets needs huggingface_hub: pip install 'smallvit[hub]'"


def test_the_commands(
    run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_command(monkeypatch, tmp_path, "push", run, "pets", "--private") == 0
    assert hub.private
    assert capsys.readouterr().out == "The model is at https://huggingface.co/me/pets\n"
    assert run_command(monkeypatch, tmp_path, "pull", "me/pets", tmp_path / "pets") == 0
    assert capsys.readouterr().out == f"Wrote sl_vit_tiny_data for 3 classes to {tmp_path / 'pets'}\n"
    assert smallvit.load(tmp_path / "pets").classes == CLASSES
    assert run_command(monkeypatch, tmp_path, "pull", "me/pets", tmp_path / "pets") == 2
    assert capsys.readouterr().err == f"smallvit: {tmp_path / 'pets'} exists and is not empty: choose another folder\n"


def test_the_library_page_runs(
    run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = (Path(__file__).parents[1] / "docs" / "library.md").read_text()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "runs/pets")
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save("photo.jpg")
    names: dict = {}
    for block in page.split("```python\n")[1:]:
        exec(block.split("```")[0], names)
    printed = capsys.readouterr().out
    assert all(name in printed for name in CLASSES)
    np.testing.assert_allclose(names["same"], names["logits"], atol=1e-6)
    assert Path("pets.safetensors").exists()
