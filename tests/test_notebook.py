"""The notebook: its code cells run from top to bottom, and the committed outputs are from such a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[1] / "docs" / "notebook.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_its_outputs_are_of_one_whole_run():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


@pytest.mark.xdist_group("end_to_end")  # its fixture's cache of compiled programs
def test_it_runs(env: dict[str, str], tmp_path: Path):
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in CELLS))
    here = {**env, "MPLBACKEND": "agg", "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, script], env=here, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "% of the test images" in run.stdout
    for name in ("Bag", "Pullover", "Sneaker", "Trouser"):
        assert f"{name:10} looks like " in run.stdout
