"""The report: self-contained, and harmless whatever the names of files and classes."""

import base64
from html.parser import HTMLParser

import numpy as np
import pytest

from smallvit.plots import image_grid, save
from smallvit.report import Link, write_report
from smallvit.runs.scores import per_class

EVIL = "<script>alert('1')</script>\" onload='x' &amp;"


class Page(HTMLParser):
    """The page as a browser parses it: tags, attributes, text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_page_has_everything_in_one_file(tmp_path):
    figure = tmp_path / "figures" / "curves.png"
    save(image_grid(np.zeros((1, 4, 4, 3), np.uint8), ["x"], 1), figure)
    path = write_report(
        tmp_path,
        title="flowers",
        summary={"Test top-1": "84.3 %", "Epochs": "60"},
        command="smallvit train flowers --epochs 60",
        history=[{"epoch": 1, "train_loss": 2.5, "val_top1": 31.25}],
        figures={"curves": figure.relative_to(tmp_path), "My own": figure},
        classes=[{"class": "rose", "recall": 0.875, "precision": None, "images": 1234}],
        details={"Configuration": {"learning_rate": 0.001, "spt": True}},
        notes=["3 files were left out"],
    )
    assert path == tmp_path / "report.html"
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    for text in ("flowers", "84.3 %", "smallvit train flowers --epochs 60", "31.25", "My own", "3 files were left out"):
        assert text in page.text
    for text in ("rose", "87.5%", "1,234", "learning_rate", "0.001", "True"):
        assert text in page.text
    sources = [value for name, value in page.attributes if name in ("src", "href")]
    inline = "data:image/png;base64," + base64.b64encode(figure.read_bytes()).decode()
    assert sources == [inline, inline]
    assert "http://" not in html
    assert "https://" not in html
    assert sorted(tmp_path.iterdir()) == [tmp_path / "figures", path]


def test_user_input_is_text_only(tmp_path):
    figure = tmp_path / "a.png"
    save(image_grid(np.zeros((1, 4, 4, 1), np.uint8), ["x"], 1), figure)
    path = write_report(
        tmp_path,
        title=EVIL,
        summary={EVIL: EVIL},
        command=EVIL,
        history=[{EVIL: EVIL}],
        figures={EVIL: figure},
        classes=per_class(np.eye(2, dtype=int), [EVIL, "b"]),
        tables={EVIL: [{EVIL: EVIL}]},
        details={EVIL: {EVIL: EVIL}},
        notes=[EVIL],
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(EVIL) == 16
    assert ("alt", EVIL) in page.attributes


def test_classes_stand_behind_the_confusion_and_long_tables_are_folded(tmp_path):
    figure = tmp_path / "a.png"
    save(image_grid(np.zeros((1, 4, 4, 1), np.uint8), ["x"], 1), figure)
    many = per_class(np.eye(100, dtype=int), [f"class {i}" for i in range(100)])
    path = write_report(
        tmp_path, title="t", summary={}, figures={"mistakes": figure, "confusion": figure}, classes=many
    )
    html = path.read_text(encoding="utf-8")
    confusion, table, fold, last, mistakes = (
        html.index(x) for x in ("Confusion", "class 0", "The other 80", "class 99", "The worst mistakes")
    )
    assert confusion < table < fold < last < mistakes


def test_mistakes_stand_below_their_pictures_with_links(tmp_path):
    figure = tmp_path / "a.png"
    save(image_grid(np.zeros((1, 4, 4, 1), np.uint8), ["x"], 1), figure)
    address = "file:///photos/a%27b.png"
    rows = [{"file": Link(EVIL, address), "probability": "99 %"}, {"file": "train[3]", "probability": "98 %"}]
    path = write_report(
        tmp_path,
        title="t",
        summary={"test top-1": ("84.3 %", "95 % interval 80.1 to 87.9")},
        figures={"mistakes": figure, "attention": figure},
        mistakes=rows,
    )
    html = path.read_text(encoding="utf-8")
    assert html.index("The worst mistakes") < html.index("train[3]") < html.index("What the model looks at")
    page = Page(html)
    assert [value for name, value in page.attributes if name == "href"] == [address]
    assert EVIL in page.text
    assert "script" not in page.tags
    assert "95 % interval 80.1 to 87.9" in page.text


def test_least_report(tmp_path):
    page = Page(write_report(tmp_path / "new", title="empty", summary={}).read_text(encoding="utf-8"))
    assert "section" not in page.tags


def test_missing_figure_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.png' does not exist"):
        write_report(tmp_path, title="t", summary={}, figures={"curves": tmp_path / "gone.png"})


def test_per_class_by_hand():
    # Class a: 3 of 4 found, 3 of 5 said rightly. b: 6 of 8, 6 of 7. c never occurs, nor is it said.
    matrix = np.array([[3, 1, 0], [2, 6, 0], [0, 0, 0]])
    assert per_class(matrix, ["a", "b", "c"]) == [
        {"class": "a", "recall": 0.75, "precision": 0.6, "images": 4},
        {"class": "b", "recall": 0.75, "precision": pytest.approx(6 / 7), "images": 8},
        {"class": "c", "recall": None, "precision": None, "images": 0},
    ]
    matrix = np.array([[9, 1], [5, 5]])
    assert [row["class"] for row in per_class(matrix, ["good", "poor"])] == ["poor", "good"]
