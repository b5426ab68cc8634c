"""How a model writes calls and thoughts, read off its chat template: rendered with marked calls, it shows where they land.

A conversation with marks in place of names, keys and values is rendered with calls and without. What both have in common is
not the call's; what lies between the marks is cut at the borders of tags into a `CallForm`. A form is believed only when the
parser made from it reads back what the template rendered.

>>> find_dialect(lambda messages, tools, answers: "no calls here", "").problem
'the template prints no calls'
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from diptych.engine.text.call_form import (
    COUNT,
    HERMES,
    ID,
    KEY,
    KIND,
    LFM2,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    NAME,
    CallForm,
    Style,
)  # fmt: skip
from diptych.engine.text.harmony import HARMONY, HARMONY_TAGS, HarmonySplitter, is_harmony
from diptych.engine.text.reasoning import Opening, ReasoningSplitter, tags_of_template
from diptych.engine.text.tools import ToolCallParser
from diptych.ground.errors import TemplateError

# messages, tools, and whether an answer of the model comes next, to a prompt
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]

_USER, _TEXT, _THOUGHT = "quserq", "qtextq", "qthoughtq"
_NAMES = ("qnameqone", "qnameqtwo", "qnameqthree")
_KEYS = ("qkeya", "qkeyb")
_IDS = ("qidqone01", "qidqtwo02", "qidqthr03")  # Mistral's templates take nine letters and digits only
_TYPED = {"string": "qs", "integer": 735, "number": 7.5, "boolean": True, "object": {"qz": 1}, "array": [9]}
# how the value of each type begins, also where its signs are Python's
_TYPED_SIGN = {
    "string": "qs", "integer": "735", "number": r"7\.5", "boolean": "[Tt]rue", "object": r"\{", "array": r"\[",
}  # fmt: skip
_TAG_AT_END = re.compile(r"(?:<[^<>]*>|\[[A-Z_]+\])$")
_THINKING_AT_END = re.compile(r"(?i)(?:<[^<>]*think[^<>]*>|<[^<>]*>think<[^<>]*>)$")
_THINKING_END = re.compile(r"(?i)<[^<>]*>think<[^<>]*>|<[^<>]*>|\[/?[A-Z_]+\]")
_TAG_SIGNS = "<[{(" + NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How the model of a template writes calls and thoughts.

    problem: why the form was not read off the template; then `form` is one that it mentions, or Hermes's.
    has_text_arguments, has_null_content: the template prints calls only when their arguments are JSON text, or only beside no
    content at all. tags: around thoughts, None for a model that has none.
    """

    form: CallForm = HERMES
    problem: str = ""
    has_text_arguments: bool = False
    has_null_content: bool = False
    tags: tuple[str, str] | None = None
    is_harmony: bool = False

    def splitter(self, opening: Opening) -> ReasoningSplitter | None:
        """A reader that takes thoughts apart; None for a model that has none."""
        if self.tags is None:
            return None
        return (HarmonySplitter if self.is_harmony else ReasoningSplitter)(self.tags, opening=opening)

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything that readers look for in an output."""
        return (*self.form.literals, *(self.tags or ()))


class _Unreadable(Exception):
    """These renderings show no form."""


# what templates that print no calls tell their models to write, or their makers say that they do
_MENTIONED = (
    ("<tool_call>", HERMES),
    ("<|tool_call|>", replace(MISTRAL, begin="<|tool_call|>[")),  # Granite 3
    ("<|tool_list_start|>", LFM2),
    ("List of tools: [", LFM2),
    ("<|python_tag|>", LLAMA3),
    ("[ARGS]", MISTRAL_NAMED),
    ("[TOOL_CALLS]", MISTRAL),
)


def find_dialect(render: Render, source: str) -> Dialect:
    """Try the ways in which templates expect calls, the usual one first; else take what `source` mentions."""
    if is_harmony(source):
        return Dialect(form=HARMONY, tags=HARMONY_TAGS, is_harmony=True)
    problems: list[str] = []
    known_tags = tags_of_template(source)
    for is_text, content, n_calls in product((False, True), ("", None), (3, 1)):
        probe = _Probe(render, is_text=is_text, content=content)
        try:
            tags = probe.thinking_tags() or known_tags
            form = probe.form(n_calls, tags)
        except (_Unreadable, TemplateError) as error:
            problems.append(str(error))
        except (ValueError, LookupError) as error:  # a template that prints marks where no model would write calls
            problems.append(f"what the template prints has no form: {type(error).__name__}")
        else:
            return Dialect(form=form, has_text_arguments=is_text, has_null_content=content is None, tags=tags)
    form = next((form for mention, form in _MENTIONED if mention in source), HERMES)
    return Dialect(
        form=form, problem=problems[0], tags=_Probe(render, is_text=False, content="").thinking_tags() or known_tags
    )


def _tool(name: str, keys: Mapping[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": "d"} for key, kind in keys.items()}
    parameters = {"type": "object", "properties": properties, "required": list(keys), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class _Probe:
    """One way to hand calls to the template."""

    render: Render
    is_text: bool
    content: str | None

    def _tail(self, message: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> str:
        """What is rendered behind the user's message: an answer, or (None) what makes the model answer."""
        answer = [] if message is None else [{"role": "assistant", **message}]
        text = self.render([{"role": "user", "content": _USER}, *answer], tools, message is None)
        return text[text.rindex(_USER) + len(_USER) :] if _USER in text else text

    def _called(self, calls: Sequence[tuple[str, str, Mapping[str, Any]]], tools: Sequence[Mapping[str, Any]]) -> str:
        made = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments) if self.is_text else dict(arguments)},
            }
            for call_id, name, arguments in calls
        ]
        return self._tail({"content": self.content, "tool_calls": made}, tools)

    def thinking_tags(self) -> tuple[str, str] | None:
        """The tags around thoughts."""
        tools = [_tool(_NAMES[0], {_KEYS[0]: "string"})]
        thought = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), _THOUGHT)
        try:
            plain = self._tail({"content": _TEXT}, tools)
            thinks = self._tail({"content": _TEXT, **thought}, tools)
        except TemplateError:
            return None
        begin, end = thinks.find(_THOUGHT), thinks.find(_TEXT)
        if begin < 0 or end < begin:
            return None
        header = _whole_tags(_common(plain[: max(plain.find(_TEXT), 0)], thinks[:begin]))
        opened = _TAG_AT_END.search(thinks[len(header) : begin].rstrip()) or _THINKING_AT_END.search(header.rstrip())
        if (
            opened
            and plain[: max(plain.find(_TEXT), 0)].rstrip().endswith(opened[0])
            and "think" not in opened[0].lower()
        ):
            return None  # it stands before every answer
        # an answer may have a tag of its own behind the one that ends a thought
        closed = _THINKING_END.match(thinks[begin + len(_THOUGHT) : end].lstrip())
        return (opened[0], closed[0]) if opened and closed else None

    def form(self, n_calls: int, tags: tuple[str, str] | None) -> CallForm:
        """The form; raises _Unreadable where there is none, or not one that reads back."""
        values = [{key: f"qvalue{i}{key}" for key in _KEYS} for i in range(n_calls)]
        tools = [_tool(name, dict.fromkeys(_KEYS, "string")) for name in _NAMES[:n_calls]]
        calls = list(zip(_IDS, _NAMES, values, strict=False))
        called = self._called(calls, tools)
        if any(called.find(name) < 0 for name in _NAMES[:n_calls]):
            raise _Unreadable("the template prints no calls")
        plain = self._tail({"content": _TEXT}, tools)
        body = _without_frame(called, plain, self._tail(None, tools))
        places = _places(body, values)
        begin_at = min(place.begin for place in places)
        body = _without_tags(body, tags, begin_at) if tags else body
        form = _form_of(body, _places(body, values))
        if n_calls == 1:
            form = replace(form, is_single=True, separator="; " if not form.trigger else "\n")
        if form.style is Style.TAGGED:
            form = self._with_kinds(form)
            markup = [(_IDS[0], _NAMES[0], {_KEYS[0]: "<q>&"})]
            form = replace(form, has_cdata="<![CDATA[<q>&]]>" in self._called(markup, tools))
        self._check(form, calls, body)
        return form

    def _with_kinds(self, form: CallForm) -> CallForm:
        """What the form writes beside a key for each type of value."""
        keys = {f"q{kind}q": kind for kind in _TYPED}
        arguments = {key: _TYPED[kind] for key, kind in keys.items()}
        text = self._called([(_IDS[0], _NAMES[0], arguments)], [_tool(_NAMES[0], keys)])
        between: dict[str, str] = {}
        at = 0
        for key, kind in keys.items():
            begin = text.find(key, at) + len(key)
            value = re.compile(_TYPED_SIGN[kind]).search(text, begin)
            if begin < len(key) or value is None:
                return form
            between[kind], at = text[begin : value.start()].rstrip(), value.end()
        same = _common(*between.values())
        begin = len(re.sub(r"\w*$", "", same))
        kinds = {kind: found[0] for kind, one in between.items() if (found := re.match(r"\w+", one[begin:]))}
        if len(kinds) < len(between) or kinds["string"] == kinds["integer"]:
            return form
        key_close = form.key_close[:begin] + KIND + form.key_close[begin + len(kinds["string"]) :]
        return replace(form, key_close=key_close, kinds=kinds)

    def _check(self, form: CallForm, calls: Sequence[tuple[str, str, Mapping[str, Any]]], body: str) -> None:
        """Raise _Unreadable unless the parser finds the marked calls in what was rendered."""
        parser = ToolCallParser(form, tool_names=_NAMES)
        deltas = [parser.push(body), parser.finish()]
        texts: dict[int, list[str]] = {}
        for delta in (call for one in deltas for call in one.calls):
            texts.setdefault(delta.index, []).append(delta.name or delta.arguments)
        read = [(text[0], "".join(text[1:])) for text in texts.values()]
        try:
            whole = [(name, json.loads(arguments)) for name, arguments in read]
        except ValueError:
            whole = []
        if whole != [(name, dict(arguments)) for _, name, arguments in calls]:
            raise _Unreadable("calls do not read back as they are written")
        if "".join(one.content for one in deltas).strip():
            raise _Unreadable("calls stand between text that is none")


# ---- cutting a rendering


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call's name and arguments stand in the text; body: of the object that holds both, where there is one."""

    name: tuple[int, int]
    arguments: tuple[int, int]
    body: tuple[int, int] | None
    is_json: bool

    @property
    def begin(self) -> int:
        return self.name[0] if self.body is None else self.body[0]


def _without_frame(called: str, plain: str, asking: str) -> str:
    """The calls without what the template prints around any answer, or to ask for one."""
    at = plain.find(_TEXT)
    before, after = (plain[:at], plain[at + len(_TEXT) :]) if at >= 0 else (plain, "")
    head = max((_whole_tags(_common(one, called)) for one in (before, asking)), key=len)
    tail = _tag_begin(_common_end(after, called[len(head) :]), after)
    return called[len(head) : len(called) - len(tail)]


def _common(*texts: str) -> str:
    """What all texts begin with."""
    low, high = min(texts), max(texts)
    return low[: next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))]


def _common_end(first: str, second: str) -> str:
    """What both texts end with."""
    return _common(first[::-1], second[::-1])[::-1]


def _whole_tags(text: str) -> str:
    """`text` up to the last tag that it holds whole."""
    at = text.rfind("<")
    return text[:at] if at > text.rfind(">") else text


def _tag_begin(text: str, whole: str | None = None) -> str:
    """`text` from where a tag or a blank begins in it; all of it where it is `whole`."""
    if whole is not None and text == whole:
        return text
    for i, char in enumerate(text):
        if char in _TAG_SIGNS or char.isspace() or (char == "]" and text[i : i + 3] == "]<]"):
            return text[i:]
    return ""


def _without_tags(body: str, tags: tuple[str, str], end: int) -> str:
    """The calls without an empty thought before them."""
    at = body.find(tags[1], 0, end)
    if at >= 0 and not body[:at].replace(tags[0], "").strip():
        return body[at + len(tags[1]) :].lstrip()
    return body


def _places(body: str, values: Sequence[Mapping[str, str]]) -> list[_Place]:
    places: list[_Place] = []
    at = 0
    for name, arguments in zip(_NAMES, values, strict=False):
        first = body.find(next(iter(arguments)), at)
        name_at = body.rfind(name, at, first)
        if first < 0 or name_at < 0:
            raise _Unreadable("the template does not print a call as its name and then its arguments")
        place = _place(body, (name_at, name_at + len(name)), arguments, at)
        places.append(place)
        at = place.arguments[1]
    return places


def _place(body: str, name: tuple[int, int], arguments: Mapping[str, str], start: int) -> _Place:
    span = next((span for span in _objects(body, name[1], name[1] + 300) if span[1] == arguments), None)
    if span is not None:
        whole = [
            place for place, value in _objects(body, start, name[0])
            if place[1] >= span[0][1] and (arguments in value.values())
        ]  # fmt: skip
        return _Place(name, span[0], whole[0] if whole else None, True)
    ends = [(body.find(key, name[1]), body.find(value, name[1]) + len(value)) for key, value in arguments.items()]
    if any(begin < 0 for begin, _ in ends):
        raise _Unreadable("the template does not print keys and values of arguments as they are")
    return _Place(name, (min(begin for begin, _ in ends), max(end for _, end in ends)), None, False)


def _objects(body: str, start: int, stop: int) -> list[tuple[tuple[int, int], dict[str, Any]]]:
    """JSON objects that begin in [start, stop), with where they stand."""
    found = []
    for match in re.compile(r"\{").finditer(body, start, min(stop, len(body))):
        try:
            value, end = json.JSONDecoder().raw_decode(body, match.start())
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(((match.start(), end), value))
    return found


def _marked(text: str, call: int, base: int | None) -> str:
    """`text` with holes for the name, the id and the number of a call."""
    for name, call_id in zip(_NAMES, _IDS, strict=True):
        text = text.replace(name, NAME).replace(call_id, ID)
    return text if base is None else re.sub(rf"(?<![\w<]){call + base}(?!\w)", COUNT, text)


def _form_of(body: str, places: Sequence[_Place]) -> CallForm:
    """The form of calls at `places`."""
    n = len(places)
    edges = [0, *(place.arguments[1] for place in places)]
    for base in (None, 0, 1):
        before = [_marked(body[edges[i] : place.arguments[0]], i, base) for i, place in enumerate(places)]
        if n < 3 or before[1] == before[2]:
            break
    else:
        raise _Unreadable("the template prints no two calls alike")
    place = places[0]
    after = _marked(body[edges[-1] :], n - 1, base)
    if not place.is_json:
        return _argument_form(body, places, before, after)
    style = Style.NAMED if place.body is None else Style.OBJECT
    parts = _edges(before, after)
    if place.body is None:
        return CallForm(style=style, **parts)
    whole = json.loads(body[slice(*place.body)])
    arguments_key = next(key for key, value in whole.items() if isinstance(value, dict) and _KEYS[0] in value)
    name_key = next((key for key, value in whole.items() if value == _NAMES[0]), None)
    return CallForm(style=style, name_key=name_key, arguments_key=arguments_key, **parts)


def _edges(before: Sequence[str], after: str) -> dict[str, Any]:
    """begin, head, close, separator and end, from what stands before each call's arguments and behind the last."""
    if len(before) == 1:
        return {"head": before[0], "close": after}
    gap = before[1]
    head = _common_end(before[0], gap)
    if head != gap and head != before[0]:
        head = _tag_begin(head)
    gap = gap[: len(gap) - len(head)]
    close = _close_of(_common(gap, after), gap)
    return {
        "begin": before[0][: len(before[0]) - len(head)],
        "head": head,
        "close": close,
        "separator": gap[len(close) :],
        "end": after[len(close) :],
    }


def _close_of(common: str, gap: str) -> str:
    """The part of a common beginning that ends where a tag ends."""
    return common if common == gap else _whole_tags(common)


def _argument_form(body: str, places: Sequence[_Place], before: Sequence[str], after: str) -> CallForm:
    """Arguments between tags, or in the signs of a language."""
    place, (first, second) = places[0], _KEYS
    texts = [f"qvalue0{key}" for key in _KEYS]
    spots = [body.find(mark, place.name[1]) for mark in (first, texts[0], second, texts[1])]
    if sorted(spots) != spots:
        raise _Unreadable("the template does not print arguments one after the other")
    opening = body[place.name[1] : spots[0]]
    key_close = body[spots[0] + len(first) : spots[1]]
    gap = body[spots[1] + len(texts[0]) : spots[2]].replace(first, KEY)
    key_open = _common_end(opening, gap)
    key_open = key_open if key_open in (opening, gap) and key_open[:1] not in ">" else _tag_begin(key_open)
    if not key_open.strip():
        return _literal_form(opening, key_close, gap, before, after)
    following = (before[1] if len(before) > 1 else after).replace(second, KEY)
    ending = gap[: len(gap) - len(key_open)]
    value_close = _close_of(_common(ending, following), ending)
    heads = [one[: len(one) - len(key_open)] for one in before]
    rest = [heads[0], *(one.replace(second, KEY).removeprefix(value_close) for one in heads[1:])]
    parts = _edges(rest, after.replace(second, KEY).removeprefix(value_close))
    return CallForm(style=Style.TAGGED, key_open=key_open, key_close=key_close, value_close=value_close, **parts)


def _literal_form(opening: str, key_close: str, gap: str, before: Sequence[str], after: str) -> CallForm:
    """`name(key='text', ...)` and its like."""
    assign, quote = key_close[:1], key_close[1:]
    if not quote or not gap.startswith(quote) or gap[len(quote) :].strip() != ",":
        raise _Unreadable("the template prints arguments between signs that are not known")
    rest = [before[0], *(one.removeprefix(quote) for one in before[1:])]
    parts = _edges(rest, after.removeprefix(quote))
    return CallForm(style=Style.LITERAL, assign=assign, quote=quote, **parts)
