"""Chat templates: messages to prompt text and tokens, with the token range of every part of the prompt.

Owns the choice of the template (tokenizer_config.json, chat_template.jinja, chat_template.json) and the segments; the
sandbox itself is `sandbox.py`. Token ids equal those of `transformers`' apply_chat_template, but for control tokens that a
message spells: they stay text (`control.py`) unless `reads_control_tokens`.

>>> template.render([{"role": "user", "content": "Hi"}]).segments  # doctest: +SKIP
(Segment(name='new message', start=0, end=5), Segment(name='generation prompt', start=5, end=8))
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jinja2

from diptych.engine.text.control import ControlTokens
from diptych.engine.text.dialect import Dialect, find_dialect
from diptych.engine.text.sandbox import Marked, RenderedPiece, TemplateSandbox
from diptych.engine.text.taken import SYSTEM_ROLES, Taken, find_taken, fitted, is_plain
from diptych.engine.text.tokenizer import Tokenizer, read_json_object
from diptych.ground.bounds import entries, shown
from diptych.ground.errors import LoadError, TemplateError
from diptych.ground.request import Segment

logger = logging.getLogger("diptych.engine")

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_MARK = "qtextq"  # a text that nobody else writes
_TEXT_PARTS = ("text", "input_text")
# beginnings of types of parts that no engine here reads, as OpenAI's clients, Anthropic's and `transformers` have them
_NO_TEXT = ("image", "audio", "video", "file", "input_image", "input_audio", "input_video", "input_file", "document")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# For a model without a template: plain and readable, no special tokens but what each text begins with.
DEFAULT_TEMPLATE_WORDS = (
    "this model has no chat template, as base models have none: messages become lines such as 'User: hi', which it may go on "
    "with rather than answer"
)
DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ message.content }}

{% endfor -%}
{% if add_generation_prompt %}Assistant:{% endif %}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt. `segments` partition the tokens [0, len(token_ids)) in order; a name may come more than once."""

    text: str
    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...] = field(default=())


class ChatTemplate:
    """The chat template of a checkpoint. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, source: str | Mapping[str, str] = DEFAULT_TEMPLATE, *, is_default: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        if is_default and tokenizer.begin is not None:
            source = f"{{{{ {json.dumps(tokenizer.begin)} }}}}{source}"
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._sandbox = TemplateSandbox()
        self._compiled: dict[str, jinja2.Template] = {}
        self._control = ControlTokens(tokenizer, "\n".join(self._sources.values()))
        self.is_default = is_default

    @classmethod
    def from_dir(cls, path: str | Path | None, tokenizer: Tokenizer | None = None) -> ChatTemplate:
        """The template of the checkpoint folder `path`; a model without one gets DEFAULT_TEMPLATE.

        Raises LoadError when a file is damaged. `tokenizer` is loaded from `path` unless given.
        """
        if path is None:
            if tokenizer is None:
                raise LoadError("a chat template needs a tokenizer or a checkpoint folder")
            return cls(tokenizer, is_default=True)
        folder = Path(path)
        sources = _template_sources(folder)
        tokenizer = tokenizer or Tokenizer.from_dir(folder)
        return cls(tokenizer, sources) if sources else cls(tokenizer, is_default=True)

    @property
    def source(self) -> str:
        """The jinja text used when no tools are given."""
        return self._sources.get("default") or next(iter(self._sources.values()))

    @cached_property
    def dialect(self) -> Dialect:
        """How the model writes calls and thoughts, as this template shows; some ten renderings, once."""

        def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], asks: bool) -> str:
            worded = [self._worded(message) for message in messages]
            return self._tried(self._template(has_tools=True), worded, list(tools), asks=asks)

        return find_dialect(render, "\n".join(self._sources.values()))

    @cached_property
    def taken(self) -> Taken:
        """Which conversations it shows; some fifteen renderings, once, where one comes that not every template does."""

        def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
            worded = [self._worded(self._spoken(dict(one))) for one in messages]
            return self._tried(self._template(has_tools=bool(tools)), worded, list(tools) or None)

        found = find_taken(render, names_developer=self.names("developer"))
        if found.lacks:
            logger.info(
                "this chat template takes no %s; what it would refuse or lose is said otherwise", ", ".join(found.lacks)
            )
        return found

    @cached_property
    def wants_parts(self) -> bool:
        """Whether it prints a text only as a part of a list, as templates for pictures do; a text alone would be lost."""

        def prints(content: object) -> bool:
            try:
                return _MARK in self._tried(self._template(has_tools=False), [{"role": "user", "content": content}])
            except TemplateError:
                return False

        return not prints(_MARK) and prints([{"type": "text", "text": _MARK}])

    def _tried(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        asks: bool = True,
    ) -> str:
        """What a template makes of messages of ours, to learn from. Raises TemplateError where it refuses them."""
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": asks}
        pieces = self._sandbox.pieces(template, {**self._tokenizer.special_tokens_map, **given})
        return "".join(piece.text for piece in pieces)

    @property
    def sources(self) -> tuple[str, ...]:
        """The jinja text of every template there is, with its name before it."""
        return tuple(f"{name}\n{text}" for name, text in sorted(self._sources.items()))

    def names(self, variable: str) -> bool:
        """Whether any of the templates reads a variable of this name; what no template reads, no model sees."""
        return any(variable in source for source in self._sources.values())

    def plain_ids(self, text: str) -> list[int]:
        """Token ids of a text that is not a prompt: what spells a control token in it stays text, and no BOS is added."""
        guard = self._control.guard()
        shielded = guard.shield(text)
        if not guard.has_shielded:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._control.encode(guard.read(shielded))[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        limit_tokens: int | None = None,
        reads_control_tokens: bool = False,
    ) -> RenderedPrompt:
        """Render and tokenise. `kwargs` are further variables of the template (chat_template_kwargs).

        reads_control_tokens: a message that spells a control token writes it, as in `transformers`; only for messages that
        come from nobody but you.

        Raises TemplateError when the template refuses, fails, runs too long, or reaches for what it may not have;
        PromptTooLong when the text surely has more than `limit_tokens` tokens.
        """
        given = entries("messages", messages, TemplateError)
        if not given:
            raise TemplateError("messages has 0 entries; at least 1 is needed", param="messages")
        try:
            read = [self._joined(_plain_message(one, i)) for i, one in enumerate(given)]
            messages = [
                self._worded(self._spoken(one)) for one in (read if is_plain(read) else fitted(read, self.taken))
            ]
            tools, documents, kwargs = plain(tools), plain(documents), plain(kwargs)
        except RecursionError:
            raise TemplateError("messages, tools or chat_template_kwargs are nested too deeply") from None
        if continue_final_message:
            if add_generation_prompt:
                raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
            messages[-1:] = [_tagged(messages)]
        guard = self._control.guard()
        if not reads_control_tokens:
            messages = [guard.shield_message(message) for message in messages]
            tools, documents, kwargs = guard.shield(tools), guard.shield(documents), guard.shield(kwargs)
        variables = {
            **self._tokenizer.special_tokens_map,
            **(kwargs or {}),
            "messages": [Marked(message, ("message", i)) for i, message in enumerate(messages)],
            "tools": [Marked(tool, "tools") for tool in tools] if tools else None,
            "documents": [Marked(document, "documents") for document in documents] if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            pieces = self._sandbox.pieces(self._template(has_tools=bool(tools)), variables)
        except TemplateError as error:
            raise TemplateError(guard.clean(error.message), hint=error.hint, param=error.param) from error
        if continue_final_message:
            pieces = _cut_at_tag(pieces)
        text = "".join(piece.text for piece in pieces)
        if limit_tokens is not None:
            self._tokenizer.refuse_endless(text, limit_tokens, param="messages")
        ranges = _named_ranges(text, pieces, messages, self._tokenizer.bos_token)
        if not guard.has_shielded:
            token_ids, offsets = self._tokenizer.encode_with_offsets(text, add_special_tokens=False)
        else:
            spelling = guard.read(text)
            token_ids, offsets = self._control.encode(spelling)
            text, ranges = spelling.text, [(guard.place(begin), guard.place(end), name) for begin, end, name in ranges]
        return RenderedPrompt(text=text, token_ids=tuple(token_ids), segments=_segments(ranges, offsets))

    def _spoken(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with calls in the types that this template prints."""
        if not message.get("tool_calls"):
            return message
        if self.dialect.has_null_content and not message.get("content"):
            message["content"] = None
        for call in message["tool_calls"] if self.dialect.has_text_arguments else ():
            function = call.get("function", call)
            if isinstance(function.get("arguments"), dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return message

    @staticmethod
    def _joined(message: dict[str, Any]) -> dict[str, Any]:
        """A message with its text in one piece, parts of it joined as a server joins them."""
        content = message.get("content")
        if isinstance(content, list) and content and all(map(_is_text, content)):
            return {**message, "content": "".join(part["text"] for part in content)}
        return message

    def _worded(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message whose text is where this template looks for it."""
        content = message.get("content")
        if isinstance(content, str) and self.wants_parts:
            message = {**message, "content": [{"type": "text", "text": content}]}
        return dict(message)

    def _template(self, *, has_tools: bool) -> jinja2.Template:
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        source = self._sources.get(name, self.source)
        compiled = self._compiled.get(name)
        if compiled is None:
            compiled = self._compiled[name] = self._sandbox.compile_source(source)
        return compiled


def _template_sources(folder: Path) -> dict[str, str]:
    """Templates by name. chat_template.jinja is the newest place and wins, as in `transformers`."""
    sources: dict[str, str] = {}
    for value in (
        read_json_object(folder / "tokenizer_config.json").get("chat_template"),
        read_json_object(folder / "processor_config.json").get("chat_template"),
        read_json_object(folder / "chat_template.json").get("chat_template"),
    ):
        if isinstance(value, str):
            sources["default"] = value
        elif isinstance(value, list):
            for entry in value:
                name, text = (
                    (entry.get(key) for key in ("name", "template")) if isinstance(entry, dict) else (None, None)
                )
                if not isinstance(name, str) or not isinstance(text, str):
                    raise LoadError(f"chat_template of {folder} is a list without name and template")
                sources[name] = text
        elif isinstance(value, dict):
            sources |= {str(name): str(template) for name, template in value.items()}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            try:
                sources[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise LoadError(f"{path} cannot be read: {error}") from error
    return sources


def plain(value: Any) -> Any:
    """`value` rebuilt from plain JSON types, so that a template finds no object with methods worth calling.

    TemplateError for what has no such type, whose text would be lost.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Real):  # NumPy's and enumerations' too
        return int(value) if isinstance(value, Integral) else float(value)
    raise TemplateError(
        f"a template takes texts, numbers, lists and objects; {shown(value)} is a {type(value).__name__}"
    )


def _plain_message(message: object, place: int) -> dict[str, Any]:
    """A message as templates expect it. TemplateError for what is none: a template would pass over it.

    Missing values are left out, reasoning is found under the names in use, and the arguments of tool calls, which
    OpenAI's clients send as JSON text, are objects.
    """
    if not isinstance(message, Mapping):
        raise TemplateError(f"message {place} is {shown(message)}; it must be an object", param="messages")
    out: dict[str, Any] = {str(key): plain(value) for key, value in message.items() if value is not None}
    if not isinstance(out.get("role"), str):
        raise TemplateError(f"role of message {place} is {shown(out.get('role'))}; it must be a text", param="messages")
    content = out.get("content")
    if not isinstance(content, str | list | dict | None):
        raise TemplateError(f"content of message {place} is {shown(content)}; it must be a text", param="messages")
    kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if other := next((kind for kind in kinds if isinstance(kind, str) and kind.startswith(_NO_TEXT)), None):
        raise TemplateError(
            f"content of message {place} has a part of type {other!r}; texts alone are read", param="messages"
        )
    calls = out.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function", call), dict) for call in calls
    ):
        raise TemplateError(
            f"tool_calls of message {place} is {shown(calls)}; it must be a list of objects", param="messages"
        )
    reasoning = next((out[key] for key in _REASONING_FIELDS if key in out), None)
    if reasoning is not None:
        out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    for call in calls:
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except ValueError:
                continue  # shown as the text it is
            if isinstance(arguments, dict):
                function["arguments"] = arguments
    return out


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str)


def _tagged(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The final message with the tag at which the prompt will be cut."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, list) and content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_TAG}]
    elif isinstance(content, str):
        last["content"] = content + _CONTINUE_TAG
    else:
        raise TemplateError("continue_final_message needs a final message with text content")
    return last


def _cut_at_tag(pieces: Sequence[RenderedPiece]) -> list[RenderedPiece]:
    text = "".join(piece.text for piece in pieces)
    end = text.rfind(_CONTINUE_TAG.strip())
    if end < 0:
        raise TemplateError("continue_final_message: the chat template does not print the final message")
    if text[end : end + len(_CONTINUE_TAG)] != _CONTINUE_TAG:
        end = len(text[:end].rstrip())  # the template trims messages, so the continuation begins after the last word
    kept: list[RenderedPiece] = []
    for piece in pieces:
        kept.append(RenderedPiece(piece.text[:end], piece.source))
        end -= len(piece.text)
        if end <= 0:
            break
    return kept


# ---- segments


def segment_names(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """One name per message: "system", "turn 1 user", "turn 1 assistant", ..., "new message" for what follows them.

    A user message begins a turn. "new message" is everything after the last assistant message.
    """
    last_answer = max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    names: list[str] = []
    turn = 0
    for i, message in enumerate(messages):
        role = str(message.get("role", "message"))
        if role in SYSTEM_ROLES:
            names.append("system")
            continue
        turn += role == "user" or turn == 0
        names.append("new message" if i > last_answer else f"turn {turn} {role}")
    return names


@dataclass(slots=True)
class _Part:
    """Characters [begin, end) of the prompt, the piece they were printed in, and for whom (None: nobody in particular)."""

    begin: int
    end: int
    piece: int
    source: object


def _named_ranges(
    text: str, pieces: Sequence[RenderedPiece], messages: Sequence[Mapping[str, Any]], bos_token: str | None
) -> list[tuple[int, int, str]]:
    """(begin, end, name) in characters, in order, covering `text` without gaps."""
    parts: list[_Part] = []
    at = 0
    for number, piece in enumerate(pieces):
        if piece.text:
            parts.append(_Part(at, at + len(piece.text), number, piece.source))
            at += len(piece.text)
    parts = _with_lost_messages(text, parts, messages)
    _adopt(text, parts, bos_token)
    names = segment_names(messages)
    ranges: list[tuple[int, int, str]] = []
    for part in parts:
        name = names[part.source[1]] if isinstance(part.source, tuple) else str(part.source)
        if ranges and ranges[-1][2] == name:
            ranges[-1] = (ranges[-1][0], part.end, name)
        else:
            ranges.append((part.begin, part.end, name))
    return ranges


def _with_lost_messages(text: str, parts: list[_Part], messages: Sequence[Mapping[str, Any]]) -> list[_Part]:
    """Find messages that were printed outside their own loop turn (a system prompt put elsewhere) by their text."""
    found = {part.source for part in parts}
    at = 0
    for i, message in enumerate(messages):
        content = _plain_content(message)
        if ("message", i) in found or not content:
            continue
        begin = text.find(content, at)
        begin = text.find(content) if begin < 0 else begin
        if begin < 0:
            continue
        at = begin + len(content)
        parts = _carved(parts, begin, at, ("message", i))
    return parts


def _plain_content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = next((text for text in texts if isinstance(text, str)), None)
    return content.strip() if isinstance(content, str) else ""


def _carved(parts: Sequence[_Part], begin: int, end: int, source: object) -> list[_Part]:
    """`parts` with the characters [begin, end) given to `source`."""
    out: list[_Part] = []
    for part in parts:
        low, high = max(part.begin, begin), min(part.end, end)
        if low >= high:
            out.append(part)
            continue
        if part.begin < low:
            out.append(_Part(part.begin, low, part.piece, part.source))
        out.append(_Part(low, high, part.piece, source))
        if high < part.end:
            out.append(_Part(high, part.end, part.piece, part.source))
    return out


def _adopt(text: str, parts: Sequence[_Part], bos_token: str | None) -> None:
    """Give every part nobody printed for to somebody.

    The rest of a piece goes with the message found in it. Text before everything else that is more than BOS is the
    template's own system prompt. Other text goes to what comes after it, and at the end to what came before.
    """
    for before, part in pairwise(parts):
        is_rest = not isinstance(part.source, tuple) and isinstance(before.source, tuple)
        if is_rest and before.piece == part.piece:
            part.source = before.source
    first = next((i for i, part in enumerate(parts) if part.source is not None), len(parts))
    lead = text[: parts[first - 1].end] if first else ""
    if lead.removeprefix(bos_token or "").strip():
        for part in parts[:first]:
            part.source = "system"
    following: object = None
    for part in reversed(parts):
        part.source = following = part.source if part.source is not None else following
    previous: object = "prompt"
    for part in parts:
        part.source = previous = part.source if part.source is not None else previous


def _segments(ranges: Sequence[tuple[int, int, str]], offsets: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """Character ranges to token ranges: a token belongs to the range its first character is in."""
    starts = [begin for begin, _ in offsets]
    segments: list[Segment] = []
    at = 0
    for i, (_, end, name) in enumerate(ranges):
        is_last = i == len(ranges) - 1
        cut = len(starts) if is_last else max(at, bisect_left(starts, end))
        if cut > at:
            segments.append(Segment(name=name, start=at, end=cut))
        at = cut
    return tuple(segments)
