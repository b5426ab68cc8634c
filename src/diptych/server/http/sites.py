"""Whose pages may use this server from a browser: the hosts it answers to, and the origins that may send to it.

A page anywhere can point a name of its own at 127.0.0.1 (DNS rebinding), and can send simple POSTs across sites. So a name in
`Host` must be one of this machine's, and what changes anything must come from our own pages or from an allowed origin.
Programs send no `Origin` and are not touched by the second rule.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.server.config import ServerConfig
from diptych.server.http.errors import ApiError, error_response

ANY = "*"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def own_hosts(config: ServerConfig) -> frozenset[str]:
    """The names under which this machine knows itself, and those allowed besides, in lower case."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    names = {"localhost", config.host.lower(), name, short, f"{short}.local"}
    return frozenset(names | {host.lower() for host in config.allowed_hosts})


def site_middleware(config: ServerConfig) -> list[Middleware]:
    """What stands before the routes; CORS headers cost nothing where no origin is allowed."""
    made = [Middleware(KnownSites, hosts=own_hosts(config), origins=config.allow_origins)]
    if config.allow_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allow_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=[ANY],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
        made.append(cors)
    return made


class KnownSites:
    """Middleware: 403 for a name that is not ours, and for changes that another site's page asks for."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 or pass on."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = {name: value for name, value in scope["headers"] if name in (b"host", b"origin")}
        host = headers.get(b"host", b"").decode("latin-1").lower()
        # every browser names the host, so HTTP/1.0 without one is a program's; HTTP/1.1 demands it
        if b"host" not in headers and scope["http_version"] != "1.0":
            return ApiError(400, "the request names no host; HTTP/1.1 demands the header Host", code="no_host")
        if b"host" in headers and not self._is_ours(host):
            return ApiError(
                403,
                f"this server does not answer to the host {host[:100]!r}\nhint: start it with --allowed-host NAME",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if not origin or scope["method"] in SAFE_METHODS or origin in self._origins or ANY in self._origins:
            return None
        if host and origin.partition("://")[2] == host:
            return None
        return ApiError(
            403,
            f"pages of {origin[:100]!r} may not use this server\nhint: start it with --allow-origin {origin[:100]}",
            code="origin_not_allowed",
        )

    def _is_ours(self, host: str) -> bool:
        """An address is no name that somebody else could point here."""
        if ANY in self._hosts:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._hosts or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
