"""The OpenAPI document: bodies are read by hand (with their limits), so their schemas are added here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from diptych.server.http.bases import Body

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_WORDS = {
    400: "the request is wrong; the message names the field, the value and the limit",
    401: "no valid key",
    403: "this server was not started with the option for it",
    404: "no such model or request",
    409: "the request was ended from outside",
    413: "the body is too large",
    503: "overloaded or draining; see Retry-After",
}


def body_of(body_type: type[Body]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads this body."""
    schema = {"$ref": f"#/components/schemas/{body_type.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def responses(*statuses: int, schema: Mapping[str, Any] = _ERROR_SCHEMA) -> dict[int | str, dict[str, Any]]:
    """The documented refusals of a route, all in the shape `schema`."""
    return {
        status: {"description": _WORDS[status], "content": {"application/json": {"schema": schema}}}
        for status in statuses
    }


def _with_bounds(schema: Any) -> Any:
    """pydantic calls the bounds of an integer behind a validator `ge` and `le`, which JSON Schema does not know."""
    if isinstance(schema, list):
        return [_with_bounds(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    names = _BOUNDS if schema.get("type") == "integer" else {}
    return {names.get(key, key): _with_bounds(value) for key, value in schema.items()}


def install_openapi(app: FastAPI, *body_types: type[Body]) -> None:
    """Make `app.openapi()` (and so `/openapi.json`) hold the bodies' schemas."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for body_type in body_types:
                schema = _with_bounds(body_type.model_json_schema(ref_template="#/components/schemas/{model}"))
                schemas.update(schema.pop("$defs", {}))
                schemas[body_type.__name__] = schema
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
