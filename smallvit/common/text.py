"""Text for people and files. Names come from anywhere; what is shown of them must be harmless."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any


def shown(text: str) -> str:
    """Fit for a terminal, a page, a picture or JSON.

    What is no printable character becomes U+FFFD: bytes that are no UTF-8 (lone surrogates in Python), escape
    sequences, line breaks, and marks that turn the direction of writing. Letters of all scripts stay.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def duration(seconds: float) -> str:
    """5 s, 1 min 30 s, 2 h 05 min."""
    seconds = max(round(seconds), 0)
    if seconds < 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
