"""Tool calls in the output text: found while it streams, and the grammar that forces them.

Four formats: Hermes / Qwen (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, anywhere), Llama 3
(the whole message is `{"name": ..., "parameters": {...}}`, several separated by `;`, after `<|python_tag|>` or not),
Mistral (`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`) and newer Mistral (`[TOOL_CALLS]name[ARGS]{...}`, some with
`[CALL_ID]id` before `[ARGS]`; each call has its own `[TOOL_CALLS]`). Both of Mistral's are read wherever one is expected.

A call is one as soon as its name and the opening brace of its arguments are there. From then on the arguments come out as
the model writes them, to the letter: cut off where the output is, and broken where the model broke them. What never gets
so far stays content, to the last character.

>>> parser = ToolCallParser(ToolFormat.HERMES, new_id=lambda: "call_1")
>>> [call.arguments for call in parser.push('Let me look. <tool_call>{"name": "time", "arguments": {"ci').calls]
['', '{"ci']
"""

from __future__ import annotations

import json
import re
import string
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import SystemRandom
from typing import Any

from diptych.compute.json_schema import holdable
from diptych.engine.text.reasoning import partial_end
from diptych.ground.errors import GrammarError, RequestError
from diptych.ground.request import StructuredSpec

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_BEGIN, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALL_TAGS = (HERMES_BEGIN, HERMES_END, MISTRAL_BEGIN, MISTRAL_ID, MISTRAL_ARGS)
_JSON_BLANKS = " \t\r\n"
_JSON_PLAIN = frozenset(_JSON_BLANKS + ":,+-.0123456789truefalsnE")
# a call up to the brace that opens its arguments, its keys in the order in which models write them
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_CALL_KEYS = ("name", "type", "id", "arguments", "parameters")
# newer Mistral: a call behind its tag, up to the brace that opens its arguments
_NAMED_HEAD = re.compile(r"\s{0,8}([\w.:/-]{1,128})\s{0,8}(?:\[CALL_ID\](\w{1,64}))?\[ARGS\]\s{0,8}(?=\{)")
# what text that may become such a head still lacks is an end of one of these
_NAMED_ENDS = ("x[ARGS]{", "[CALL_ID]x[ARGS]{")


class ToolFormat(Enum):
    """How a model writes a call."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    MISTRAL_NAMED = "mistral_named"

    @property
    def is_mistral(self) -> bool:
        """Whether calls begin with `[TOOL_CALLS]`."""
        return self in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_NAMED)


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
    if MISTRAL_BEGIN in source:
        return ToolFormat.MISTRAL_NAMED if MISTRAL_ARGS in source else ToolFormat.MISTRAL
    if PYTHON_TAG in source or ("tools" in source and '"parameters": ' in source):
        return ToolFormat.LLAMA3
    return None


def _id_maker(tool_format: ToolFormat) -> Callable[[], str]:
    """Mistral's templates refuse ids other than nine letters and digits; everybody else reads OpenAI's form."""
    if tool_format.is_mistral:
        return lambda: "".join(SystemRandom().choices(string.ascii_letters + string.digits, k=9))
    return lambda: f"call_{uuid.uuid4().hex[:24]}"


class _Place(Enum):
    START = "start"  # Llama 3 only: nothing but blanks so far, so the message may be a call
    CONTENT = "content"
    HEAD = "head"  # inside what may be a call, before its arguments
    ARGUMENTS = "arguments"
    BROKEN = "broken"  # arguments that cannot become JSON any more
    TAIL = "tail"  # behind the arguments, inside the call
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
        self._new_id = new_id or _id_maker(tool_format)
        self._begin = MISTRAL_BEGIN if tool_format.is_mistral else HERMES_BEGIN
        self._place = _Place.START if tool_format is ToolFormat.LLAMA3 else _Place.CONTENT
        self._held = ""
        self._tag = ""  # what stands before the JSON of a possible call, should it turn out to be none
        self._raw = ""  # that JSON, as far as it was read
        self._json = JsonEnd()
        self._is_list_open = False  # Mistral: inside the brackets around the calls
        self._is_named = False  # newer Mistral: the name stands before the arguments, not in one object with them
        self._ids: set[str] = set()
        self.n_calls = 0

    def push(self, text: str) -> ToolDelta:
        """Take new text."""
        self._held += text
        return self._advance(is_last=False)

    def finish(self) -> ToolDelta:
        """The output is over; what did not become a call comes back as content."""
        delta = self._advance(is_last=True)
        rest, self._tag, self._raw, self._held = self._tag + self._raw + self._held, "", "", ""
        if self._place in (_Place.TAIL, _Place.AFTER):
            rest = "" if not rest.strip() else rest
        return ToolDelta(content=delta.content + rest, calls=delta.calls)

    def _advance(self, *, is_last: bool) -> ToolDelta:
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        moves = True
        while moves and self._held:
            match self._place:
                case _Place.START:
                    moves = self._at_start(is_last=is_last)
                case _Place.CONTENT:
                    moves = self._at_content(content, is_last=is_last)
                case _Place.HEAD:
                    moves = self._in_head(content, calls)
                case _Place.ARGUMENTS:
                    moves = self._in_arguments(calls)
                case _Place.BROKEN:
                    moves = self._in_broken(calls, is_last=is_last)
                case _Place.TAIL:
                    moves = self._in_tail()
                case _Place.AFTER:
                    moves = self._after_call(is_last=is_last)
        return ToolDelta(content="".join(content), calls=_joined(calls))

    def _at_start(self, *, is_last: bool) -> bool:
        """Llama 3: a call begins with `{` or the python tag, and nothing may stand before it."""
        text = self._held.lstrip()
        if text.startswith(("{", PYTHON_TAG)):
            self._begin_call(len(self._held) - len(text) + (0 if text.startswith("{") else len(PYTHON_TAG)))
            return True
        if not is_last and PYTHON_TAG.startswith(text):
            return False
        self._place = _Place.CONTENT
        return True

    def _at_content(self, content: list[str], *, is_last: bool) -> bool:
        at = -1 if self._format is ToolFormat.LLAMA3 else self._held.find(self._begin)
        if at >= 0:
            piece = self._held[:at].rstrip()
            self._held = self._held[len(piece) :]
            content.append(piece)
            self._is_list_open = self._is_named = False
            self._begin_call(at - len(piece) + len(self._begin))
            return True
        keep = 0 if is_last or self._format is ToolFormat.LLAMA3 else partial_end(self._held, self._begin)
        # blanks before a call are dropped with its tag, so they wait
        is_plain = is_last or self._format is ToolFormat.LLAMA3
        piece = self._held if is_plain else self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(piece) :]
        content.append(piece)
        return False

    def _begin_call(self, n_before: int) -> None:
        """The first `n_before` characters held are the call's tag."""
        self._tag, self._held = self._held[:n_before], self._held[n_before:]
        self._raw = ""
        self._json = JsonEnd()
        self._place = _Place.HEAD

    def _in_head(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        if self._format.is_mistral and not self._raw and not self._is_list_open:
            text = self._held.lstrip(_JSON_BLANKS)
            if text and text[0] not in "[{":
                return self._in_named_head(content, calls)
            if not self._open_list():
                return False
        end = self._json.feed(self._held)
        n_read = len(self._held) if end is None else end
        self._raw, self._held = self._raw + self._held[:n_read], self._held[n_read:]
        head = _HEAD.match(self._raw)
        name = _string(head[1]) if head is not None else None
        if head is not None and name is not None and self._is_known(name):
            calls.append(self._new_call(name))
            self._held, self._tag, self._raw = self._raw[head.end() :] + self._held, "", ""
            self._json = JsonEnd()
            self._place = _Place.ARGUMENTS
            return True
        if end is None and not self._json.is_broken and not self._is_other_object():
            return False
        call = self._whole_call(self._raw) if end is not None else None
        if call is not None:
            calls += [self._new_call(call[0]), ToolCallDelta(index=self.n_calls - 1, arguments=call[1])]
            self._tag = self._raw = ""
            self._place = _Place.AFTER
            return True
        self._give_up(content)
        return True

    def _give_up(self, content: list[str]) -> None:
        """No call after all: its tag is content, and the search goes on behind that."""
        content.append(self._tag)
        self._held, self._tag, self._raw = self._raw + self._held, "", ""
        self._place = _Place.CONTENT

    def _in_named_head(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """Newer Mistral: `name[ARGS]`, or with the model's own id `name[CALL_ID]id[ARGS]`."""
        head = _NAMED_HEAD.match(self._held)
        if head is not None:
            calls.append(self._new_call(head[1], own_id=head[2]))
            self._held, self._tag = self._held[head.end() :], ""
            self._is_named = True
            self._place = _Place.ARGUMENTS
            return True
        if any(_NAMED_HEAD.match(self._held + end[at:]) for end in _NAMED_ENDS for at in range(len(end))):
            return False
        self._give_up(content)
        return True

    def _open_list(self) -> bool:
        """Mistral: the bracket before the first call belongs to its tag. False when it may still come."""
        text = self._held.lstrip(_JSON_BLANKS)
        if not text:
            return False
        self._is_list_open = True
        n_before = len(self._held) - len(text) + text.startswith("[")
        self._tag, self._held = self._tag + self._held[:n_before], self._held[n_before:]
        return bool(self._held)

    def _is_other_object(self) -> bool:
        """Llama 3: a plain JSON answer shows itself by its first key, and need not wait for its end."""
        first = _FIRST_KEY.match(self._raw) if self._format is ToolFormat.LLAMA3 else None
        return first is not None and first[1] not in _CALL_KEYS

    def _is_known(self, name: str) -> bool:
        return self._format is not ToolFormat.LLAMA3 or self._names is None or name in self._names

    def _in_arguments(self, calls: list[ToolCallDelta]) -> bool:
        end = self._json.feed(self._held)
        if self._json.is_broken:
            self._hand_out(self._json.n_read, calls)
            self._place = _Place.BROKEN
            return True
        n_read = len(self._held) if end is None else end
        self._hand_out(n_read, calls)
        if end is not None:
            self._json = JsonEnd(is_inside=True)
            self._place = _Place.AFTER if self._is_named else _Place.TAIL
        return True

    def _in_broken(self, calls: list[ToolCallDelta], *, is_last: bool) -> bool:
        """The client gets what the model wrote, up to the tag that ends the call where the format has one."""
        has_end = self._format is ToolFormat.HERMES or self._is_named
        end = self._begin if self._is_named else HERMES_END
        at = self._held.find(end) if has_end else -1
        if at >= 0:
            self._hand_out(at, calls)
            self._place = _Place.AFTER
            return True
        keep = partial_end(self._held, end) if has_end and not is_last else 0
        self._hand_out(len(self._held) - keep, calls)
        return False

    def _hand_out(self, n_chars: int, calls: list[ToolCallDelta]) -> None:
        if n_chars:
            calls.append(ToolCallDelta(index=self.n_calls - 1, arguments=self._held[:n_chars]))
            self._held = self._held[n_chars:]

    def _in_tail(self) -> bool:
        """Up to the brace that closes the call; a model that forgets it is understood all the same."""
        end = self._json.feed(self._held)
        if end is None and not self._json.is_broken:
            self._held = ""
            return False
        self._held = self._held[self._json.n_read if end is None else end :]
        self._place = _Place.AFTER
        return True

    def _after_call(self, *, is_last: bool) -> bool:
        """Skip the end tag or separator and blanks; anything else is content or the next call."""
        text = self._held.lstrip()
        if self._format is ToolFormat.HERMES:
            return self._skip_end(text, HERMES_END, is_last=is_last)
        if self._is_named:
            return self._skip_end(text, "", is_last=is_last)
        if self._format.is_mistral:
            if text.startswith(","):
                self._held = text
                self._begin_call(1)
                return True
            return self._skip_end(text, "]", is_last=is_last)
        rest = text.lstrip(";,").lstrip()
        if rest.startswith(("{", PYTHON_TAG)):
            self._held = rest
            self._place = _Place.START
            return True
        if not is_last and PYTHON_TAG.startswith(rest):
            return False
        self._place = _Place.CONTENT if text else self._place
        return bool(text)

    def _skip_end(self, text: str, end: str, *, is_last: bool) -> bool:
        """Behind a call stand blanks and `text`. end: empty for none."""
        if end and text.startswith(end):
            self._held = text[len(end) :]
            return True
        if text.startswith(self._begin):
            self._held = text
            self._place = _Place.CONTENT
            return True
        if not is_last and (end.startswith(text) or self._begin.startswith(text)):
            return False
        self._place = _Place.CONTENT if text else self._place
        return bool(text)

    def _whole_call(self, source: str) -> tuple[str, str] | None:
        """(name, arguments as JSON text) of a call in any other order of keys, or None when `source` is none."""
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
        if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not self._is_known(name):
            return None
        return name, json.dumps(arguments, ensure_ascii=False)

    def _new_call(self, name: str, *, own_id: str | None = None) -> ToolCallDelta:
        """own_id: what the model calls it; taken unless it did so before, so that the prefix cache knows the next turn."""
        self.n_calls += 1
        call_id = own_id if own_id is not None and own_id not in self._ids else self._new_id()
        self._ids.add(call_id)
        return ToolCallDelta(index=self.n_calls - 1, id=call_id, name=name)


def _joined(calls: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Neighbouring pieces of one call's arguments as one piece; the piece that names the call stands alone."""
    joined: list[ToolCallDelta] = []
    for call in calls:
        if joined and call.id is None and joined[-1].id is None and joined[-1].index == call.index:
            joined[-1] = ToolCallDelta(index=call.index, arguments=joined[-1].arguments + call.arguments)
        else:
            joined.append(call)
    return tuple(joined)


def _string(source: str) -> str | None:
    """A JSON string's value, None when it is no valid one."""
    try:
        return str(json.loads(source))
    except ValueError:
        return None


class JsonEnd:
    """Finds where one JSON object ends, reading it piece by piece; constant work per character.

    is_inside: the object's brace has been read already. `is_broken`: this cannot become a JSON object any more, from
    character `n_read` of the last text on.
    """

    def __init__(self, *, is_inside: bool = False) -> None:
        self._closers: list[str] = ["}"] if is_inside else []
        self._is_in_string = False
        self._is_escaped = False
        self.is_broken = False
        self.n_read = 0

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
                self.n_read = i
                return None
        return None


# ---- forcing calls

_BLANKS = r"[ \n\t]{0,8}"  # a model that likes blanks must not write them for ever


def tool_call_spec(
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat,
    *,
    name: str | None = None,
    is_parallel: bool = True,
    tag_ids: Mapping[str, int] | None = None,
) -> StructuredSpec:
    """The grammar for tool_choice "required" (name None) or a named function.

    tools: OpenAI tool objects. is_parallel: several calls may follow each other. tag_ids: those of CALL_TAGS that are
    tokens of their own; they are written as such, not letter by letter. Objects are closed (`compute.json_schema`).
    Raises RequestError for an unknown name, GrammarError for parameters that no grammar can hold.
    """
    functions = [_function(tool, i) for i, tool in enumerate(tools)]
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
    if not functions:
        known = ", ".join(str(_function(tool, i)["name"]) for i, tool in enumerate(tools)) or "none"
        raise RequestError(f"tool_choice names {name!r}; the tools are: {known}", param="tool_choice")
    tags = {tag: json.dumps(tag) for tag in CALL_TAGS} | {tag: f"<[{id_}]>" for tag, id_ in (tag_ids or {}).items()}
    begin = tags[MISTRAL_BEGIN]
    is_several = is_parallel and name is None
    match tool_format:
        case ToolFormat.HERMES:
            lines = [f"start: one{'+' if is_several else ''}"]
            lines.append(f'one: {tags[HERMES_BEGIN]} "\\n" call "\\n" {tags[HERMES_END]} /\\n?/')
        case ToolFormat.MISTRAL:
            lines = [f'start: {begin} "[" call{" (/, ?/ call)*" if is_several else ""} "]"']
        case ToolFormat.MISTRAL_NAMED:
            lines = [f"start: {f'({begin} call)+' if is_several else f'{begin} call'}"]
        case ToolFormat.LLAMA3:
            lines = [f"start: call{' (/; ?/ call)*' if is_several else ''}"]
    lines.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        # each schema is a root of its own, or its `$ref`s would point nowhere
        schema = {**_holdable_parameters(function), "x-guidance": {"whitespace_pattern": _BLANKS}}
        lines.append(f"call{i}: {_call_rule(function['name'], f'arguments{i}', tool_format, tags)}")
        lines.append(f"arguments{i}: %json {json.dumps(schema)}")
    return StructuredSpec(kind="grammar", source="\n".join([*lines, f"BLANKS: /{_BLANKS}/"]))


def _call_rule(name: str, arguments: str, tool_format: ToolFormat, tags: Mapping[str, str]) -> str:
    """The rule of a call of one function; `arguments` is the name of theirs."""
    if tool_format is ToolFormat.MISTRAL_NAMED:  # a model that knows no ids leaves them out
        return f"{json.dumps(name)} ({tags[MISTRAL_ID]} /[a-zA-Z0-9]{{9}}/)? {tags[MISTRAL_ARGS]} {arguments}"
    key = "parameters" if tool_format is ToolFormat.LLAMA3 else "arguments"
    parts = ["{", '"name"', ":", json.dumps(name), ",", f'"{key}"', ":"]
    return " BLANKS ".join([*(json.dumps(part) for part in parts), arguments, json.dumps("}")])


def _holdable_parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, also where the schema forgets to say so."""
    try:
        return holdable({"type": "object", **(function.get("parameters") or {})})
    except GrammarError as error:
        raise GrammarError(
            f"parameters of tool {function['name']!r}: {error.message}", hint=error.hint, param="tools"
        ) from error


def _function(tool: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"tools[{place}] has no function name", param="tools")
    return function
