"""JSON answers that may be large: encoded in pieces on a thread, and sent in pieces.

The standard library's encoder and one large write hold the interpreter, and with it every stream, for as long as they take:
64 choices with 20 log-probabilities per token are 100 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SLICE_ENTRIES = 256  # of a list that are encoded in one call; with 20 alternatives each, about 2 ms
SEND_BYTES = 256 * 1024
# a response, its output, an item, its content, a part, its logprobs (a chat has four): only their leaves are encoded whole
_LEVELS = 6


class Fragments:
    """A JSON list whose entries are encoded as they come.

    Kept as objects, the alternatives of 25,000 tokens made each full garbage collection hold every stream for a second.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def add(self, entries: list[Any]) -> None:
        """Append entries."""
        if entries:
            self.parts.append(to_json(entries)[1:-1])


def json_bytes(value: Any, *, levels: int = _LEVELS) -> bytes:
    """Compact JSON of `value`. Objects in the upper levels are entered, lists are encoded slice by slice."""
    # joined once: a copy of 40 MB holds the interpreter for 5 ms
    return b"".join(_parts(value, levels))


def _parts(value: Any, levels: int) -> Iterator[bytes]:
    if isinstance(value, Fragments):
        yield from _listed(value.parts)
    elif levels and isinstance(value, dict):
        yield b"{"
        for number, (name, one) in enumerate(value.items()):
            yield (b"," if number else b"") + to_json(name) + b":"
            yield from _parts(one, levels - 1)
        yield b"}"
    elif isinstance(value, list) and levels and any(isinstance(one, dict) for one in value[:1]):
        yield b"["
        for number, one in enumerate(value):
            if number:
                yield b","
            yield from _parts(one, levels - 1)
        yield b"]"
    elif isinstance(value, list):
        slices = (value[start : start + SLICE_ENTRIES] for start in range(0, len(value), SLICE_ENTRIES))
        yield from _listed(to_json(part)[1:-1] for part in slices)
    else:
        yield to_json(value)


def _listed(parts: Iterable[bytes]) -> Iterator[bytes]:
    yield b"["
    for number, part in enumerate(parts):
        if number:
            yield b","
        yield part
    yield b"]"


class JsonAnswer(Response):
    """A JSON body that is written as fast as the client reads it, instead of being copied into a buffer at once."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head and pieces."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), SEND_BYTES):
            part = bytes(body[start : start + SEND_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": start + SEND_BYTES < len(body)})
