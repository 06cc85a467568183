"""The OpenAPI description that GET /openapi.json returns."""

from typing import Any

from smallvit import __version__
from smallvit.serving.limits import Limits


def describe(limits: Limits) -> dict[str, Any]:
    upload = {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "additionalProperties": {"type": "string", "format": "binary"},
                    "description": "One file or several, under any name.",
                }
            },
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
    refusals = {
        "400": "The form is invalid.",
        "408": f"The upload took longer than {limits.seconds:g} seconds.",
        "413": f"More than {limits.upload} bytes, or too many images.",
        "415": "Neither a form nor an image.",
        "422": f"No image, a broken image, or an image of more than {limits.pixels} pixels.",
        "503": "Too many images are waiting, or the server is shutting down; Retry-After says when to retry.",
        "504": f"The answer would take longer than {limits.seconds:g} seconds, or an image {limits.decode_seconds:g}.",
    }
    errors = {status: {"description": text, **_json(_ref("Error"))} for status, text in refusals.items()}
    top = {
        "name": "top",
        "in": "query",
        "description": "Number of classes to return, the most probable first; by default all.",
        "schema": {"type": "integer", "minimum": 1},
    }
    number = {"name": "number", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "smallvit serve", "version": __version__, "description": "A trained image classifier."},
        "paths": {
            "/": {"get": {"summary": "The web page", "responses": {"200": {"description": "HTML", "content": _HTML}}}},
            "/predict": {
                "post": {
                    "summary": f"The classes of up to {limits.images} images",
                    "parameters": [top],
                    "requestBody": upload,
                    "responses": {"200": _ok("Predictions"), **errors},
                }
            },
            "/explain": {
                "post": {
                    "summary": f"What the model looks at in up to {limits.explained} images",
                    "requestBody": upload,
                    "responses": {"200": _ok("Explanations"), **errors},
                }
            },
            "/model": {
                "get": {
                    "summary": "Name, classes, preprocessing, threshold, limits",
                    "responses": {"200": _ok("Model")},
                }
            },
            "/health": {"get": {"summary": "Status and load", "responses": {"200": _ok("Health")}}},
            "/live": {"get": {"summary": "Liveness probe", "responses": {"200": {"description": "The process runs."}}}},
            "/ready": {
                "get": {
                    "summary": "Readiness probe",
                    "responses": {"200": _ok("Health"), "503": {"description": "Not ready.", **_json(_ref("Health"))}},
                }
            },
            "/metrics": {
                "get": {
                    "summary": "Metrics for Prometheus",
                    "responses": {"200": {"description": "Prometheus text format 0.0.4"}},
                }
            },
            "/examples": {"get": {"summary": "Names of the example images", "responses": {"200": _ok("Examples")}}},
            "/examples/{number}": {
                "get": {
                    "summary": "An example image",
                    "parameters": [number],
                    "responses": {
                        "200": {"description": "An image", "content": {"image/*": {}}},
                        "404": {"description": "There is no example with this number.", **_json(_ref("Error"))},
                    },
                }
            },
            "/openapi.json": {
                "get": {"summary": "This description", "responses": {"200": {"description": "OpenAPI 3.1"}}}
            },
        },
        "components": {"schemas": _SCHEMAS},
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _ok(name: str) -> dict[str, Any]:
    return {"description": name, **_json(_ref(name))}


def _object(*, optional: dict[str, Any] | None = None, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {**properties, **(optional or {})}, "required": list(properties)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_HTML = {"text/html": {"schema": {"type": "string"}}}
_TEXT, _NUMBER, _INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_UNIT = {"type": "number", "minimum": 0, "maximum": 1}
_MAP = _list(_list(_UNIT))
_SCHEMAS = {
    "Error": _object(error=_TEXT),
    "Predictions": _object(
        images=_list(
            _object(
                name=_TEXT,
                classes=_list(_object(**{"class": _TEXT, "probability": _UNIT})),
                milliseconds=_NUMBER,
                optional={"decision": {**_TEXT, "description": "Only with a threshold: the first class, or unsure."}},
            )
        )
    ),
    "Explanations": _object(
        images=_list(
            _object(
                name=_TEXT,
                seen={"type": "string", "description": "The image as the model sees it, as a data URI."},
                saliency={"oneOf": [_MAP, {"type": "null"}]},
                layers=_list(_object(name=_TEXT, heads=_list(_MAP))),
                milliseconds=_NUMBER,
            )
        )
    ),
    "Model": _object(
        name=_TEXT,
        classes=_list(_TEXT),
        preprocess={"type": "object"},
        threshold={"oneOf": [_UNIT, {"type": "null"}]},
        limits={"type": "object"},
    ),
    "Health": _object(status={"enum": ["ok", "full", "ending"]}, waiting=_INTEGER, images=_INTEGER, batches=_INTEGER),
    "Examples": _object(examples=_list(_TEXT)),
}
