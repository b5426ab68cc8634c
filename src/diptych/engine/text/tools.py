"""Tool calls in the output text: found while it streams, and the grammar that forces them.

Two formats: Hermes / Qwen (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, anywhere) and Llama 3
(the whole message is `{"name": ..., "parameters": {...}}`, several separated by `;`, after `<|python_tag|>` or not).
A call comes out only when it is whole and valid JSON; anything else stays content, to the last character.

>>> parser = ToolCallParser(ToolFormat.HERMES, new_id=lambda: "call_1")
>>> parser.push('Let me look. <tool_call>{"name": "time", "arguments": {}}').calls[0].name
'time'
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from diptych.engine.text.reasoning import partial_end
from diptych.ground.errors import RequestError
from diptych.ground.request import StructuredSpec

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_JSON_BLANKS = " \t\r\n"
_JSON_PLAIN = frozenset(_JSON_BLANKS + ":,+-.0123456789truefalsnE")


class ToolFormat(Enum):
    """How a model writes a call."""

    HERMES = "hermes"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of one call, in the shape of OpenAI's stream: id and name come once, then the arguments' JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One whole call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """What became certain: plain content, and calls."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


def tool_format_of_template(source: str) -> ToolFormat | None:
    """The format a chat template teaches its model, or None when it does not know tools."""
    if HERMES_BEGIN in source:
        return ToolFormat.HERMES
    if PYTHON_TAG in source or ("tools" in source and '"parameters": ' in source):
        return ToolFormat.LLAMA3
    return None


def parse_tool_calls(
    text: str,
    tool_format: ToolFormat,
    *,
    tool_names: Collection[str] | None = None,
    new_id: Callable[[], str] | None = None,
) -> tuple[str, tuple[ToolCall, ...]]:
    """(content, calls) of a whole output; the same as streaming it, in pieces of any size."""
    parser = ToolCallParser(tool_format, tool_names=tool_names, new_id=new_id)
    deltas = [parser.push(text), parser.finish()]
    calls: dict[int, ToolCall] = {}
    for delta in (call for one in deltas for call in one.calls):
        known = calls.get(delta.index, ToolCall(id=delta.id or "", name=delta.name or "", arguments=""))
        calls[delta.index] = ToolCall(id=known.id, name=known.name, arguments=known.arguments + delta.arguments)
    return "".join(one.content for one in deltas), tuple(calls.values())


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class _Place(Enum):
    START = "start"  # Llama 3 only: nothing but blanks so far, so the message may be a call
    CONTENT = "content"
    CALL = "call"  # inside the JSON of a call, or before it
    AFTER = "after"  # behind a call


class ToolCallParser:
    """One output, piece by piece.

    tool_names: the tools the request offers. In the Llama 3 format a JSON object is a call only if it names one of them
    (None: any name), because a plain JSON answer looks alike.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        *,
        tool_names: Collection[str] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._format = tool_format
        self._names = None if tool_names is None else frozenset(tool_names)
        self._new_id = new_id or _new_id
        self._place = _Place.START if tool_format is ToolFormat.LLAMA3 else _Place.CONTENT
        self._held = ""
        self._raw = ""  # what the call is made of so far, tags included, should it turn out to be none
        self._n_before = 0  # characters of _raw that are tag and blanks
        self._json = JsonEnd()
        self.n_calls = 0

    def push(self, text: str) -> ToolDelta:
        """Take new text."""
        self._held += text
        return self._advance(is_last=False)

    def finish(self) -> ToolDelta:
        """The output is over; a call that is not whole comes back as content."""
        delta = self._advance(is_last=True)
        rest, self._raw, self._held = self._raw + self._held, "", ""
        if self._place is _Place.AFTER:
            rest = "" if not rest.strip() else rest
        return ToolDelta(content=delta.content + rest, calls=delta.calls)

    def _advance(self, *, is_last: bool) -> ToolDelta:
        content = ""
        calls: list[ToolCallDelta] = []
        moves = True
        while moves and self._held:
            if self._place is _Place.START:
                moves = self._at_start(is_last=is_last)
            elif self._place is _Place.CONTENT:
                piece, moves = self._at_content(is_last=is_last)
                content += piece
            elif self._place is _Place.AFTER:
                moves = self._after_call(is_last=is_last)
            else:
                piece, new_calls, moves = self._in_call()
                content += piece
                calls += new_calls
        return ToolDelta(content=content, calls=tuple(calls))

    def _at_start(self, *, is_last: bool) -> bool:
        """Llama 3: a call begins with `{` or the python tag, and nothing may stand before it."""
        text = self._held.lstrip()
        if text.startswith(("{", PYTHON_TAG)):
            n_before = len(self._held) - len(text) + (0 if text.startswith("{") else len(PYTHON_TAG))
            self._begin_call(n_before)
            return True
        if not is_last and PYTHON_TAG.startswith(text):
            return False
        self._place = _Place.CONTENT
        return True

    def _at_content(self, *, is_last: bool) -> tuple[str, bool]:
        if self._format is ToolFormat.LLAMA3:
            piece, self._held = self._held, ""
            return piece, False
        at = self._held.find(HERMES_BEGIN)
        if at >= 0:
            piece = self._held[:at].rstrip()
            n_before = at - len(piece) + len(HERMES_BEGIN)
            self._held = self._held[len(piece) :]
            self._begin_call(n_before)
            return piece, True
        keep = 0 if is_last else partial_end(self._held, HERMES_BEGIN)
        # blanks before a call are dropped with its tag, so they wait
        piece = self._held if is_last else self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(piece) :]
        return piece, False

    def _begin_call(self, n_before: int) -> None:
        """The first `n_before` characters held are the call's tag."""
        self._raw, self._held = self._held[:n_before], self._held[n_before:]
        self._n_before = n_before
        self._json = JsonEnd()
        self._place = _Place.CALL

    def _in_call(self) -> tuple[str, list[ToolCallDelta], bool]:
        end = self._json.feed(self._held)
        if end is None and not self._json.is_broken:
            self._raw, self._held = self._raw + self._held, ""
            return "", [], False
        if end is not None:
            self._raw, self._held = self._raw + self._held[:end], self._held[end:]
            call = self._valid_call(self._raw[self._raw.index("{") :])
            if call is not None:
                self._raw = ""
                self._place = _Place.AFTER
                return "", self._call_deltas(*call), True
        # no call after all: its tag is content, and the search goes on behind that
        piece, self._held, self._raw = self._raw[: self._n_before], self._raw[self._n_before :] + self._held, ""
        self._place = _Place.CONTENT
        return piece, [], True

    def _after_call(self, *, is_last: bool) -> bool:
        """Skip the end tag or separator and blanks; anything else is content or the next call."""
        text = self._held.lstrip()
        if self._format is ToolFormat.HERMES:
            if text.startswith(HERMES_END):
                self._held = text[len(HERMES_END) :]
                return True
            if text.startswith(HERMES_BEGIN):
                self._held = text
                self._place = _Place.CONTENT
                return True
            if not is_last and (HERMES_END.startswith(text) or HERMES_BEGIN.startswith(text)):
                return False
            self._place = _Place.CONTENT if text else self._place
            return bool(text)
        rest = text.lstrip(";,").lstrip()
        if rest.startswith(("{", PYTHON_TAG)):
            self._held = rest
            self._place = _Place.START
            return True
        if not is_last and PYTHON_TAG.startswith(rest):
            return False
        self._place = _Place.CONTENT if text else self._place
        return bool(text)

    def _valid_call(self, source: str) -> tuple[str, str] | None:
        """(name, arguments as JSON text), or None when `source` is not a call."""
        try:
            value = json.loads(source)
        except (ValueError, RecursionError):
            return None
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        if self._format is ToolFormat.LLAMA3 and self._names is not None and name not in self._names:
            return None
        return name, json.dumps(arguments, ensure_ascii=False)

    def _call_deltas(self, name: str, arguments: str) -> list[ToolCallDelta]:
        index = self.n_calls
        self.n_calls += 1
        return [
            ToolCallDelta(index=index, id=self._new_id(), name=name),
            ToolCallDelta(index=index, arguments=arguments),
        ]


class JsonEnd:
    """Finds where one JSON object ends, reading it piece by piece; constant work per character.

    `is_broken`: this cannot become a JSON object any more.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._is_in_string = False
        self._is_escaped = False
        self.is_broken = False

    def feed(self, text: str) -> int | None:
        """One past the object's last character in `text`, or None when it is not there yet (or broken)."""
        for i, char in enumerate(text):
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_in_string = False
            elif self._closers and char == self._closers[-1]:
                self._closers.pop()
                if not self._closers:
                    return i + 1
            elif char in "{[" and (self._closers or char == "{"):
                self._closers.append("}" if char == "{" else "]")
            elif char == '"' and self._closers:
                self._is_in_string = True
            elif char not in (_JSON_PLAIN if self._closers else _JSON_BLANKS):
                self.is_broken = True
                return None
        return None


# ---- forcing calls


def tool_call_spec(
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat,
    *,
    name: str | None = None,
    is_parallel: bool = True,
    special_tags: Collection[str] = (),
) -> StructuredSpec:
    """The grammar for tool_choice "required" (name None) or a named function.

    tools: OpenAI tool objects. is_parallel: several calls may follow each other. special_tags: tags that the tokenizer
    has as added tokens; they are written as those tokens, not letter by letter. Raises RequestError for an unknown name.
    """
    functions = [_function(tool, i) for i, tool in enumerate(tools)]
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
    if not functions:
        known = ", ".join(str(_function(tool, i)["name"]) for i, tool in enumerate(tools)) or "none"
        raise RequestError(f"tool_choice names {name!r}; the tools are: {known}", param="tool_choice")
    key = "arguments" if tool_format is ToolFormat.HERMES else "parameters"
    calls = [_call_schema(function, key) for function in functions]
    schema: dict[str, Any] = {"anyOf": calls} if len(calls) > 1 else calls[0]
    schema["x-guidance"] = {"whitespace_pattern": r"[ \n\t]{0,8}"}
    several = "+" if is_parallel and name is None else ""
    if tool_format is ToolFormat.HERMES:
        begin, end = (tag if tag in special_tags else json.dumps(tag) for tag in (HERMES_BEGIN, HERMES_END))
        lines = [f"start: one{several}", f'one: {begin} "\\n" call "\\n" {end} /\\n?/']
    else:
        lines = [f"start: call{' (/; ?/ call)*' if several else ''}"]
    return StructuredSpec(kind="grammar", source="\n".join([*lines, f"call: %json {json.dumps(schema)}"]))


def _call_schema(function: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: function.get("parameters") or {"type": "object"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _function(tool: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"tools[{place}] has no function name", param="tools")
    return function
