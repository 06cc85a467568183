"""The documentation: the reference is complete, and all links lead somewhere."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import smallvit
from smallvit import cli
from smallvit.catalogue import catalogue
from tools.make_tables import filled

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def test_the_reference_has_every_public_name():
    shown = []
    for path, options in re.findall(r"^::: (\S+)\n((?: +.*\n)*)", (DOCS / "api.md").read_text(), re.MULTILINE):
        if members := re.search(r"members: \[(.+)\]", options):
            shown += [getattr(import_module(path), name) for name in members[1].split(", ")]
        else:
            module, _, name = path.rpartition(".")
            shown.append(getattr(import_module(module), name))
    assert [name for name in smallvit.__all__ if not any(getattr(smallvit, name) is each for each in shown)] == []


@pytest.mark.parametrize("page", ["../README.md", *(str(path.relative_to(DOCS)) for path in PAGES)])
def test_what_a_page_points_to_is_there(page: str):
    path = DOCS / page
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()) if "://" not in link]
    assert [file for file, _, _ in links if not (path.parent / file).exists()] == []
    sections = [(path.parent / file if file else path, section) for file, _, section in links if section]
    assert [section for target, section in sections if section not in _sections(target)] == []


def _sections(page: Path) -> list[str]:
    """The anchors of a page's headings: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_option_on_the_pages_exists(command: str, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["smallvit", command, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    known = {*re.findall(r"--[a-z-]+", capsys.readouterr().out)}
    for page in (DOCS.parent / "README.md", *PAGES):
        text = page.read_text().replace("\\\n", " ")
        for call in re.findall(rf"smallvit {command}\b([^`\n]*)", text):
            used = {*re.findall(r"(?<!\S)--[a-z-]+", call.partition("#")[0])}
            assert used <= known, (page.name, call)


def test_both_tables_of_models_are_the_same():
    tables = [
        page.read_text().partition("| model | idea | presets |")[2].partition("\n\n")[0]
        for page in (DOCS.parent / "README.md", DOCS / "models" / "index.md")
    ]
    assert tables[0].replace("docs/models/", "") == tables[1]
    assert len(tables[1].splitlines()) == 22


@pytest.mark.parametrize("page", sorted((DOCS / "models").glob("*.md")), ids=lambda page: page.stem)
def test_the_tables_of_a_model_page_are_up_to_date(page: Path):
    """If it fails: python -m tools.make_tables"""
    assert page.read_text() == filled(page.read_text())


def test_every_preset_is_on_a_page():
    text = "".join(page.read_text() for page in (DOCS / "models").glob("*.md"))
    assert [entry.name for entry in catalogue() if f"`{entry.name.removeprefix('sl_')}`" not in text] == []


def test_the_site_lists_every_page():
    listed = re.findall(r": (\S+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_the_readme_is_short():
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 200
