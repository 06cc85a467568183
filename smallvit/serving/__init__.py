"""HTTP server for a trained model: a web page and a JSON API."""

from smallvit.serving.app import make_app
from smallvit.serving.limits import Limits
from smallvit.serving.server import serve

__all__ = ["Limits", "make_app", "serve"]
