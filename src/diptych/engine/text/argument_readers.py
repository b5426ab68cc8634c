"""Arguments that a model does not write as JSON, read while they stream and handed out as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from diptych.engine.text.argument_values import json_string, json_types_of, json_value, properties_of
from diptych.engine.text.call_form import KEY, KIND, CallForm, Fit, Match, fit
from diptych.engine.text.feed import Feed, Step
from diptych.engine.text.reasoning import partial_end

_MAX_KEY_CHARS = 256
_MAX_DEPTH = 64  # of lists and objects; what is nested deeper is no value that a tool takes, and is read as text
# behind a string between quotes without escapes: the next argument, or the end of the call; and what may become one
_GOES_ON = re.compile(r"\s*(?:,\s*[\w.-]+\s*=|\)\s*[,\]])")
_MAY_GO_ON = re.compile(r"\s*(?:,\s*[\w.-]*\s*|\)\s*)?$")


class TaggedArguments:
    """Arguments between tags. out: takes the JSON, piece by piece; schema: the parameters', which tell text from numbers."""

    def __init__(self, feed: Feed, form: CallForm, out: Callable[[str], None], schema: Mapping[str, Any]) -> None:
        self._feed = feed
        self._form = form
        self._out = out
        self._schema = schema

    def read(self) -> Step:
        """Every argument as JSON, in the order written; a call cut off ends where the output does."""
        form = self._form
        properties = properties_of(self._schema)
        separator = "{"
        while (yield from self._takes(form.key_open)) is not None:
            key, kind = yield from self._key()
            if key is None:
                break
            self._out(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            types = json_types_of(properties.get(key, self._schema.get("additionalProperties")), self._schema)
            if kind is not None:
                types = {one for one, its in form.kinds.items() if its == kind} or types
            yield from self._tagged_value(types)
        self._out("{}" if separator == "{" else "}")

    def _takes(self, literal: str) -> Step:
        """The match of a literal that comes now, read; None when something else does."""
        while True:
            found = fit(literal, self._feed.held)
            if isinstance(found, Match):
                self._feed.held = self._feed.held[found.end :]
                return found
            if found is Fit.NEVER or self._feed.is_last:
                return None
            yield from self._feed.more()

    def _key(self) -> Step:
        """(key, kind) up to what closes a key, whose last blanks belong to the value unless the form has them too."""
        mark = re.split(f"[{KIND}{KEY}]", self._form.key_close.strip())[0]
        while (at := self._feed.held.find(mark)) < 0:
            if len(self._feed.held) > _MAX_KEY_CHARS:
                return None, None
            yield from self._feed.more()
        key, self._feed.held = self._feed.held[:at].strip(), self._feed.held[at:]
        found = yield from self._takes(self._form.key_close)
        blanks = self._form.key_close[len(self._form.key_close.rstrip()) :]
        while not self._feed.is_last and blanks.startswith(self._feed.held) and self._feed.held != blanks:
            yield from self._feed.more()
        self._feed.held = self._feed.held.removeprefix(blanks) if blanks else self._feed.held
        return key, None if found is None else found.holes.get(KIND)

    def _tagged_value(self, types: Collection[str] | None) -> Step:
        """One value: text comes out while it is written, all else at its end."""
        is_text = types is not None and set(types) == {"string"} and not self._form.has_cdata
        blanks = self._form.value_close[: len(self._form.value_close) - len(self._form.value_close.lstrip())]
        mark = re.split(f"[{KEY}]", self._form.value_close.strip())[0]
        if is_text:
            self._out('"')
        read: list[str] = []
        while True:
            n_text, n_end = self._value_end(mark, blanks)
            text, self._feed.held = self._feed.held[:n_text], self._feed.held[n_text:]
            if is_text:
                self._out(json.dumps(text, ensure_ascii=False)[1:-1])
            read.append(text)
            if n_end is not None:
                self._feed.held = self._feed.held[n_end:]
                break
            if self._feed.is_last and not is_text and (cut := "".join(read)):
                is_open = types is None or "string" in types
                self._out(json.dumps(cut, ensure_ascii=False)[:-1] if is_open else cut)
            yield from self._feed.more()
        whole = "".join(read)
        if self._form.has_cdata and whole.startswith("<![CDATA[") and whole.endswith("]]>"):
            whole, types = whole[len("<![CDATA[") : -len("]]>")], {"string"}
        self._out('"' if is_text else json_value(whole, types))

    def _value_end(self, mark: str, blanks: str) -> tuple[int, int | None]:
        """(characters that surely belong to the value, those of the end behind them or None when it is not there).

        A tag that ends the value is one only where another argument or the end of the call follows: a value may spell it.
        """
        at = self._feed.held.find(mark)
        while at >= 0:
            closed = fit(self._form.value_close.lstrip(), self._feed.held, at)
            end = closed.end if isinstance(closed, Match) else at + len(mark)
            follows = [fit(one, self._feed.held, end) for one in (self._form.key_open, self._form.close.strip())]
            is_end = any(isinstance(one, Match) for one in follows)
            if not is_end and Fit.NOT_YET in [closed, *follows] and not self._feed.is_last:
                n_text = at - len(blanks) if self._feed.held[:at].endswith(blanks) else at
                return n_text, None
            if is_end or self._feed.is_last:
                n_text = at - len(blanks) if self._feed.held[:at].endswith(blanks) else at
                return n_text, end - n_text
            at = self._feed.held.find(mark, at + 1)
        n_text = len(self._feed.held) - partial_end(self._feed.held, mark)
        if blanks and not self._feed.is_last:
            n_text -= (
                len(blanks)
                if self._feed.held[:n_text].endswith(blanks)
                else partial_end(self._feed.held[:n_text], blanks)
            )
        return (len(self._feed.held), None) if self._feed.is_last else (n_text, None)


class LiteralArguments:
    """Arguments in the signs of a programming language. out: takes the JSON, piece by piece."""

    def __init__(self, feed: Feed, form: CallForm, out: Callable[[str], None]) -> None:
        self._feed = feed
        self._form = form
        self._out = out
        self._depth = 0

    def read(self) -> Step:
        """`key=value, ...` up to the sign that closes the call."""
        closer = self._form.close.strip()[0]
        self._out("{")
        yield from self._pairs(closer)

    def _pairs(self, closer: str) -> Step:
        """The rest of an object, with its closer."""
        separator = ""
        while (char := (yield from self._next_sign())) not in closer:
            if char in ",]})":  # also what closes nothing that is open
                self._feed.held = self._feed.held[1:]
                continue
            key = yield from self._word(self._form.assign + ":=")
            self._feed.held = self._feed.held[1:]
            self._out(f"{separator}{json.dumps(key.strip(chr(34) + chr(39)), ensure_ascii=False)}: ")
            separator = ", "
            yield from self._literal_value(is_nested=closer == "}" and self._form.close.strip()[0] != "}")
        self._feed.held = self._feed.held[1:]
        self._out("}")

    def _next_sign(self) -> Step:
        while not (text := self._feed.held.lstrip()):
            yield from self._feed.more()
        self._feed.held = text
        return text[0]

    def _word(self, ends: str) -> Step:
        """Text up to one of the signs `ends`."""
        pattern = re.compile(f"[{re.escape(ends)}]")
        at = 0
        while (found := pattern.search(self._feed.held, at)) is None:
            at = len(self._feed.held)
            yield from self._feed.more()
        word, self._feed.held = self._feed.held[: found.start()].strip(), self._feed.held[found.start() :]
        return word

    def _literal_value(self, *, is_nested: bool) -> Step:
        quote = self._form.quote
        while quote.startswith(self._feed.held) and self._feed.held != quote:
            yield from self._feed.more()
        char = yield from self._next_sign()
        if self._feed.held.startswith(quote) and not (is_nested and quote == "'"):
            self._feed.held = self._feed.held[len(quote) :]
            yield from self._quoted(quote)
        elif char in "\"'":
            self._feed.held = self._feed.held[1:]
            yield from self._escaped(char)
        elif char in "{[" and self._depth < _MAX_DEPTH:
            self._depth += 1
            self._feed.held = self._feed.held[1:]
            if char == "{":
                self._out("{")
                yield from self._pairs("}")
            else:
                yield from self._items()
            self._depth -= 1
        else:
            word = yield from self._word(",]})")
            self._out(json_value(word, None))

    def _items(self) -> Step:
        """The rest of a list; another sign that closes something ends it too, and is left to what that is."""
        self._out("[")
        separator = ""
        while (char := (yield from self._next_sign())) not in "]})":
            if char == ",":
                self._feed.held = self._feed.held[1:]
                continue
            self._out(separator)
            separator = ", "
            yield from self._literal_value(is_nested=True)
        if char == "]":
            self._feed.held = self._feed.held[1:]
        self._out("]")

    def _quoted(self, quote: str) -> Step:
        """Text between the form's own quotes, which knows no escapes: one ends it where the call can go on behind it."""
        self._out('"')
        start = 0
        while True:
            at = self._feed.held.find(quote, start)
            end = at + len(quote)
            if at < 0:
                keep = 0 if self._feed.is_last else partial_end(self._feed.held, quote)
                self._out_text(max(start, len(self._feed.held) - keep))
                start = 0
                yield from self._feed.more()
            elif (
                quote != "'"
                or _GOES_ON.match(self._feed.held, end)
                or (self._feed.is_last and _MAY_GO_ON.match(self._feed.held, end))
            ):
                self._out_text(at)
                self._feed.held = self._feed.held[len(quote) :]
                self._out('"')
                return
            elif _MAY_GO_ON.match(self._feed.held, end):
                yield from self._feed.more()
            else:
                start = end

    def _out_text(self, n_chars: int) -> None:
        self._out(json.dumps(self._feed.held[:n_chars], ensure_ascii=False)[1:-1])
        self._feed.held = self._feed.held[n_chars:]

    def _escaped(self, quote: str) -> Step:
        """Text between quotes with backslashes, as Python and JSON have it."""
        sign = re.compile(rf"[{quote}\\]")
        at = 0  # read so far: what is read again with every piece takes its square
        while True:
            found = sign.search(self._feed.held, at)
            at = len(self._feed.held) if found is None else found.start()
            if found is not None and found[0] == quote:
                break
            if at + 1 < len(self._feed.held):
                at += 2  # a backslash, and what it stands before
            else:
                yield from self._feed.more()
        text, self._feed.held = self._feed.held[: at + 1], self._feed.held[at + 1 :]
        self._out(json_string(quote + text))
