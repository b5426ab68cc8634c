"""The server as a process: bind, load, serve, drain on SIGTERM, and leave with a non-zero code when the engine dies.

    raise SystemExit(run_server(engine, config))

SIGTERM or Ctrl-C: `/ready` turns false at once, requests in flight finish within the drain time, then the process ends
with 0. A second signal, or the end of the drain time, ends open requests with an error at once; a third ends the process.
A step that crashes answers every open request with an error, then the code is 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn

from diptych.compute.ceilings import Ceilings
from diptych.engine.async_llm import AsyncLLM
from diptych.ground.errors import ConfigError
from diptych.server.app import create_app
from diptych.server.config import ServerConfig
from diptych.server.http.door import BoundedHeaders
from diptych.server.state import ServerState

logger = logging.getLogger("diptych.server")

POLL_S = 0.05
# answers already made must still reach their clients after the drain or a crash
LAST_BYTES_S = 2
BACKLOG = 2048


def keep_collections_short() -> None:
    """Let no full collection of the garbage collector walk what an earlier one left standing: each holds every stream.

    A model's objects cost 0.1 s, and so do the requests of the last minutes, which are kept. What has stood a collection is set
    apart with those; it still goes when nobody refers to it, and a request that is over is in no circle (a test holds it).
    """
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_set_survivors_apart)


def _set_survivors_apart(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: draining comes first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_Process`."""
        yield


class _Process:
    """Joins engine, server and signals. Owns the exit code."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, *, ceilings: Ceilings | None) -> None:
        self._engine = engine
        self._config = config
        self._state = ServerState(engine, config, ceilings=ceilings)
        self._exit_code = 0
        self._server: _Server | None = None
        self._drain: asyncio.Task[None] | None = None
        self._cut_off: asyncio.Task[None] | None = None

    async def serve(self, listener: socket.socket) -> int:
        """Run until told to stop; returns the exit code."""
        loop = asyncio.get_running_loop()
        self._server = _Server(
            uvicorn.Config(
                create_app(self._state),
                http=BoundedHeaders,
                ws="none",  # refused as any request is, whatever libraries happen to be installed
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=LAST_BYTES_S,
                lifespan="on",
            )
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        keep_collections_short()
        self._engine.start(on_failure=lambda error: loop.call_soon_threadsafe(self._on_failure))
        host, port = listener.getsockname()[:2]
        url = f"http://{_shown(host)}:{port}"
        print(f"diptych serves {self._state.model.name} at {url}")  # other programs read the address from its end
        print(f"pages: {url}/ shows what runs, {url}/chat is to chat in", flush=True)
        await self._server.serve(sockets=[listener])
        self._engine.stop(drain_s=0.0)
        return self._exit_code

    def _on_signal(self) -> None:
        open_requests = self._state.admission.n_in_hand
        if self._drain is None:
            self._engine.drain()
            self._drain = asyncio.ensure_future(self._finish_open())
        elif not self._state.desk.is_leaving:
            logger.warning("second signal: leaving now open=%d", open_requests)
            self._cut_off = asyncio.ensure_future(self._end_open())
        else:
            self._leave()

    async def _finish_open(self) -> None:
        clock_s, desk = self._state.now_s, self._state.desk
        deadline_s = clock_s() + self._config.drain_timeout_s
        logger.info("draining open=%d timeout_s=%g", self._state.admission.n_in_hand, self._config.drain_timeout_s)
        while self._state.admission.n_in_hand > 0 and clock_s() < deadline_s and not desk.is_leaving:
            await asyncio.sleep(POLL_S)
        if desk.is_leaving:
            return  # a second signal has taken over
        if self._state.admission.n_in_hand > 0:
            logger.warning("drain time is over; ending open=%d", self._state.admission.n_in_hand)
            await self._end_open()
        self._leave()

    async def _end_open(self) -> None:
        """End every open request with an error that its client gets to read, then leave."""
        clock_s, desk = self._state.now_s, self._state.desk
        desk.is_leaving = True
        deadline_s = clock_s() + LAST_BYTES_S
        while self._state.admission.n_in_hand > 0 and clock_s() < deadline_s:
            for request_id in list(self._state.telemetry.records):
                self._engine.abort(request_id)
            await asyncio.sleep(POLL_S)
        self._leave()

    def _on_failure(self) -> None:
        self._exit_code = 1
        logger.error("the engine has failed; ending the process")
        self._leave()

    def _leave(self) -> None:
        self._state.live.close()
        if self._server is not None:
            self._server.should_exit = True


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, bound before the model is loaded, so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, TypeError) as error:  # TypeError: what cannot be a name
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {reason}",
            hint="choose another --port (0 takes a free one) or --host",
        ) from error
    listener.set_inheritable(True)
    return listener


def run_server(
    engine: AsyncLLM, config: ServerConfig, listener: socket.socket, *, ceilings: Ceilings | None = None
) -> int:
    """Serve until SIGTERM, Ctrl-C or a failure; returns the process's exit code."""
    listener.listen(BACKLOG)
    process = _Process(engine, config, ceilings=ceilings)
    # uvloop where it is installed
    with asyncio.Runner(loop_factory=uvicorn.Config(app="", loop="auto").get_loop_factory()) as runner:
        return runner.run(process.serve(listener))


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
