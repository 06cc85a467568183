"""Suggestions for mistyped words."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Returns a hint such as ", did you mean 'train'?", or an empty string if no word is close."""
    close = get_close_matches(word, list(words))
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""
