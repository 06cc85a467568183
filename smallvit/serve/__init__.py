"""A trained model behind HTTP: a page for people and JSON for programs."""

from smallvit.serve.app import make_app
from smallvit.serve.limits import Limits
from smallvit.serve.server import serve

__all__ = ["Limits", "make_app", "serve"]
