"""The pages and what they alone ask for: their files, the feed of frames, what can be set of a chat, an answer as HTML."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from diptych.engine.text.template import DEFAULT_TEMPLATE_WORDS
from diptych.server.http.errors import ApiError
from diptych.server.http.sse import EventStream
from diptych.server.markdown import MarkdownBody, html_of
from diptych.server.state import ServerState

PAGES = {"/": "index.html", "/chat": "chat.html"}
MAX_WAITING = 16  # texts of at most 256 KiB and 2 s each
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, state: ServerState) -> None:
    """Add the pages; none of this is in the OpenAPI document."""
    folder = resources.files("diptych.server") / "page"

    def file_route(name: str) -> Callable[[], Awaitable[Response]]:
        content = (folder / name).read_bytes()
        kind = f"{KINDS[PurePosixPath(name).suffix]}; charset=utf-8"

        async def send() -> Response:
            return Response(content, headers={**PAGE_HEADERS, "content-type": kind})

        return send

    parts = {f"/page/{file.name}": file.name for file in folder.iterdir() if file.name.endswith((".css", ".js"))}
    for path, name in (PAGES | parts).items():
        # HEAD: agents ask so whether there is a server
        app.add_api_route(path, file_route(name), methods=["GET", "HEAD"], include_in_schema=False)

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        """Frames for the page, as server-sent events."""
        return EventStream(state.live.watch())

    @app.get("/page/abilities", include_in_schema=False)
    async def abilities() -> dict[str, Any]:
        """What the page to chat in can offer of this model."""
        return abilities_json(state)

    # one: a thread that parses holds the interpreter half of the time, and with it every stream
    one_at_a_time = asyncio.Lock()
    n_waiting = 0

    @app.post("/page/markdown", include_in_schema=False)
    async def markdown(request: Request) -> dict[str, str]:
        """An answer's Markdown as HTML that runs nothing."""
        nonlocal n_waiting
        body = await state.bodies.read(request, MarkdownBody)
        if n_waiting >= MAX_WAITING:
            raise ApiError(503, f"{MAX_WAITING} texts wait to be set already", code="overloaded", retry_after_s=1.0)
        n_waiting += 1
        try:
            async with one_at_a_time:
                return {"html": await state.workers.run(lambda: html_of(body.text, now_s=state.now_s))}
        finally:
            n_waiting -= 1


def abilities_json(state: ServerState) -> dict[str, Any]:
    """writes: it can. note: why chatting may go wrong, or null. thinking: the efforts that can be asked for."""
    template, writes = state.reader.template, state.engine.loaded.model.spec.has_head
    note = None
    if not writes:
        note = "this model has no output projection: it embeds, scores or classifies texts, and writes none"
    elif state.generation.encoder is not None:
        note = "this model is made for embeddings or scores, by its files: what it writes may make no sense"
    elif template.is_default:
        note = DEFAULT_TEMPLATE_WORDS
    switch, levels = ("enable_thinking" in template.source), ("reasoning_effort" in template.source)
    return {
        "writes": writes,
        "note": note,
        "thinking": [
            *(["none"] if switch else []),
            *(["low", "medium", "high"] if levels else ["medium"] if switch else []),
        ],
        "context_tokens": state.model.max_context_tokens,
    }
