"""The usage snippets of the model pages, run as printed.

The models have full size and take minutes to compile, so they are run abstractly: every line and shape, but no numbers.
SMALLVIT_SNIPPETS=real computes them, too.
"""

import contextlib
import io
import os
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("as_a_user")

SNIPPETS = sorted(path for path in (ROOT / "docs" / "models").glob("*.md") if path.stem != "index")
PRINTED = {
    "cvt": [],  # these two print no shape
    "levit": [],
    "patch_merger": ["(1, 1000)", "(4, 8, 1024)"],
    "sl_vit": ["(4, 1000)", "(4, 256, 1024)"],
}


@pytest.mark.parametrize("path", SNIPPETS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")
def test_snippet(path: Path):
    code = path.read_text().split("```python\n")[1].split("```")[0]
    names: dict = {}
    printed = io.StringIO()
    real = os.environ.get("SMALLVIT_SNIPPETS") == "real"

    def run() -> jax.Array:
        exec(code, names)
        return names["output"][0] if isinstance(names["output"], tuple) else names["output"]

    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):
        output = run() if real else jax.eval_shape(run)
    assert output.shape == (names["img"].shape[0], 1000)
    assert not real or jax.numpy.isfinite(output).all()
    shapes = [line for line in printed.getvalue().splitlines() if line.startswith("(")]
    assert shapes == PRINTED.get(path.stem, ["(1, 1000)"])
    assert "Number of parameters in Flax model: " in printed.getvalue()


def test_the_readme_runs():
    readme = (ROOT / "README.md").read_text()
    names: dict = {}
    for block in readme.split("```python\n")[1:]:
        exec(block.split("```")[0], names)
    assert names["logits"].shape == (4, 10)
    assert names["tokens"].shape == (4, 65, 192)
    assert names["large"].apply(names["variables"], jax.numpy.zeros((1, 48, 48, 3))).shape == (1, 10)


def test_there_is_a_snippet_for_every_model():
    index = (ROOT / "docs" / "models" / "index.md").read_text()
    assert [path.stem for path in SNIPPETS if f"({path.name})" not in index] == []
    assert len(SNIPPETS) == 20
