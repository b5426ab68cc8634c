"""Settings of the server. Values from the command line; environment variables are read in `ground.config` only."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from diptych.engine.spans import check_endpoint
from diptych.ground.config import at_least
from diptych.ground.errors import ConfigError
from diptych.ground.hosts import is_loopback

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")
_HOST = re.compile(r"[A-Za-z0-9._-]+")
METRICS_COMPAT = ("vllm", "none")
# four times the most places that an engine chooses: a burst beyond them waits within a few turns, and memory for so many open
# streams (some 20 KB each) is nothing
MOST_OPEN_REQUESTS = 1024
FILES_KEPT = 128  # for the model, libraries, the page, scrapes of metrics, and connections that ask for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server listens, whom it lets in, and when it refuses.

    served_model_names: what the model is asked for by, the first of them told in answers; none: its own name.
    takes_any_model_name: answer whatever model is asked for, as tools with a name built in need it.
    loads_loras: clients may load and unload adapters, from any folder that this process may read.
    max_queue_s: a request that would wait longer than this for its first step is refused with 503, bursts excepted (see
    `server.admission`); None: a bound taken from the load itself; math.inf: never refuse.
    drain_timeout_s: how long requests in flight may go on after SIGTERM.
    allowed_hosts: names in `Host` besides this machine's own, "*" for any; allow_origins: sites whose pages may use the
    server (CORS), such as https://app.example.com, "*" for any (see `server.http.sites`).
    max_body_bytes: of one request body; None: what the context can need, with room (see `server.http.door`).
    kept_minutes: of requests and steps, for what would have been (see `server.watch.recent`); 0: none.
    record: the file that a journal of requests and steps is written to, or where it is there the next by number; at most
    max_record_bytes of it (see `server.watch.journal`).
    reads_control_tokens: text of messages that spells a control token becomes it (see `engine.text.control`).
    otlp_traces_endpoint: the collector that gets spans of requests (see `engine.spans`); None: nobody.
    response_store: the file that responses are kept in; None: memory. max_stored_bytes, response_ttl_s: at most so much, and
    none that was unused for longer (OpenAI keeps 30 days).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    is_insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    takes_any_model_name: bool = False
    loads_loras: bool = False
    max_queue_s: float | None = None
    max_open_requests: int = MOST_OPEN_REQUESTS
    max_body_bytes: int | None = None
    drain_timeout_s: float = 30.0
    metrics_compat: str = "vllm"
    kept_timelines: int = 256
    kept_minutes: float = 2.0
    record: Path | None = None
    max_record_bytes: int = 2**30
    reads_control_tokens: bool = False
    response_store: Path | None = None
    max_stored_bytes: int = 256 * 2**20
    response_ttl_s: float = 30 * 86400.0
    otlp_traces_endpoint: str | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Refuse impossible values, and a bind that would let strangers in without a key."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535")
        if self.max_queue_s is not None and not self.max_queue_s > 0.0:  # so that NaN is refused too
            raise ConfigError(
                f"max_queue_s is {self.max_queue_s}; it must be greater than 0",
                hint="--max-queue-s 0 never refuses for a wait",
            )
        if not self.drain_timeout_s >= 0.0:
            raise ConfigError(f"drain_timeout_s is {self.drain_timeout_s}; it must be at least 0")
        at_least("max_open_requests", self.max_open_requests, 1)
        if self.max_body_bytes is not None:
            at_least("max_body_bytes", self.max_body_bytes, 1024)
        at_least("kept_timelines", self.kept_timelines, 0)
        if not 0.0 <= self.kept_minutes <= 60.0:
            raise ConfigError(f"keep_minutes is {self.kept_minutes}; it must be 0 to 60", hint="0 keeps nothing")
        at_least("max_record_bytes", self.max_record_bytes, 2**16)
        self._check_written()
        at_least("max_stored_bytes", self.max_stored_bytes, 0)
        if not self.response_ttl_s > 0.0:
            raise ConfigError(f"response_ttl_s is {self.response_ttl_s}; it must be greater than 0")
        if not all(name.strip() for name in self.served_model_names):
            raise ConfigError("served_model_name is empty; it must be a name")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError(
                "the API key is empty, or holds a line break or another character that no HTTP header can carry",
                hint="$(cat FILE) drops the line break at the end of a file",
            )
        for origin in self.allow_origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    f"allow_origin is {origin!r}; it must be a site such as https://app.example.com, or *",
                    hint="leave out the path and the slash at the end, as browsers do",
                )
        for host in self.allowed_hosts:
            if host != "*" and _HOST.fullmatch(host) is None:
                raise ConfigError(
                    f"allowed_host is {host!r}; it must be a name such as llm.example.com, or *",
                    hint="leave out the scheme and the port",
                )
        if self.metrics_compat not in METRICS_COMPAT:
            raise ConfigError(
                f"metrics_compat is {self.metrics_compat!r}; it must be one of {', '.join(METRICS_COMPAT)}"
            )
        if self.api_key is None and not self.is_insecure and not is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host!r} and no API key is set; others could use this server",
                hint="give --api-key KEY (or DIPTYCH_API_KEY), bind to 127.0.0.1, or say --insecure",
            )

    def _check_written(self) -> None:
        """What is written beside answers, and where to: said now, not when a large model has been loaded."""
        if self.record is not None and self.record.exists() and not self.record.is_file():
            raise ConfigError(f"cannot record to {self.record}: it is no file")
        for path, verb in ((self.record, "record to"), (self.response_store, "keep responses in")):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"cannot {verb} {path}: there is no folder {path.parent}")
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)


def open_requests_limit(asked: int | None) -> int:
    """How many requests may be open: what was asked for, else the default, as far as this process may open files.

    Raises ConfigError when more is asked for than the system gives it files for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (MOST_OPEN_REQUESTS if asked is None else asked) + FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = wanted if soft == resource.RLIM_INFINITY else soft
    if room >= wanted:
        return wanted - FILES_KEPT
    # beyond that, connections would be reset, scrapes and health checks with them
    if asked is not None:
        raise ConfigError(
            f"max_open_requests is {asked}; this process may open {room} files, enough for {max(1, room - FILES_KEPT)}",
            hint="raise the limit (ulimit -n) or ask for fewer",
        )
    return max(1, room - FILES_KEPT)
