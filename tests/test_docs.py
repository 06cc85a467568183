"""The pages: what the reference lists, and that what they point to is there."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import smallvit

DOCS = Path(__file__).parents[1] / "docs"


def test_the_reference_has_every_public_name():
    shown = []
    for path, options in re.findall(r"^::: (\S+)\n((?: +.*\n)*)", (DOCS / "api.md").read_text(), re.MULTILINE):
        if members := re.search(r"members: \[(.+)\]", options):
            shown += [getattr(import_module(path), name) for name in members[1].split(", ")]
        else:
            module, _, name = path.rpartition(".")
            shown.append(getattr(import_module(module), name))
    assert [name for name in smallvit.__all__ if not any(getattr(smallvit, name) is each for each in shown)] == []


@pytest.mark.parametrize("page", ["../README.md", *(path.name for path in sorted(DOCS.glob("*.md")))])
def test_what_a_page_points_to_is_there(page: str):
    path = DOCS / page
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text())]
    missing = [each for each in targets if each and "://" not in each and not (path.parent / each).exists()]
    assert missing == []
