"""What pydantic complains of, in our words: what a value must be, with the limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_RULES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "frozen_set_type": "a list",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number between -2^63 and 2^63 - 1",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "left out",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_type": "a string",
    "string_unicode": "valid Unicode text",
    "tuple_type": "a list",
}
_SIZES = {
    "string_too_long": "{n} characters; it must have at most {max_length}",
    "string_too_short": "{n} characters; it must have at least {min_length}",
    "too_long": "{n} entries; it must have at most {max_length}",
    "too_short": "{n} entries; it must have at least {min_length}",
}


def complaint(error: Mapping[str, Any], path: str, value: str) -> str:
    """One entry of `ValidationError.errors()` as a message about the field `path`, whose value is shown as `value`."""
    kind, context = error["type"], error.get("ctx", {})
    subject = path or "the body"
    if kind in _SIZES:
        return f"{subject} has " + _SIZES[kind].format(n=len(error["input"]), **context)
    rule = _RULES.get(kind)
    if rule is not None:
        return f"{subject} is {value}; it must be {rule.format(**context)}"
    if kind == "union_tag_not_found":
        return f"{subject} is {value}; it must be an object with a type"
    if kind == "union_tag_invalid":
        known = ", ".join(re.findall(r"'~\w+'", context["expected_tags"])).replace("~", "")
        return f"{subject} is {context['tag'].lstrip('~')[:100]!r}; it must be one of {known}"
    if kind == "value_error":  # our own checks say the rest of the sentence
        return f"{subject} {context['error']}"
    if kind in ("conflict", "refused"):  # ours, whole sentences
        return str(error["msg"])
    if kind == "recursion_loop":
        return f"{subject} is nested too deeply"
    return f"{subject} is {value}, which cannot be read"
