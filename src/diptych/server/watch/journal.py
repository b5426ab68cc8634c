"""`serve --record FILE`: a journal of what the engine did (`sim.journal`), written beside it.

One start of a server is one file, as its clock and the key of its blocks are its own: where `afternoon.jsonl` is there, of a
server that was killed and started again by the same command, the next one writes `afternoon-2.jsonl`.

The engine's thread only hands over references; a thread of the journal's own makes lines of them. It writes until the file
has as many bytes as it may have, and says so once; where it cannot keep up, what waits is bounded and the rest is counted.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from typing import TextIO

from diptych.engine.engine import Engine, OpenRequest
from diptych.ground.errors import ConfigError
from diptych.metrics import StepRecord
from diptych.server.config import ServerConfig
from diptych.sim.counterfactual import Past, past_of
from diptych.sim.journal import BlockNames, head_line, request_line, step_line

logger = logging.getLogger("diptych.server")

MAX_FILES = 10_000  # of one name
MAX_QUEUED = 10_000  # steps and requests that wait to be written
FLUSH_S = 1.0


def new_file(path: Path) -> tuple[Path, TextIO]:
    """This one, open, or the first by number that is not there: nothing is written over. ConfigError where none can be made."""
    for number in range(1, MAX_FILES + 1):
        own = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot record to {own}: {error.strerror}") from None
        if number > 1:
            logger.warning("%s is there, of another start; this one is recorded to path=%s", path, own)
        return own, os.fdopen(descriptor, "w", encoding="utf-8")
    raise ConfigError(
        f"{path} and {MAX_FILES - 1} files behind it are there; a recording is not written over another file",
        hint="name another, or move these away",
    )


class Journal:
    """Owns the file. Fed on the engine's thread; `close` waits for what was handed over."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        assert config.record is not None
        self._engine = engine
        self._max_bytes = config.max_record_bytes
        self._open: dict[str, float] = {}  # when each came to the scheduler
        self._queue: Queue[StepRecord | Past | None] = Queue(MAX_QUEUED)
        self._n_lost = 0
        self._n_bytes = 0
        self._is_full = self._is_broken = False
        core = engine.core
        self._names = BlockNames(secrets.token_bytes(32), core.block_config.block_tokens)
        self._path, self._file = new_file(config.record)
        self._write(head_line(core.config, core.block_config))
        self._thread = Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()
        engine.on_submit.append(self._on_submit)
        engine.book.on_step.append(self._put)
        engine.on_end.append(self._on_end)

    def close(self) -> None:
        """Write what waits, and end."""
        self._engine.on_end.remove(self._on_end)
        self._queue.put(None)
        self._thread.join()
        if self._n_lost:
            logger.warning("the recording lacks lines that came too fast path=%s lines=%d", self._path, self._n_lost)

    def _on_submit(self, opened: OpenRequest) -> None:
        if not self._is_full:
            self._open[opened.request.request_id] = self._engine.clock.now_s()

    def _on_end(self, opened: OpenRequest) -> None:
        came_s = self._open.pop(opened.request.request_id, None)
        if came_s is not None and opened.record is not None:
            outputs = [choice.token_ids for choice in opened.choices]
            self._put(past_of(opened.request, outputs, opened.record, came_s=came_s))

    def _put(self, thing: StepRecord | Past) -> None:
        if self._is_full:
            return
        try:
            self._queue.put_nowait(thing)
        except Full:
            self._n_lost += 1

    def _run(self) -> None:
        """On the journal's thread, which takes what comes to the end, also where nothing can be written any more."""
        goes_on = True
        while goes_on:
            try:
                goes_on = self._take()
            except OSError as error:
                self._is_full = self._is_broken = True
                self._open.clear()
                logger.error("recording ends, it cannot be written path=%s error=%s", self._path, error.strerror)
        with suppress(OSError):  # what could not be written before
            self._file.close()

    def _take(self) -> bool:
        """Write the next line, or what is buffered where none comes; False at the end."""
        try:
            thing = self._queue.get(timeout=FLUSH_S)
        except Empty:
            if not self._is_broken:
                self._file.flush()
            return True
        if thing is not None and not self._is_full:
            self._write(self._line(thing))
        return thing is not None

    def _line(self, thing: StepRecord | Past) -> str:
        if isinstance(thing, Past):
            return request_line(thing, self._names)
        return step_line(thing.begin_s, thing.end_s, thing.shape)

    def _write(self, line: str) -> None:
        self._n_bytes += len(line) + 1
        if self._n_bytes > self._max_bytes:
            self._is_full = True
            self._open.clear()
            logger.warning("recording ends: it is full path=%s max_bytes=%d", self._path, self._max_bytes)
            return
        self._file.write(line + "\n")
