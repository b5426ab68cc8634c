"""The parts of a turn as output items, and the semantic events that tell of them while they are written.

items = OutputItems(...)
for event in items.push(delta.parts, logprobs): ...     # without its sequence number
for event in items.finish(is_whole=True): ...
items.items
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from diptych.engine.text.tools import ToolCallDelta
from diptych.server.http.answers import Fragments, json_bytes
from diptych.server.http.errors import ApiError
from diptych.server.responses.body import ENCRYPTED, LOGPROBS, encoded_reasoning
from diptych.server.responses.items import Item, new_id, reasoning_of
from diptych.server.turn_parts import Part, TextPart, ThinkingPart

Event = dict[str, Any]
# kind of item -> (type of its part, names of the events that go on with it and end it)
_PARTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": (
        "reasoning_text",
        "response.reasoning_text",
    ),  # of OpenAI's clients; Open Responses: response.reasoning
}


class OutputItems:
    """A part goes on with the open item, or ends it and begins the next.

    encodes_reasoning: reasoning items carry what brings them back with the next request. namespaces: (namespace, name) of the
    functions that the model calls otherwise.
    """

    def __init__(self, *, encodes_reasoning: bool, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self.items: list[Item] = []
        self._encodes_reasoning = encodes_reasoning
        self._namespaces = namespaces
        self._pieces: list[str] = []
        self._call: int | None = None  # of the open item, when it is a call
        self._logprobs = Fragments()
        self._held: list[dict[str, Any]] = []  # of tokens that have given no part yet

    def push(self, parts: Sequence[Part], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Take what a step gave; tells of it."""
        self._held += logprobs
        for part in parts:
            match part:
                case TextPart(text):
                    yield from self._go_on("message", {"role": "assistant", "content": []})
                    yield self._text(text)
                case ThinkingPart(text):
                    yield from self._go_on("reasoning", {"summary": [], "content": []})
                    self._held = []
                    yield self._text(text)
                case ToolCallDelta():
                    head = {"call_id": part.id or "", **self._function(part.name or ""), "arguments": ""}
                    yield from self._go_on("function_call", head, call=part.index)
                    self._held = []
                    if part.arguments:
                        self._pieces.append(part.arguments)
                        yield self._at("response.function_call_arguments.delta", delta=part.arguments)

    def finish(self, *, is_whole: bool) -> Iterator[Event]:
        """End the open item, `incomplete` where the answer was cut off."""
        if self.items:
            yield from self._end("completed" if is_whole else "incomplete")

    @property
    def done(self) -> list[Item]:
        """Items that are over."""
        return [item for item in self.items if item["status"] != "in_progress"]

    def _function(self, shown: str) -> dict[str, str]:
        namespace, name = self._namespaces.get(shown, (None, shown))
        return {"name": name} if namespace is None else {"name": name, "namespace": namespace}

    def _go_on(self, kind: str, head: dict[str, Any], *, call: int | None = None) -> Iterator[Event]:
        if self.items and self.items[-1]["type"] == kind and self._call == call:
            return
        if self.items:
            yield from self._end("completed")
        self._call = call
        self._pieces, self._logprobs = [], Fragments()
        item = {"type": kind, "id": new_id(kind), "status": "in_progress", **head}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        if kind in _PARTS:
            yield self._at("response.content_part.added", content_index=0, part=self._part(""))

    def _text(self, text: str) -> Event:
        self._pieces.append(text)
        name = _PARTS[self.items[-1]["type"]][1]
        if self.items[-1]["type"] != "message":
            return self._at(f"{name}.delta", content_index=0, delta=text)
        logprobs, self._held = self._held, []
        self._logprobs.add(logprobs)
        return self._at(f"{name}.delta", content_index=0, delta=text, logprobs=logprobs)

    def _end(self, status: str) -> Iterator[Event]:
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._at("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = self._part(text)
            item["content"] = [part]
            told = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            yield self._at(f"{_PARTS[item['type']][1]}.done", content_index=0, **told)
            yield self._at("response.content_part.done", content_index=0, part=part)
        if item["type"] == "reasoning" and self._encodes_reasoning:
            item["encrypted_content"] = encoded_reasoning(text)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _part(self, text: str) -> dict[str, Any]:
        kind = _PARTS[self.items[-1]["type"]][0]
        if kind == "reasoning_text":
            return {"type": kind, "text": text}
        return {
            "type": kind,
            "text": text,
            "annotations": [],
            "logprobs": self._logprobs if self._logprobs.parts else [],
        }

    def _at(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def include_in(items: Sequence[Item], include: Collection[str]) -> None:
    """Add to items, in place, what is asked for. Raises ApiError 400 for log-probabilities, which nobody knows afterwards."""
    for item in items:
        if ENCRYPTED in include and item["type"] == "reasoning" and "encrypted_content" not in item:
            item["encrypted_content"] = encoded_reasoning(reasoning_of(item))
        texts = [part for part in item["content"] if part["type"] == "output_text"] if item["type"] == "message" else ()
        if LOGPROBS in include and any(part["text"] and not part.get("logprobs") for part in texts):
            raise ApiError(
                400,
                f"include asks for {LOGPROBS}, which {item['id']!r} was written without\n"
                "hint: include it in the request that creates the response",
                param="include",
                code="invalid_value",
            )


def with_included(body: bytes, include: Collection[str]) -> bytes:
    """The JSON of a response with `include_in` of its output."""
    response = from_json(body)
    include_in(response["output"], include)
    return json_bytes(response)
