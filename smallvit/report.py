"""The report of a run, report.html: one self-contained page, without network access or scripts."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from smallvit.common.files import write_bytes
from smallvit.common.text import shown


class Link(NamedTuple):
    text: str
    address: str


Value = str | int | float | Link | None
Row = Mapping[str, Value]

# In the order of the page: figure, heading, caption. Other figures follow under their own names.
FIGURES = {
    "curves": (
        "Training",
        "Loss, accuracy and learning rate by epoch. Training is measured on augmented images, validation is not.",
    ),
    "confusion": (
        "Confusion matrix",
        "Rows are true classes, columns predicted ones. A perfect model fills the diagonal.",
    ),
    "mistakes": (
        "The worst mistakes",
        "The most confident wrong predictions, in red, above the label. "
        "Some images may be mislabelled: check these first. mistakes.csv has them all.",
    ),
    "attention": (
        "What the model looks at",
        "The image, the map of what the model looks at, and both together. Bright areas matter most.",
    ),
    "augmented": ("Augmentation", "Images as they are, and as training saw them in one batch."),
    "reliability": (
        "Calibration",
        "Bars below the diagonal: the model is overconfident. Above it: underconfident.",
    ),
}
MOST_ROWS = 20  # rows of a table that are shown; the others are collapsed


def write_report(
    folder: Path,
    *,
    title: str,
    summary: Mapping[str, str | tuple[str, str]],
    command: str = "",
    history: Sequence[Row] = (),
    figures: Mapping[str, Path] | None = None,
    classes: Sequence[Row] = (),
    mistakes: Sequence[Row] = (),
    tables: Mapping[str, Sequence[Row]] | None = None,
    details: Mapping[str, Row] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Writes report.html into the folder and returns its path.

    `summary` has the cards at the top, each with a value, or a value and a line below it. `classes` is the table of
    `per_class`, and `mistakes` the list below the pictures of the worst ones. `details` has the collapsed sections at
    the end, such as {"Configuration": {...}, "Versions": {...}}. Figures are PNG files with absolute paths or paths
    relative to the folder.
    """
    figures = dict(figures or {})
    known = [name for name in FIGURES if name in figures]
    sections = []
    for name in [*known, *(name for name in figures if name not in FIGURES)]:
        below = _fold("As a list", _table(mistakes)) if mistakes and name == "mistakes" else ""
        sections.append(_figure(name, folder / figures[name], below))
        if name == "confusion":
            sections.append(_classes(classes))
    if "confusion" not in figures:
        sections.append(_classes(classes))
    sections += [_section(name, _table(rows)) for name, rows in (tables or {}).items() if rows]
    folds = [_fold(name, _pairs(rows)) for name, rows in (details or {}).items() if rows]
    if history:
        folds.insert(0, _fold("Every epoch", _table(history, fold=False)))

    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
{_command(command)}
</header>
{_cards(summary)}
{_notes(notes)}
{"".join(sections)}
{_section("Details", "".join(folds)) if folds else ""}
<footer>Made with smallvit.</footer>
</main>
</body>
</html>
"""
    path = folder / "report.html"
    write_bytes(path, page.encode())
    return path


def escape(text: str) -> str:
    return html.escape(shown(text))


def _command(command: str) -> str:
    return f"<pre class='command'><code>{escape(command)}</code></pre>" if command else ""


def _cards(summary: Mapping[str, str | tuple[str, str]]) -> str:
    def card(name: str, value: str | tuple[str, str]) -> str:
        number, below = (value, "") if isinstance(value, str) else value
        small = f"<small>{escape(below)}</small>" if below else ""
        return f"<div><dt>{escape(name)}</dt><dd>{escape(number)}{small}</dd></div>"

    cards = (card(name, value) for name, value in summary.items())
    return f"<dl class='cards'>{''.join(cards)}</dl>" if summary else ""


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<ul class='notes'>{items}</ul>" if notes else ""


def _figure(name: str, path: Path, more: str = "") -> str:
    if not path.is_file():
        raise ValueError(f"the figure {str(path)!r} does not exist: save it before the report, or leave it out")
    heading, caption = FIGURES.get(name, (name, ""))
    data = base64.b64encode(path.read_bytes()).decode()
    image = f"<img src='data:image/png;base64,{data}' alt='{escape(heading)}'>"
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return _section(heading, f"<figure>{image}{below}</figure>{more}")


def _classes(rows: Sequence[Row]) -> str:
    return _section("Class by class", _table(rows)) if rows else ""


def _table(rows: Sequence[Row], *, fold: bool = True) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shares = {"recall", "precision"}
    numeric = {name for name in columns if not any(isinstance(row.get(name), str | Link) for row in rows)} - shares

    def cell(name: str, value: Value) -> str:
        if isinstance(value, Link):
            return f"<td><a href='{escape(value.address)}'>{escape(value.text)}</a></td>"
        if name in shares and isinstance(value, float):
            return f"<td class='share' style='--share:{value:.1%}'>{value:.1%}</td>"
        return f"<td{' class=number' if name in numeric else ''}>{escape(_text(value))}</td>"

    def table(rows: Sequence[Row]) -> str:
        head = "".join(
            f"<th scope='col'{' class=number' if name in numeric else ''}>{escape(name.replace('_', ' '))}</th>"
            for name in columns
        )
        body = "".join(f"<tr>{''.join(cell(name, row.get(name)) for name in columns)}</tr>" for row in rows)
        return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"

    if not fold or len(rows) <= MOST_ROWS * 1.5:
        return table(rows)
    return table(rows[:MOST_ROWS]) + _fold(f"The other {len(rows) - MOST_ROWS}", table(rows[MOST_ROWS:]))


def _pairs(rows: Row) -> str:
    body = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(_text(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<div class='scroll'><table class='pairs'><tbody>{body}</tbody></table></div>"


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{body}</section>\n"


def _fold(heading: str, body: str) -> str:
    return f"<details><summary>{escape(heading)}</summary>{body}</details>"


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


_CSS = """
:root { --page: #f5f7f9; --card: #fff; --ink: #1f2933; --muted: #5f6c7a; --line: #e1e6eb; --blue: #1f6feb;
  --bar: #dbe8fc; --code: #eef1f5; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161b; --card: #1b2128; --ink: #e6eaef; --muted: #97a3b0; --line: #2c343d; --blue: #6ea8fe;
    --bar: #23395b; --code: #242c35; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.25rem 3rem; }
h1 { margin: 0 0 .75rem; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 0 0 1rem; font-size: 1.15rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
pre, code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.command { margin: 0; padding: .7rem 1rem; background: var(--code); border-radius: 8px; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.4rem 0; }
.cards div, section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.cards div { flex: 1 1 200px; padding: .85rem 1rem; }
.cards dt { color: var(--muted); font-size: .8rem; }
.cards dd { margin: .1rem 0 0; font-size: 1.45rem; font-weight: 650; line-height: 1.25; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
.cards small { display: block; color: var(--muted); font-size: .78rem; font-weight: 400; }
.cards div:first-child { border-color: var(--blue); }
.cards div:first-child dd { color: var(--blue); }
.notes { margin: 0 0 1.4rem; padding: 0 0 0 1.1rem; color: var(--muted); font-size: .92rem; overflow-wrap: anywhere; }
section { margin: 1rem 0; padding: 1.3rem 1.4rem; }
figure { margin: 0; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; padding: .4rem; background: #fff;
  border-radius: 8px; }
figcaption { margin-top: .8rem; color: var(--muted); font-size: .88rem; }
a { color: var(--blue); }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--muted); font-weight: 600; white-space: nowrap; }
td { overflow-wrap: break-word; min-width: 3.5rem; }
th.number, td.number { text-align: right; }
td.share { background: linear-gradient(90deg, var(--bar) var(--share), transparent var(--share)) no-repeat 0 50% /
  100% 78%; min-width: 5.5rem; }
.pairs th { width: 1%; padding-right: 2rem; }
figure + details { margin-top: .8rem; }
details { border-top: 1px solid var(--line); padding: .6rem 0; }
section > details:first-of-type { border-top: 0; padding-top: 0; }
section > details:last-of-type { padding-bottom: 0; }
summary { cursor: pointer; font-weight: 600; font-size: .95rem; }
details[open] > summary { margin-bottom: .6rem; }
footer { margin-top: 1.6rem; color: var(--muted); font-size: .82rem; text-align: center; }
@media (max-width: 600px) { section { padding: 1rem; } main { padding-top: 1.5rem; } }
@media print { body { background: none; } section, .cards div { break-inside: avoid; } }
"""
