"""Parameters of queries: those of lists, and what becomes of those that a route does not read.

As with the fields of bodies, what nobody here knows is named in the answer's header `x-diptych-ignored`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import Query, Request
from fastapi.routing import APIRoute
from pydantic import AliasChoices
from starlette.responses import Response

from diptych.server.http.errors import ApiError
from diptych.server.http.fields import ignored_header, ignored_of

NO_EFFECT: Mapping[str, str] = {"beta": "says by which of its names Anthropic's client was called"}


def several(name: str) -> Any:
    """A parameter of several values, under its own name or with the brackets that clients put behind it."""
    return Query(validation_alias=AliasChoices(name, f"{name}[]"), max_length=16)


class TellingRoute(APIRoute):
    """A route whose answers name what they ignored: unknown fields of the body, and parameters that it does not have."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, and then the header."""
        handle = super().get_route_handler()
        names = {one.alias for one in self.dependant.query_params}
        known = names | {f"{name}[]" for name in names} | NO_EFFECT.keys()

        async def handle_and_tell(request: Request) -> Response:
            response = await handle(request)
            unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
            response.headers.update(ignored_header((*ignored_of(request.scope), *unknown)))
            return response

        return handle_and_tell


def page(
    entries: Sequence[dict[str, Any]],
    *,
    after: tuple[str, str | None],
    before: tuple[str, str | None] = ("before", None),
    limit: int | None,
) -> dict[str, Any]:
    """A part of a list, as OpenAI's and Anthropic's clients read it, by the ids of its entries.

    after, before: the parameter's name and the id behind which, or before which, the page lies. limit: how many; None: all.
    Raises ApiError 400 for an id that none has.
    """
    start, end = 0, len(entries)
    for name, wanted in (after, before):
        if wanted is None:
            continue
        at = next((at for at, one in enumerate(entries) if one["id"] == wanted), None)
        if at is None:
            raise ApiError(400, f"{name} is {wanted[:100]!r}; no entry of this list has that id", param=name)
        start, end = (at + 1, end) if name == after[0] else (start, at)
    size = max(0, end - start) if limit is None else min(limit, max(0, end - start))
    is_backward = before[1] is not None and after[1] is None
    shown = list(entries[end - size : end] if is_backward else entries[start : start + size])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": size < end - start,
    }
