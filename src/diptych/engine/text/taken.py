"""What a chat template takes of a conversation, and the conversation in other words where it would refuse or lose some of it.

Agents send several system messages, some in the middle, speak behind the results of their tools, and send back what the model
said, thought and called in one message. Templates were written for less. Nothing is left out and the order stays: messages join
where a template wants one, a system message that it knows nowhere becomes part of what the user says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import ne
from typing import Any

from diptych.ground.errors import TemplateError

SYSTEM_ROLES = ("system", "developer")
_BETWEEN = "\n\n"
_TEXTS = ("qfirstq", "qsecondq", "qthirdq")  # that nobody else writes
# what ids of calls are in Mistral's templates
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_LONG_ID = "call_0123456789abcdef01234567"

_THOUGHTS = ("thinking", "reasoning_content")
_SAID_NOTHING = {"role": "assistant", "content": ""}
_CALL = {"name": "look", "arguments": {"at": "it"}}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look", "parameters": {"type": "object", "properties": {}}},
}

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], str]  # of messages and tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Whether a template shows..."""

    system: bool = True  # a system message at the beginning
    systems: bool = True  # several there
    later_system: bool = True  # one behind other messages
    developer: bool = False  # one that is called developer's
    users: bool = True  # two messages of the user's, one behind the other
    answers: bool = True  # two of the assistant's
    after_result: bool = True  # what the user says behind the result of a call
    said_and_thought: bool = True  # a text, a thought and a call in one message
    calls: bool = True  # several calls in one message
    long_ids: bool = True  # ids of calls that are not nine letters and digits

    @property
    def lacks(self) -> list[str]:
        """In words what it does not show; without `developer`, who is called `system` then."""
        words = {
            "system": "system messages",
            "systems": "several system messages",
            "later_system": "later system messages",
            "users": "two messages of the user's in a row",
            "answers": "two answers in a row",
            "after_result": "words of the user's behind a tool's result",
            "said_and_thought": "text beside a thought and a call",
            "calls": "several calls at once",
            "long_ids": "ids of calls but nine letters and digits",
        }
        return [told for name, told in words.items() if not getattr(self, name)]


def find_taken(render: Render, *, names_developer: bool) -> Taken:
    """Read off a template what it shows; `render` gives the prompt, or raises TemplateError.

    names_developer: the template knows the word. Others print any role, and the model has never seen this one.
    """
    first, second, third = _TEXTS
    system, later = _message("system", first), _message("system", second)
    ask, answer, more = _message("user", "Hi"), _message("assistant", "Hello"), _message("user", first)

    def renders(*messages: Message, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        try:
            return render(messages, tools)
        except TemplateError:
            return ""

    def shows(*messages: Message) -> bool:
        text = renders(*messages)
        return all(message["content"] in text for message in messages)

    def renders_call(*behind: Message, ids: Sequence[str] = ("abcdef123",), **fields: str) -> str:
        calls = [{"id": name, "type": "function", "function": _CALL} for name in ids]
        results = [{"role": "tool", "content": third, "tool_call_id": name, "name": _CALL["name"]} for name in ids]
        called = {"role": "assistant", "content": "", "tool_calls": calls, **fields}
        return renders(ask, called, *results, *behind, tools=[_TOOL])

    if not shows(more):  # no chat: a reranker's template knows queries and documents
        return Taken(developer=names_developer)
    # some count who speaks in turns, a system message among them
    middles = ((ask, later), (ask, answer, ask, later), (ask, later, answer, ask), (ask, answer, later, ask))
    knows_calls = third in renders_call()  # else nothing more is learnt from one
    thought = {"thinking": first, "reasoning_content": first}
    return Taken(
        system=shows(system, ask),
        systems=shows(system, later, ask),
        later_system=all(shows(system, *middle) for middle in middles),
        developer=names_developer and shows(_message("developer", first), ask),
        users=shows(more, _message("user", second)),
        answers=shows(ask, _message("assistant", first), _message("assistant", second), ask),
        after_result=not knows_calls or first in renders_call(more),
        said_and_thought=not renders_call(**thought) or bool(renders_call(**thought, content=second)),
        calls=not knows_calls or bool(renders_call(ids=("abcdef123", "abcdef124"))),
        long_ids=not knows_calls or third in renders_call(ids=[_LONG_ID]),
    )


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether users and assistants speak in turns, which every template takes."""
    roles = [message.get("role") for message in messages]
    in_turns = all(role in ("user", "assistant") for role in roles) and all(map(ne, roles, roles[1:]))
    return in_turns and not any(message.get("tool_calls") for message in messages)


def fitted(messages: Sequence[Message], taken: Taken) -> list[dict[str, Any]]:
    """The messages as the template takes them."""
    made: list[dict[str, Any]] = []
    is_beginning, is_moved = True, False  # the last of `made` was a system message until now
    for message in messages if taken.calls else _one_by_one(messages):
        one = dict(message)
        if one.get("role") == "developer" and not taken.developer:
            one["role"] = "system"
        is_system = one.get("role") in SYSTEM_ROLES
        is_beginning = is_beginning and is_system
        moves = is_system and not (taken.system if is_beginning else taken.later_system)
        if moves:
            one["role"] = "user"
        if not taken.long_ids:
            _shorten_ids(one)
        if not taken.said_and_thought:
            _join_thought(one)
        if made and _wants_one(made[-1], one, taken, is_beginning=is_beginning, is_moved=moves or is_moved):
            made[-1] = _one_of(made[-1], one)
        else:
            made.append(one)
            is_moved = moves
    return made


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Of a message with several calls each in one of its own, its result behind it."""
    waiting: list[Message] = []  # calls, for their results
    for message in messages:
        if message.get("role") == "tool":
            same = (one for one in waiting if one["tool_calls"][0].get("id") == message.get("tool_call_id"))
            if (call := next(same, waiting[0] if waiting else None)) is not None:
                waiting.remove(call)
                yield call
            yield message
            continue
        yield from waiting
        calls = message.get("tool_calls") or ()
        waiting = [{**(_SAID_NOTHING if i else message), "tool_calls": [call]} for i, call in enumerate(calls)]
        if not calls:
            yield message
    yield from waiting


def _wants_one(before: Message, message: Message, taken: Taken, *, is_beginning: bool, is_moved: bool) -> bool:
    """Whether both become one message: where the template takes one alone, or a system message became the user's."""
    if not (_is_text(before) and _is_text(message)):
        return False
    match before.get("role"), message.get("role"):
        case "user", "user":
            return is_moved or not taken.users
        case "assistant", "assistant":
            return not taken.answers and not before.get("tool_calls")
        case "tool", "user":
            return not taken.after_result
        case _:
            return is_beginning and not taken.systems


def _one_of(before: Message, message: Message) -> dict[str, Any]:
    made = {**message, **before}
    for name in ("content", *_THOUGHTS):
        if name in made:
            made[name] = _BETWEEN.join(one[name] for one in (before, message) if one.get(name))
    return made


def _shorten_ids(message: dict[str, Any]) -> None:
    """Nine letters and digits for every other id, the same for the same."""

    def short(name: str) -> str:
        return name if _SHORT_ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:9]

    if isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = short(message["tool_call_id"])
    if message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "id": short(call["id"])} if isinstance(call.get("id"), str) else call
            for call in message["tool_calls"]
        ]


def _join_thought(message: dict[str, Any]) -> None:
    """What was said beside a thought and a call joins the thought."""
    thoughts = [name for name in _THOUGHTS if message.get(name)]
    if thoughts and message.get("tool_calls") and message.get("content") and _is_text(message):
        message |= {name: message[name] + _BETWEEN + message["content"] for name in thoughts}
        message["content"] = ""


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _is_text(message: Message) -> bool:
    return isinstance(message.get("content"), str | None)
