"""Errors as clients expect them: one JSON shape for each protocol, the right status, nothing else.

Owns the mapping from `EngineError` to HTTP. Imports ground only, besides the web framework.

>>> error_body(ApiError(404, "model 'x' is not served here", param="model", code="model_not_found"))["error"]["code"]
'model_not_found'
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from diptych.ground.errors import CapacityError, EngineError, PromptTooLong, RequestError, SequenceError
from diptych.server.http.wording import complaint

logger = logging.getLogger("diptych.server")

MAX_SHOWN_VALUE = 120  # characters of a refused value that are repeated in the message
_BRIEF = reprlib.Repr()  # looks at the beginning of a value only, as it may have a million entries
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = MAX_SHOWN_VALUE
_BRIEF.maxlist = _BRIEF.maxdict = 12

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "overloaded_error",
}


_ANTHROPIC_TYPES = {405: "invalid_request_error", 413: "request_too_large", 500: "api_error"}
# by the refused field: what Anthropic's clients read to go on another way; their tool runners then send whole conversations
_ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}


class ApiError(Exception):
    """A refusal with its HTTP status; becomes `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def is_anthropic(path: str) -> bool:
    """Whether a route speaks Anthropic's protocol."""
    return path.removeprefix("/v1").startswith("/messages")


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error in Anthropic's protocol, which has no place for the field but the message."""
    kind = _ANTHROPIC_TYPES.get(error.status, _TYPES.get(error.status, "api_error"))
    details = _ANTHROPIC_DETAILS.get(error.param or "")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message} | ({"details": details} if details else {}),
    }


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error answer or of an SSE `error` event."""
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.status, "api_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError, path: str = "") -> Response:
    """The whole answer in the shape of the route `path`, with what 401 and a later try need in its head."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    body = anthropic_error(error) if is_anthropic(path) else error_body(error)
    response = JSONResponse(body, status_code=error.status, headers=headers)
    if error.status == 401:
        for challenge in ("Bearer", 'Basic realm="diptych"'):  # a line for each: Chromium reads no further than a comma
            response.headers.append("WWW-Authenticate", challenge)
    return response


def from_engine_error(error: BaseException, *, retry_after_s: float = 1.0) -> ApiError:
    """Translate an engine's error. What is no fault of the client becomes 500 without its text: it is for the log alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), param=error.param or "prompt", code="context_length_exceeded")
    if isinstance(error, RequestError) and error.param == "adapter":  # it was there when the body came
        return ApiError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, CapacityError):
        return ApiError(503, str(error), param=error.param, code="overloaded", retry_after_s=retry_after_s)
    if isinstance(error, SequenceError):
        return ApiError(500, "this request failed in the engine; see the server's log", code="request_failed")
    if isinstance(error, EngineError):
        return ApiError(500, "the engine failed; see the server's log", code="engine_failed")
    return ApiError(500, "the server failed while answering; see its log", code="internal_error")


def of_stream(error: Exception) -> ApiError:
    """What a client is told in the last event, where its answer has begun. What nobody expected is logged."""
    if not isinstance(error, ApiError):
        logger.error("stream failed", exc_info=error)
    return from_engine_error(error)


def from_validation_error(error: ValidationError) -> ApiError:
    """The first complaint of pydantic in our words: which field, which value, which limit."""
    errors = error.errors(include_url=False)
    # of the branches of a union, the one that got furthest is what the client meant
    first = max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    path = _path(first["loc"])
    if first["type"] == "union_tag_invalid":
        path += ".type"
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing; it is required", param=path, code="missing_required_parameter")
    message = complaint(first, path, shown(first["input"]))
    return ApiError(400, message, param=path or first.get("ctx", {}).get("param"), code="invalid_value")


def from_query_error(first: Mapping[str, Any]) -> ApiError:
    """The first complaint about a parameter in a path or a query, whose place (`query`, `path`) stands before its name."""
    path = _path(tuple(part.removesuffix("[]") if isinstance(part, str) else part for part in first["loc"][1:]))
    return ApiError(400, complaint(first, path, shown(first["input"])), param=path, code="invalid_value")


def shown(value: object) -> str:
    """A refused value, short enough for a message and free of lone surrogates."""
    text = _BRIEF.repr(value)
    text = text if len(text) <= MAX_SHOWN_VALUE else text[:MAX_SHOWN_VALUE] + "..."
    return text.encode("utf-8", "replace").decode()


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`, without the names of union branches."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_BRANCHES:
            text += f".{part}" if text else part
    return text


# pydantic puts the tried branch of a union into the location
_UNION_BRANCHES = frozenset({"str", "int", "float", "bool", "constrained", "nullable"})
