"""Fields of a request that only a chat template can honour (reasoning effort, verbosity, thinking), as its variables."""

from __future__ import annotations

from typing import Any

from diptych.server.http.errors import ApiError


def effort_settings(source: str, effort: str | None, *, param: str = "reasoning_effort") -> dict[str, Any]:
    """Variables for a reasoning effort. Raises ApiError 400 where the template `source` knows none."""
    made: dict[str, Any] = {}
    if effort is None:
        return made
    if "enable_thinking" in source:  # as vLLM does: it can only be on or off
        made["enable_thinking"] = effort != "none"
    if "reasoning_effort" in source:
        made["reasoning_effort"] = effort
    if not made:
        raise unknown_setting(param, effort)
    return made


def verbosity_settings(source: str, verbosity: str | None, *, param: str = "verbosity") -> dict[str, Any]:
    """Variables for a verbosity. Raises ApiError 400 where the template `source` knows none."""
    if verbosity is not None and "verbosity" in source:
        return {"verbosity": verbosity}
    if verbosity not in (None, "medium"):  # OpenAI's default
        raise unknown_setting(param, verbosity)
    return {}


def unknown_setting(param: str, value: str | None) -> ApiError:
    """The refusal of a setting that the template does not read."""
    return ApiError(
        400,
        f"{param} is {value!r}; the chat template of this model has no such setting "
        "(hint: leave it out; what the template does know can be sent as chat_template_kwargs)",
        param=param,
        code="invalid_value",
    )
