"""The layering: which package may import which."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "smallvit"
BELOW = {
    "common": 0,
    "catalogue": 0,
    "kernels": 1,
    "ops": 2,
    "layers": 3,
    "registry": 4,
    "models": 5,
    "data": 5,
    "augment": 5,
}
BELOW |= {"count": 6, "convert": 6, "runs": 6, "plots": 7, "report": 7}
BELOW |= dict.fromkeys(("training", "evaluation", "explanation", "exporting", "serving", "doctor"), 8) | {
    "commands": 9,
    "cli": 10,
    "__main__": 11,
}
# The end of a training run evaluates and explains what it trained, as does that of a cross-validation; the server
# explains on request.
SIBLINGS = {("training/finish.py", "evaluation"), ("training/finish.py", "explanation")}
SIBLINGS |= {("training/crossvalidation.py", "evaluation"), ("serving/maps.py", "explanation")}


def rooms(file: Path) -> Iterator[str]:
    """The packages of smallvit that a file imports, anywhere in it; the package itself ranks above all."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("smallvit.") and "__" not in name)
        yield from ("cli" for name in names if name == "smallvit")


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file: Path):
    path = file.relative_to(PACKAGE)
    room = path.parts[0].removesuffix(".py")
    if room == "__init__":
        return
    wrong = {each for each in rooms(file) if each != room and BELOW[each] >= BELOW[room]}
    assert wrong - {each for name, each in SIBLINGS if name == path.as_posix()} == set()


@pytest.mark.parametrize("init", sorted(PACKAGE.rglob("__init__.py")), ids=lambda file: file.parent.name)
def test_no_public_name_hides_a_module(init: Path):
    inside = [*init.parent.glob("*.py"), *(path.parent for path in init.parent.glob("*/__init__.py"))]
    nodes = [node for node in ast.walk(ast.parse(init.read_text())) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in nodes for alias in node.names}
    assert names & {path.stem for path in inside} == set()


@pytest.mark.parametrize("package", ["smallvit", "smallvit.augment", "smallvit.plots", "smallvit.training"])
def test_names_are_imported_on_first_use(package: str):
    code = f"""
import sys, {package} as package
heavy = {{"jax", "flax", "orbax", "matplotlib", "tyro"}} & sys.modules.keys()
assert not heavy, heavy
missing = [name for name in package.__all__ if not hasattr(package, name)]
assert not missing, missing
assert set(package.__all__) <= set(dir(package))
assert not hasattr(package, "no_such_name")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
