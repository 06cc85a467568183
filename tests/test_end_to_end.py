"""All commands in sequence, as a user types them: each uses the files of the one before, and their results agree."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from smallvit.data import load_data
from tests.runs import TINY
from tests.served import drop, serving

pytestmark = pytest.mark.xdist_group("end_to_end")


def typed(env: dict[str, str], *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs `smallvit ARGS` in a separate process."""
    command = [sys.executable, "-m", "smallvit", *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    return done


def test_from_training_to_the_browser(env: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest):
    run, photos = tmp_path / "short", tmp_path / "photos"
    typed(env, "train", *TINY, "--epochs", 0.2, "--learning-rate", 0.01, "--runs", tmp_path, "--name", "short")
    result = json.loads((run / "result.json").read_text())
    assert result["test_top1"] > 20  # of ten classes

    found = typed(env, "evaluate", run)
    assert f"{result['test_top1']:.2f} %" in found.stdout
    assert json.loads((run / "evaluation/evaluation.json").read_text())["top1"] == pytest.approx(result["test_top1"])

    photos.mkdir()
    test = load_data().test
    assert test is not None
    pixels = test.images[[250, 1850]]  # trousers and a boot
    for name, image in zip(("one", "two"), pixels, strict=True):
        Image.fromarray(image[..., 0]).save(photos / f"{name}.png")

    rows = json.loads(typed(env, "predict", run, photos, "--top", 10, "--json", "-").stdout)
    assert [Path(row["file"]).name for row in rows] == ["one.png", "two.png"]
    answers = [{each["class"]: each["probability"] for each in row["predictions"]} for row in rows]
    best = [next(iter(each)) for each in answers]

    explained = typed(env, "explain", run, photos)
    for line, name in zip(explained.stdout.splitlines()[1:], best, strict=True):
        assert name in line
    assert sorted(path.name for path in (run / "explanations").iterdir()) == ["one-explained.png", "two-explained.png"]

    def agree(logits: np.ndarray, facts: dict) -> None:
        assert facts["temperature"] != 1
        probabilities = np.asarray(jax.nn.softmax(logits / np.float32(facts["temperature"]), axis=-1))
        expected = [[each[name] for name in facts["classes"]] for each in answers]
        np.testing.assert_allclose(probabilities, expected, atol=1e-5)

    typed(env, "export", run, "--format", "stablehlo")
    facts = json.loads((run / "export/model.stablehlo.json").read_text())
    program = jax.export.deserialize(bytearray((run / "export/model.stablehlo").read_bytes()))
    agree(program.call(pixels), facts)
    if all(find_spec(package) for package in ("jax2onnx", "onnx", "onnxruntime")):
        import onnxruntime  # pyright: ignore[reportMissingImports]

        typed(env, "export", run, "--format", "onnx")
        agree(onnxruntime.InferenceSession(run / "export/model.onnx").run(None, {"images": pixels})[0], facts)
    else:
        refused = typed(env, "export", run, "--format", "onnx", code=2)
        assert refused.stderr.startswith("smallvit: export to onnx needs ")
        assert refused.stderr.endswith(": pip install 'smallvit[onnx]'\n")

    browser: Any = request.getfixturevalue("browser")  # only now: without one, all the above is tested still
    with serving(run, "--examples", photos, env=env) as (address, _):
        page = browser.new_page()
        page.goto(address)
        page.get_by_role("button", name="Example 2:").wait_for()
        drop(page, (photos / "two.png").read_bytes())
        page.locator("#controls").wait_for(state="visible")
        assert page.locator("#bars .name").all_inner_texts()[0] == best[1]
        assert page.locator("#bars .value").all_inner_texts()[0] == f"{100 * answers[1][best[1]]:.1f} %"
        page.close()
