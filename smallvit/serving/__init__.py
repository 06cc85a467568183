"""A trained model behind HTTP: a page for people and JSON for programs."""

from smallvit.serving.app import make_app
from smallvit.serving.limits import Limits
from smallvit.serving.server import serve

__all__ = ["Limits", "make_app", "serve"]
