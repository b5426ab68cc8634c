"""Control tokens that only a chat template may write: text of a message that spells one stays text.

`<|im_end|>` in a user's message would end his turn and let him forge the system's. So before a template runs, each such
spelling in messages, tools, documents and variables gets a run of random digits into its middle (`Guard.shield`): templates
may cut, trim, join and print it as they like. What the rendered prompt then spells without digits was written by the
template (`Guard.read`). Where a message did spell one, the prompt is encoded by a twin of the tokenizer to which the
template's tokens are known under random names only, and the message's spellings are text like any other.

What a model writes itself (its thinking, its calls) comes back in assistant messages, and templates look for the tags of it;
there such a tag (`SHOWN_TOKENS`) stays one.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from diptych.engine.text.tokenizer import SHOWN_TOKENS, Tokenizer, encode_with
from diptych.ground.errors import TemplateError

ALIKE_CHARS = 4
WINDOW_CHARS = 1 << 16  # searched in one call, which holds the interpreter: a millisecond or less


@dataclass(frozen=True, slots=True)
class Spelling:
    """Rendered text as a reader sees it, and where in it control tokens begin that the template wrote."""

    text: str
    written: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Twin:
    """A tokenizer that knows control tokens under other names, and by the ids it gives added tokens their own ones."""

    backend: tokenizers.Tokenizer
    ids: Mapping[int, int]


class Names:
    """Finds control tokens by name."""

    def __init__(self, names: Iterable[str]) -> None:
        words = set(names)
        self._longest = max(map(len, words), default=0)
        self._pattern = re.compile(_any_of(words)) if words else None

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Every spelling, from left to right."""
        at = 0
        while self._pattern is not None and at < len(text):
            found = self._pattern.search(text, at, at + WINDOW_CHARS + self._longest)
            if found is None or found.start() >= at + WINDOW_CHARS:
                at += WINDOW_CHARS  # what begins behind the window may be cut off by its end
                continue
            yield found
            at = found.end()


def _any_of(words: Iterable[str]) -> str:
    """A pattern for any of them, the longest first, as the tokenizer takes it.

    Hundreds differ in a number alone: where they begin alike that stands once, which is compiled in a third of the time.
    """
    alike: dict[str, list[str]] = {}
    for word in sorted(words, key=len, reverse=True):
        alike.setdefault(word[:ALIKE_CHARS], []).append(word)
    branches = []
    for group in sorted(alike.values(), key=lambda group: min(len(group[-1]), ALIKE_CHARS), reverse=True):
        first, last = min(group), max(group)
        n = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
        branches.append(f"{re.escape(first[:n])}(?:{'|'.join(re.escape(word[n:]) for word in group)})")
    return "|".join(branches)


class ControlTokens:
    """The control tokens of one tokenizer and template: flagged special, or a tag that the template writes.

    Safe to use from several threads.
    """

    def __init__(self, tokenizer: Tokenizer, template_source: str) -> None:
        self._tokenizer = tokenizer
        names = tokenizer.added_tokens
        self._ids = {
            name: token_id
            for name, token_id in names.items()
            if len(name) > 1
            and (
                token_id in tokenizer.special_token_ids
                or (token_id in tokenizer.mark_token_ids and name in template_source)
            )
        }
        self._names = Names(self._ids)
        self._prefix = f"<{secrets.token_hex(16)}:"
        self._control_ids = frozenset(self._ids.values())
        self._twins: list[Twin | None] = []
        self._lock = threading.Lock()

    def guard(self) -> Guard:
        """For one rendering."""
        return Guard(self._names)

    def encode(self, spelling: Spelling) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a prompt whose messages spell control tokens, and for each the range of characters it came from."""
        named: list[str] = []
        ends: list[int] = []  # of the names, in the text that has them
        at = 0
        for start in spelling.written:
            named += [spelling.text[at:start], self._prefix]
            ends.append(start + len(self._prefix) * (len(ends) + 1))
            at = start
        encoding, own_ids = self._encode_named("".join([*named, spelling.text[at:]]), spelling.text)

        def place(named_at: int) -> int:
            """From the text with names to the text without: every name that ends before costs its length."""
            n_before = bisect_right(ends, named_at)
            start = spelling.written[n_before] if n_before < len(ends) else len(spelling.text)
            return min(named_at - n_before * len(self._prefix), start)

        ids = [own_ids.get(token_id, token_id) for token_id in encoding.ids]
        return ids, [(place(start), place(end)) for start, end in encoding.offsets]

    def _encode_named(self, text: str, sent: str) -> tuple[tokenizers.Encoding, Mapping[int, int]]:
        """Its encoding, and real ids by those in it. Where the twin over the tokenizer's own model spells one, by another.

        sent: the text without names.
        """
        for number, make in enumerate((self._twin_over_model, self._twin_of_its_own)):
            with self._lock:
                if number == len(self._twins):
                    self._twins.append(make())
                twin = self._twins[number]
            if twin is None:
                continue
            encoding = encode_with(twin.backend, text, add_special_tokens=False, sent=sent)
            if all(one in twin.ids or one not in self._control_ids for one in encoding.ids):
                return encoding, twin.ids
        raise TemplateError(
            "a message spells a control token, and this tokenizer cannot read it as text",
            hint="leave it out, or let text become control tokens (--read-control-tokens)",
        )

    def _twin_over_model(self) -> Twin | None:
        """Knows control tokens by their new names alone, and shares the vocabulary: 20 ms for 128,000 entries."""
        return self._twin(self._tokenizer.over_model(self._renamed))

    def _twin_of_its_own(self) -> Twin | None:
        """The same, and no piece of its model is one either: a second for as many entries."""
        form = json.loads(self._tokenizer.json_text)
        for token in form["added_tokens"]:
            if token["content"] in self._ids:
                token["content"], token["normalized"] = self._renamed(token["content"]), False
        model = form["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {self._renamed(name): token_id for name, token_id in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):  # Unigram: pieces with their scores
            model["vocab"] = [[self._renamed(name), score] for name, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._renamed(model["unk_token"])
        form["post_processor"] = None  # it would only add tokens around a text, and its own names are the old ones
        try:
            return self._twin(tokenizers.Tokenizer.from_str(json.dumps(form)))
        except Exception:  # what the library raises for a vocabulary whose control tokens are merged from text
            return None

    def _twin(self, backend: tokenizers.Tokenizer) -> Twin | None:
        """None where an added token got the id of another piece (a vocabulary with ids that nothing has)."""
        model, ids = backend.model, {}
        for name, token_id in self._tokenizer.added_tokens.items():
            got = backend.token_to_id(self._renamed(name))
            assert got is not None, name
            if model.id_to_token(got) not in (None, self._renamed(name)):
                return None
            ids[got] = token_id
        return Twin(backend, ids)

    def _renamed(self, name: str) -> str:
        return self._prefix + name if name in self._ids else name


class Guard:
    """Shields the text of one rendering; its digits are drawn anew each time, as a template may print them in an error."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._digits = str(10**24 + secrets.randbelow(9 * 10**24))
        self.has_shielded = False  # some message spells a control token
        self._cuts: list[int] = []  # where digits begin in the text that was read

    def shield(self, value: Any, *, keeps: frozenset[str] = frozenset()) -> Any:
        """A plain value (JSON's types) with every spelling of a control token made harmless, but those in `keeps`."""
        if isinstance(value, str):
            return self._with_digits(value, self._places(value, keeps), 0)
        if isinstance(value, Mapping):
            return {self.shield(key, keeps=keeps): self.shield(item, keeps=keeps) for key, item in value.items()}
        if isinstance(value, list):
            return self._shield_list(value, keeps)
        return value

    def shield_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message; an assistant's own tags stay what they are."""
        keeps = SHOWN_TOKENS if message.get("role") == "assistant" else frozenset()
        shielded: dict[str, Any] = self.shield(message, keeps=keeps)
        return shielded

    def clean(self, text: str) -> str:
        """Text without the digits: what the client sent."""
        return text.replace(self._digits, "") if self.has_shielded else text

    def read(self, text: str) -> Spelling:
        """What a rendered prompt spells, and which control tokens the template wrote in it."""
        self._cuts = [found.start() for found in re.finditer(self._digits, text)]
        return Spelling(self.clean(text), tuple(self.place(found.start()) for found in self._names.find(text)))

    def place(self, at: int) -> int:
        """A place in the text that was read, in the text without digits."""
        return at - len(self._digits) * bisect_left(self._cuts, at)

    def _places(self, text: str, keeps: frozenset[str]) -> list[int]:
        """Where digits go: behind the first character of each spelling."""
        places = [found.start() + 1 for found in self._names.find(text) if found[0] not in keeps]
        self.has_shielded |= bool(places)
        return places

    def _with_digits(self, text: str, places: Sequence[int], begin: int) -> str:
        """`text`, which begins at `begin`, with digits at those places that lie in it."""
        parts, at = [], 0
        for place in places[bisect_right(places, begin) : bisect_right(places, begin + len(text))]:
            parts += [text[at : place - begin], self._digits]
            at = place - begin
        return "".join([*parts, text[at:]]) if parts else text

    def _shield_list(self, values: list[Any], keeps: frozenset[str]) -> list[Any]:
        """A list's entries; the texts of parts are read as one, as templates print one right after the other."""
        texts = [one.get("text") if isinstance(one, Mapping) else None for one in values]
        parts = [text for text in texts if isinstance(text, str)]
        if len(parts) < len(values):
            return [self.shield(value, keeps=keeps) for value in values]
        places, begin, shielded = self._places("".join(parts), keeps), 0, []
        for one, text in zip(values, parts, strict=True):
            rest = self.shield({key: item for key, item in one.items() if key != "text"}, keeps=keeps)
            shielded.append({**rest, "text": self._with_digits(text, places, begin)})
            begin += len(text)
        return shielded
