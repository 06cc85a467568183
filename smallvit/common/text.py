"""Text for people and files. Names come from untrusted sources and are made safe to display."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any


def shown(text: str) -> str:
    """Makes text safe for a terminal, a page, a picture or JSON.

    Replaces every character that is not printable with U+FFFD: invalid UTF-8 bytes (lone surrogates in Python), escape
    sequences, line breaks and marks that change the writing direction. Letters of all scripts are kept.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def duration(seconds: float) -> str:
    """Formats a duration: 5 s, 1 min 30 s, 2 h 05 min."""
    seconds = max(round(seconds), 0)
    if seconds < 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
