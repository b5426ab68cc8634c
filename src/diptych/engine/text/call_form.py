r"""How one model writes tool calls: a description, made of literal texts with holes, that the parser and the grammar share.

An answer with calls is

    begin  head arguments close  separator  head arguments close  ...  end

`head` holds the name (`NAME`), and perhaps an id (`ID`) or the number of the call (`COUNT`). Blanks in a literal match any
blanks. Nothing here knows a model: `dialect` reads the description off a chat template.

>>> HERMES.head.replace(NAME, "time")
'<tool_call>\n{"name": "time", "arguments": '
>>> HERMES.trigger
'<tool_call>'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache

NAME, ID, COUNT, KIND, KEY = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
HOLES = NAME + ID + COUNT + KIND + KEY
MAX_NAME_CHARS = 128
_HOLE_CHARS = {NAME: r"[\w.:/-]", ID: r"[\w.:-]", COUNT: r"\d", KIND: r"\w", KEY: r"[\w.:/-]"}
_MAX_BLANKS = 32
PYTHON_TAG = "<|python_tag|>"
MISTRAL_TAG = "[TOOL_CALLS]"
_TAG = re.compile(r"<[^<>]*>|\[[A-Z_]+\]")


class Style(Enum):
    """Where the name and the arguments of a call stand."""

    OBJECT = "one JSON object holds both"
    NAMED = "a name, then the arguments as a JSON object"
    TAGGED = "a name, then every argument between tags"
    LITERAL = "a name, then arguments in the signs of a programming language"


class Fit(Enum):
    """Why a literal has no match."""

    NOT_YET = "the text may go on to match"
    NEVER = "no match"


@dataclass(frozen=True, slots=True)
class Match:
    """Where a match ends, and what stood in its holes."""

    end: int
    holes: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The description. What a style does not need stays empty.

    name_key, arguments_key: keys of OBJECT; name_key None where the name itself is the key.
    key_open, key_close, value_close: around key and value of an argument (TAGGED); `kinds`: what `KIND` in key_close is for
    each JSON type. quote, assign: around a string, behind a key (LITERAL). is_single: one call per
    answer. has_cdata: text with markup stands in `<![CDATA[...]]>` (TAGGED).
    """

    style: Style
    head: str
    begin: str = ""
    close: str = ""
    separator: str = ""
    end: str = ""
    name_key: str | None = "name"
    arguments_key: str = "arguments"
    key_open: str = ""
    key_close: str = ""
    value_close: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    quote: str = ""
    assign: str = ""
    is_single: bool = False
    has_cdata: bool = False

    @property
    def trigger(self) -> str:
        """The text that announces calls; empty where an answer is a call from its first sign or never."""
        before = (self.begin.strip() or self.head.lstrip()).split(NAME)[0]
        if self.style is Style.OBJECT and not self.begin.strip():
            before = before.partition("{")[0]
        tag = _TAG.match(before)
        return tag[0] if tag else re.split(f"[{HOLES}]", before)[0].strip()

    @property
    def object_tag(self) -> str:
        """OBJECT: what stands before the object of each call."""
        return self.head.partition("{")[0].strip() if self.style is Style.OBJECT else ""

    @property
    def end_tags(self) -> tuple[str, ...]:
        """What may follow the arguments of a call and is no content."""
        close = self.close.rpartition("}")[2] if self.style is Style.OBJECT else self.close
        close = close.strip()[1:] if self.style is Style.LITERAL else close
        parts = f"{close} {self.end}".replace("]<", "] <").split()
        return tuple(dict.fromkeys(part for part in parts if not set(part) & set(HOLES)))

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads to read: Mistral's models write one in place of another."""
        named = [self.head] if self.style is not Style.OBJECT else []
        if self.trigger == MISTRAL_TAG:
            named += [MISTRAL_NAMED.head, MISTRAL_WITH_ID.head]
        return tuple(dict.fromkeys(named))

    @property
    def example(self) -> str:
        """A call, for people to read."""
        value = f"{self.key_open}key{self.key_close}value{self.value_close}"
        if self.style is Style.LITERAL:
            value = f"key{self.assign}{self.quote}value{self.quote}"
        arguments = value if self.style in (Style.TAGGED, Style.LITERAL) else "{...}"
        text = f"{self.begin}{self.head}{arguments}{self.close}{self.end}".replace(KIND, "string").replace(KEY, "key")
        return text.replace(NAME, "name").replace(ID, "id").replace(COUNT, "0").strip()

    @property
    def literals(self) -> tuple[str, ...]:
        """All texts that the form is made of."""
        return (
            self.begin, self.head, self.close, self.separator, self.end, self.key_open, self.key_close, self.value_close,
            self.quote,
        )  # fmt: skip


def fit(literal: str, text: str, at: int = 0) -> Match | Fit:
    """Match `literal` at `text[at:]`."""
    holes: dict[str, str] = {}
    items = _items(literal)
    for number, item in enumerate(items):
        n_blanks = 0
        while at < len(text) and text[at].isspace():
            at, n_blanks = at + 1, n_blanks + 1
            if n_blanks > _MAX_BLANKS:
                return Fit.NEVER
        if item[0] not in HOLES:
            if text.startswith(item, at):
                at += len(item)
                continue
            return Fit.NOT_YET if item.startswith(text[at:]) else Fit.NEVER
        chars = _hole(item, items[number + 1][0] if number + 1 < len(items) else "").match(text, at)
        assert chars is not None
        if len(chars[0]) > MAX_NAME_CHARS:
            return Fit.NEVER
        if chars.end() == len(text):
            return Fit.NOT_YET
        if not chars[0]:
            return Fit.NEVER
        holes.setdefault(item, chars[0])
        at = chars.end()
    return Match(at, holes)


@cache
def _hole(hole: str, follows: str) -> re.Pattern[str]:
    """What a hole may hold: no sign that begins what follows it (`name:0`)."""
    signs = f"(?!{re.escape(follows)})" if follows in list(".:/-") else ""
    return re.compile(f"(?:{signs}{_HOLE_CHARS[hole]}){{0,{MAX_NAME_CHARS + 1}}}")


@cache
def _items(literal: str) -> tuple[str, ...]:
    return tuple(re.findall(f"[{HOLES}]|[^\\s{HOLES}]+", literal))


HERMES = CallForm(
    style=Style.OBJECT,
    head=f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
    close="}\n</tool_call>",
    separator="\n",
)
LLAMA3 = CallForm(
    style=Style.OBJECT,
    head=f'{{"name": "{NAME}", "parameters": ',
    close="}",
    separator="; ",
    arguments_key="parameters",
)
MISTRAL = CallForm(
    style=Style.OBJECT,
    begin="[TOOL_CALLS][",
    head=f'{{"name": "{NAME}", "arguments": ',
    close="}",
    separator=", ",
    end="]",
)
MISTRAL_NAMED = CallForm(style=Style.NAMED, head=f"{MISTRAL_TAG}{NAME}[ARGS]")
MISTRAL_WITH_ID = CallForm(style=Style.NAMED, head=f"{MISTRAL_TAG}{NAME}[CALL_ID]{ID}[ARGS]")
LFM2 = CallForm(
    style=Style.LITERAL,
    begin="<|tool_call_start|>[",
    head=f"{NAME}(",
    close=")",
    separator=", ",
    end="]<|tool_call_end|>",
    quote="'",
    assign="=",
)
