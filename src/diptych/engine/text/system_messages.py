"""System messages for chat templates that know none, or one at the beginning alone, and refuse or lose all others.

Agents send several, and some in the middle of a conversation. What such a template would not show stands where it was, in
other words: several at the beginning become one, and a later one becomes part of what the user says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.ground.errors import TemplateError

SYSTEM_ROLES = ("system", "developer")
_BETWEEN = "\n\n"
_FIRST, _SECOND = "qfirstq", "qsecondq"  # texts that nobody else writes

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemPlaces:
    """What a template shows: one system message at the beginning, several there, one behind others, one called developer's."""

    first: bool = True
    several: bool
    later: bool
    developer: bool = False


def find_places(render: Callable[[Sequence[Message]], str], *, names_developer: bool) -> SystemPlaces:
    """Read off a template what it shows; `render` gives the prompt of messages, or raises TemplateError.

    names_developer: the template knows the word. Others print any role, and the model has never seen this one.
    """
    first, second = _message("system", _FIRST), _message("system", _SECOND)
    ask, answer = _message("user", "Hi"), _message("assistant", "Hello")

    def shows(*messages: Message) -> bool:
        try:
            text = render(messages)
        except TemplateError:
            return False
        return all(message["content"] in text for message in messages)

    # some count who speaks in turns, a system message among them
    middles = ((ask, second), (ask, answer, ask, second), (ask, second, answer, ask), (ask, answer, second, ask))
    return SystemPlaces(
        first=shows(first, ask),
        several=shows(first, second, ask),
        later=all(shows(first, *middle) for middle in middles),
        developer=names_developer and shows(_message("developer", _FIRST), ask),
    )


def has_any(messages: Sequence[Message]) -> bool:
    """Whether there is a system message."""
    return any(message.get("role") in SYSTEM_ROLES for message in messages)


def placed(messages: Sequence[Message], places: SystemPlaces) -> list[dict[str, Any]]:
    """The messages with every system message where the template shows it.

    Roles alternate where they did: what becomes the user's joins the user's words before or behind it.
    """
    made: list[dict[str, Any]] = []
    is_beginning, is_moved = True, False  # the last of `made` was a system message until now
    for message in messages:
        is_system = message.get("role") in SYSTEM_ROLES
        if message.get("role") == "developer" and not places.developer:
            message = {**message, "role": "system"}
        is_beginning = is_beginning and is_system
        moves = is_system and not (places.first if is_beginning else places.later)
        joins = (
            (moves and made[-1:] and made[-1].get("role") == "user")
            or (is_moved and message.get("role") == "user")
            or (is_beginning and made and not places.several)
        )
        if joins and _is_text(made[-1]) and _is_text(message):
            made[-1]["content"] += _BETWEEN + message["content"]
            continue
        made.append({**message, "role": "user"} if moves else dict(message))
        is_moved = moves
    return made


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _is_text(message: Message) -> bool:
    return isinstance(message.get("content"), str)
