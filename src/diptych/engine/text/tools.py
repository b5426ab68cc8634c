"""Tool calls in the output text, found while it streams, in the form that the model's template teaches (`call_form`).

A call is one as soon as its name and the beginning of its arguments are there. From then on the arguments come out as the
model writes them: JSON to the letter (cut off where the output is, and broken where the model broke it), arguments between
tags as JSON made of them. What never gets so far stays content, to the last character.

>>> from diptych.engine.text.call_form import HERMES
>>> parser = ToolCallParser(HERMES, new_id=lambda: "call_1")
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
from random import SystemRandom
from typing import Any

from diptych.engine.text.argument_readers import LiteralArguments, TaggedArguments
from diptych.engine.text.argument_values import SURROGATE, as_json
from diptych.engine.text.call_form import (
    ID,
    MISTRAL_TAG,
    NAME,
    PYTHON_TAG,
    CallForm,
    Fit,
    Match,
    Style,
    fit,
)  # fmt: skip
from diptych.engine.text.feed import Feed, JsonEnd, OutputOver, Step
from diptych.engine.text.reasoning import partial_end

_JSON_BLANKS = " \t\r\n"
_STRING = r'"(?:[^"\\]|\\.)*"'
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_CALL_KEYS = ("name", "type", "id", "arguments", "parameters")


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


def _id_maker(form: CallForm) -> Callable[[], str]:
    """Mistral's templates refuse ids other than nine letters and digits; everybody else reads OpenAI's form."""
    if form.trigger == MISTRAL_TAG:
        return lambda: "".join(SystemRandom().choices(string.ascii_letters + string.digits, k=9))
    return lambda: f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser:
    """One output, piece by piece.

    tools: names and parameter schemas of what the request offers; the schemas tell text from numbers where the form writes
    both alike. Where calls have no tag, a JSON object is a call only if it names one of the tools (None: any name), because
    a plain JSON answer looks alike.
    """

    def __init__(
        self,
        form: CallForm,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        tool_names: Collection[str] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._form = form
        self._schemas = dict(tools or {})
        names = tool_names if tools is None else tools
        self._names = None if names is None else frozenset(names)
        self._new_id = new_id or _id_maker(form)
        self._trigger = form.trigger
        self._head = _object_head(form)
        self._feed = Feed()
        self._tag = ""  # what stands before a possible call, should it turn out to be none
        self._raw = ""  # its JSON, as far as it was read
        self._is_after_call = False
        self._is_list_open = False  # inside brackets around the calls
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._ids: set[str] = set()
        self.n_calls = 0
        self._reader = self._read()
        next(self._reader)

    def push(self, text: str) -> ToolDelta:
        """Take new text."""
        self._feed.held += text
        next(self._reader)
        return self._delta()

    def finish(self) -> ToolDelta:
        """The output is over; what did not become a call comes back as content."""
        self._feed.is_last = True
        next(self._reader, None)
        return self._delta()

    def _delta(self) -> ToolDelta:
        delta = ToolDelta(content="".join(self._content), calls=_joined(self._calls))
        self._content, self._calls = [], []
        return delta

    # ---- the whole

    def _read(self) -> Step:
        yield
        try:
            if not self._trigger:
                yield from self._bare()
            while True:
                yield from self._text_before_calls()
                yield from self._section()
        except OutputOver:
            rest = self._tag + self._raw + self._feed.held
            self._tag = self._raw = self._feed.held = ""
            if rest.strip() or not self._is_after_call:
                self._content.append(rest)

    def _bare(self) -> Step:
        """Calls without a tag (Llama 3): nothing may stand before them, and nothing that is no call makes one later."""
        while True:
            text = self._feed.held.lstrip()
            if text.startswith(("{", PYTHON_TAG)):
                break
            if self._feed.is_last or not PYTHON_TAG.startswith(text):
                break
            yield from self._feed.more()
        if text.startswith(("{", PYTHON_TAG)):
            n_before = len(self._feed.held) - len(text) + (0 if text.startswith("{") else len(PYTHON_TAG))
            self._tag, self._feed.held = self._feed.held[:n_before], self._feed.held[n_before:]
            yield from self._section()
        while True:
            self._take_content(len(self._feed.held))
            yield from self._feed.more()

    def _text_before_calls(self) -> Step:
        """Up to the trigger, which becomes the tag with the blanks before it."""
        while (at := self._feed.held.find(self._trigger)) < 0:
            keep = 0 if self._feed.is_last else partial_end(self._feed.held, self._trigger)
            # blanks before a call are dropped with its tag, so they wait
            self._take_content(
                len(self._feed.held)
                if self._feed.is_last
                else len(self._feed.held[: len(self._feed.held) - keep].rstrip())
            )
            yield from self._feed.more()
        n_text = len(self._feed.held[:at].rstrip())
        self._take_content(n_text)
        end = at - n_text + len(self._trigger)
        self._tag, self._feed.held = self._feed.held[:end], self._feed.held[end:]

    def _take_content(self, n_chars: int) -> None:
        if n_chars:
            self._content.append(self._feed.held[:n_chars])
            self._feed.held = self._feed.held[n_chars:]

    def _section(self) -> Step:
        """The calls behind a tag; returns where text goes on."""
        self._is_list_open = self._is_after_call = False
        is_first = True
        while True:
            is_object = yield from self._is_object_next(is_first=is_first)
            begun = yield from (self._object() if is_object else self._named(is_first=is_first))
            if not begun:
                # no call after all: its tag is content, and the search goes on behind that
                self._content.append(self._tag)
                self._feed.held, self._tag, self._raw = self._raw + self._feed.held, "", ""
                return
            self._is_after_call = True
            if not (yield from self._next_call(is_object=is_object)):
                self._is_after_call = False
                return
            is_first = False

    def _is_object_next(self, *, is_first: bool) -> Step:
        """Whether a JSON object comes; what else stands before it, and the bracket of a list, belong to the tag."""
        form = self._form
        prefix = ""
        if is_first and form.style is Style.OBJECT:
            prefix = (form.begin + form.object_tag).lstrip().removeprefix(self._trigger).strip().removesuffix("[")
        while True:
            text = self._feed.held.lstrip(_JSON_BLANKS)
            found = fit(prefix, text) if prefix else Fit.NEVER
            if isinstance(found, Match):
                self._move_to_tag(len(self._feed.held) - len(text) + found.end)
                prefix = ""
            elif not text or (found is Fit.NOT_YET and not self._feed.is_last):
                yield from self._feed.more()
            elif text[0] == "[" and not self._is_list_open:
                self._is_list_open = True
                self._move_to_tag(len(self._feed.held) - len(text) + 1)
            else:
                return text[0] == "{" or not form.heads

    def _move_to_tag(self, n_chars: int) -> None:
        self._tag, self._feed.held = self._tag + self._feed.held[:n_chars], self._feed.held[n_chars:]

    # ---- a call in one JSON object

    def _object(self) -> Step:
        """True once a call was read."""
        self._raw, scan = "", JsonEnd()
        while True:
            end = scan.feed(self._feed.held)
            n_read = len(self._feed.held) if end is None else end
            new, self._feed.held = self._feed.held[:n_read], self._feed.held[n_read:]
            self._raw += new
            # a head ends before a brace: looked for with every piece, a long text in another key's place took its square
            head = self._head.match(self._raw) if "{" in new else None
            name = _string(head[1]) if head is not None else None
            if head is not None and name and self._is_known(name):
                self._begin_call(name)
                self._feed.held, self._raw = self._raw[head.end() :] + self._feed.held, ""
                if (yield from self._json_arguments()):
                    yield from self._tail()
                return True
            if end is not None or scan.is_broken or self._is_other_object():
                break
            yield from self._feed.more()
        call = self._whole_call(self._raw) if end is not None else None
        if call is None:
            return False
        self._begin_call(call[0])
        self._out(call[1])
        self._raw = ""
        return True

    def _is_other_object(self) -> bool:
        """Without a tag, a plain JSON answer shows itself by its first key, and need not wait for its end."""
        first = None if self._trigger else _FIRST_KEY.match(self._raw)
        return first is not None and first[1] not in _CALL_KEYS

    def _is_known(self, name: str) -> bool:
        return bool(self._trigger) or self._names is None or name in self._names

    def _whole_call(self, source: str) -> tuple[str, str] | None:
        """(name, arguments as JSON text) of a call in any other order of keys, or None when `source` is none."""
        try:
            value = json.loads(source)
        except (ValueError, RecursionError):
            return None
        if self._form.name_key is None:
            name, arguments = next(iter(value.items()), (None, None))
        else:
            name = value.get(self._form.name_key, value.get("name"))
            arguments = value.get(self._form.arguments_key, value.get("arguments", value.get("parameters", {})))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(name, str) or not name or SURROGATE.search(name) or not self._is_known(name):
            return None
        try:
            return (name, as_json(arguments)) if isinstance(arguments, dict) else None
        except (ValueError, RecursionError):  # a number that no JSON has
            return None

    def _json_arguments(self) -> Step:
        """Hand out one JSON object; False when it was broken, and all is out up to the tag that ends the call."""
        scan = JsonEnd()
        while True:
            end = scan.feed(self._feed.held)
            if scan.is_broken:
                self._out_held(scan.n_read)
                yield from self._broken()
                return False
            self._out_held(len(self._feed.held) if end is None else end)
            if end is not None:
                return True
            yield from self._feed.more()

    def _broken(self) -> Step:
        """The client gets what the model wrote, up to the tag that ends the call where the form has one."""
        tags = [tag for tag in self._form.end_tags if tag[0] in "<`" or len(tag) > 1]
        tag = tags[0] if tags else self._trigger if self._form.heads[:1] == (self._form.head,) else ""
        while True:
            at = self._feed.held.find(tag) if tag else -1
            if at >= 0:
                self._out_held(at)
                return
            keep = partial_end(self._feed.held, tag) if tag and not self._feed.is_last else 0
            self._out_held(len(self._feed.held) - keep)
            yield from self._feed.more()

    def _tail(self) -> Step:
        """Up to the brace that closes the call; a model that forgets it is understood all the same."""
        scan = JsonEnd(is_inside=True)
        self._is_after_call = True
        while True:
            end = scan.feed(self._feed.held)
            if end is not None or scan.is_broken:
                self._feed.held = self._feed.held[scan.n_read if end is None else end :]
                return
            self._feed.held = ""
            yield from self._feed.more()

    # ---- a name, then arguments

    def _named(self, *, is_first: bool) -> Step:
        """True once a call was read."""
        heads = [self._rest_of(head, is_first=is_first) for head in self._form.heads]
        while True:
            fits = [fit(head, self._feed.held) for head in heads]
            found = next((one for one in fits if isinstance(one, Match)), None)
            if found is not None and self._form.style is not Style.TAGGED:
                rest = self._feed.held[found.end :].lstrip()
                if rest and (rest[0] == "{" or self._form.style is Style.LITERAL):
                    self._feed.held = rest
                elif rest:
                    return False
                elif self._form.style is Style.LITERAL:
                    self._feed.held = ""
                else:
                    found = None
                    fits.append(Fit.NOT_YET)
            elif found is not None:
                self._feed.held = self._feed.held[found.end :]
            if found is not None:
                self._begin_call(found.holes[NAME], own_id=found.holes.get(ID))
                yield from self._arguments(found.holes[NAME])
                return True
            if Fit.NOT_YET not in fits:
                return False
            yield from self._feed.more()

    def _rest_of(self, head: str, *, is_first: bool) -> str:
        """What of a head is still to come: the trigger has been read before the first call."""
        if not is_first:
            return head
        whole = (self._form.begin + head).lstrip()
        if head.startswith(MISTRAL_TAG) and self._trigger == MISTRAL_TAG:
            whole = head
        return whole.removeprefix(self._trigger).removeprefix("[" if self._is_list_open else "")

    def _arguments(self, name: str) -> Step:
        if self._form.style is Style.TAGGED:
            yield from TaggedArguments(self._feed, self._form, self._out, self._schemas.get(name, {})).read()
        elif self._form.style is Style.LITERAL:
            yield from LiteralArguments(self._feed, self._form, self._out).read()
        else:
            yield from self._json_arguments()

    def _begin_call(self, name: str, *, own_id: str | None = None) -> None:
        """own_id: what the model calls it; taken unless it did so before, so that the prefix cache knows the next turn."""
        self.n_calls += 1
        call_id = own_id if own_id is not None and own_id not in self._ids else self._new_id()
        self._ids.add(call_id)
        self._tag = ""
        self._calls.append(ToolCallDelta(index=self.n_calls - 1, id=call_id, name=name))

    def _out(self, text: str) -> None:
        if text:
            self._calls.append(ToolCallDelta(index=self.n_calls - 1, arguments=text))

    def _out_held(self, n_chars: int) -> None:
        self._out(self._feed.held[:n_chars])
        self._feed.held = self._feed.held[n_chars:]

    # ---- behind a call

    def _next_call(self, *, is_object: bool) -> Step:
        """Skip end tags and blanks. True when another call of this section comes; anything else is content."""
        ends = [one for one in self._form.end_tags if one != "]"] + ["]"] * self._is_list_open
        waits = [*ends, self._trigger or PYTHON_TAG]
        while True:
            text = self._feed.held.lstrip()
            end = next((one for one in ends if text.startswith(one)), None)
            if end is not None:
                self._feed.held = text[len(end) :]
                continue
            if self._trigger and text.startswith(self._trigger):
                self._feed.held = text
                return False
            goes_on = self._goes_on(text, is_object=is_object)
            if isinstance(goes_on, str):
                n_before = len(self._feed.held) - len(goes_on)
                self._tag, self._feed.held = self._feed.held[:n_before], goes_on
                return True
            if goes_on is Fit.NEVER and text and (self._feed.is_last or not any(one.startswith(text) for one in waits)):
                return False
            yield from self._feed.more()

    def _goes_on(self, text: str, *, is_object: bool) -> str | Fit:
        """The next call of the section, where `text` is separators and one."""
        form = self._form
        in_section = bool(form.begin.strip()) and is_object == (form.style is Style.OBJECT)
        if not in_section and not self._is_list_open and self._trigger:
            return Fit.NEVER
        if self._is_list_open and form.style is Style.OBJECT and text and text[0] != ",":
            return Fit.NEVER
        rest = text.lstrip(",; \t\r\n")
        if not is_object:
            found = fit(form.head, rest)
            return rest if isinstance(found, Match) else found
        for tag in (form.object_tag, "" if self._trigger else PYTHON_TAG):
            if rest and tag.startswith(rest):
                return Fit.NOT_YET
            rest = rest.removeprefix(tag).lstrip()
        if not rest:
            return Fit.NOT_YET
        return rest if rest[0] == "{" else Fit.NEVER


def _object_head(form: CallForm) -> re.Pattern[str]:
    """A call in one object up to the brace that opens its arguments, its keys in the order in which models write them."""
    if form.name_key is None:
        return re.compile(rf"\s*\{{\s*({_STRING})\s*:\s*(?=\{{)")
    names, arguments = {form.name_key, "name"}, {form.arguments_key, "arguments", "parameters"}
    before = rf'(?:"(?!(?:{"|".join(sorted(names))})")\w+"\s*:\s*{_STRING}\s*,\s*)*'
    return re.compile(
        rf'\s*\{{\s*{before}"(?:{"|".join(sorted(names))})"\s*:\s*({_STRING})\s*,\s*"(?:{"|".join(sorted(arguments))})"\s*:\s*(?=\{{)'
    )


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
        value = str(json.loads(source))
    except ValueError:
        return None
    return None if SURROGATE.search(value) else value
