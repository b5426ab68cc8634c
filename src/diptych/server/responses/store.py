"""Responses that can be asked for again, and gone on from: a SQLite database in memory, or in a file.

One thread owns the database, so that neither a slow disk nor a long conversation holds the event loop. It is bounded in bytes
and in time: what was used longest ago goes first. Going on from a response uses all before it too, so a conversation that is
alive is whole. Rows hold JSON as bytes, which no garbage collection walks.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from diptych.ground.clock import wall_time_s
from diptych.ground.errors import ConfigError
from diptych.server.http.answers import json_bytes
from diptych.server.http.errors import ApiError

VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous_id TEXT, body BLOB NOT NULL, bytes INTEGER NOT NULL, used_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS items (
    response_id TEXT NOT NULL REFERENCES responses(id) ON DELETE CASCADE, position INTEGER NOT NULL,
    is_output INTEGER NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (response_id, position));
CREATE INDEX IF NOT EXISTS items_by_id ON items(id);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses(used_s);
"""
# the database itself counts what it holds, as several servers may write to one file
_COUNT = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS held (bytes INTEGER NOT NULL);
DELETE FROM held;
INSERT INTO held SELECT COALESCE(SUM(bytes), 0) FROM responses;
CREATE TRIGGER IF NOT EXISTS put AFTER INSERT ON responses BEGIN UPDATE held SET bytes = bytes + NEW.bytes; END;
CREATE TRIGGER IF NOT EXISTS gone AFTER DELETE ON responses BEGIN UPDATE held SET bytes = bytes - OLD.bytes; END;
COMMIT;
"""
_TOUCH_S = 1e-4  # between a response and the one before it, which must not go first

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response with the items that it was given and gave; `body` is its JSON."""

    id: str
    previous_id: str | None
    body: bytes
    given: Sequence[dict[str, Any]]
    output: Sequence[dict[str, Any]]


class ResponseStore:
    """Keeps responses. Used on one event loop; `close` ends its thread."""

    def __init__(self, path: Path | None, *, max_bytes: int, ttl_s: float) -> None:
        """path: None keeps them in memory. Raises ConfigError for a file that cannot be used."""
        self.is_lasting = path is not None
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="diptych-store")
        self._database = _opened(path)

    def close(self) -> None:
        """Finish what was begun and close the database."""
        self._pool.submit(self._database.close)
        self._pool.shutdown(wait=True)

    async def put(self, response: StoredResponse, *, replaces: bool = False) -> bool:
        """Keep a response, and forget the ones used longest ago when there are too many. Raises sqlite3.Error.

        replaces: what was kept under its id goes. False for one that alone is more than may be kept.
        """
        return await self._run(self._put, response, replaces)

    async def get(self, response_id: str) -> bytes | None:
        """The JSON of a response; None when there is none of that id."""
        return await self._run(self._get, response_id)

    async def delete(self, response_id: str) -> bool:
        """Forget a response; False when there was none. Raises ApiError where that cannot be written down."""
        try:
            return await self._run(self._delete, response_id)
        except sqlite3.OperationalError as error:
            raise ApiError(500, f"{response_id} cannot be deleted: {error}", code="store_failed") from error

    async def model(self, response_id: str) -> str | None:
        """The name of the model or adapter that wrote a response; None when there is none of that id."""
        return await self._run(self._model, response_id)

    async def given(self, response_id: str) -> list[dict[str, Any]] | None:
        """The items that a response was given, in order; None when there is none of that id."""
        return await self._run(self._given, response_id)

    async def conversation(self, response_id: str, *, max_bytes: int) -> list[dict[str, Any]]:
        """The items of a response and of all before it, in order. Raises ApiError 400 when one is gone, or for too many."""
        return await self._run(self._conversation, response_id, max_bytes)

    async def items(self, item_ids: Sequence[str], *, max_bytes: int) -> dict[str, dict[str, Any]]:
        """Items by their ids, as far as they are known. ApiError 400 where these, as often as they are named, are more."""
        return await self._run(self._items, item_ids, max_bytes) if item_ids else {}

    async def _run(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def _put(self, response: StoredResponse, replaces: bool) -> bool:
        self._expire()
        items = [(False, item) for item in response.given] + [(True, item) for item in response.output]
        rows = [
            (response.id, at, is_output, item["id"], json_bytes(item)) for at, (is_output, item) in enumerate(items)
        ]
        size = len(response.body) + sum(len(row[4]) for row in rows)
        if replaces:
            self._delete(response.id)
        if size > self._max_bytes:
            return False
        with self._database:
            self._database.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
                (response.id, response.previous_id, response.body, size, wall_time_s()),
            )
            self._database.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", rows)
            while self._held_bytes() > self._max_bytes:  # nobody else writes until this is done
                self._database.execute(
                    "DELETE FROM responses WHERE id = (SELECT id FROM responses ORDER BY used_s LIMIT 1)"
                )
        return True

    def _held_bytes(self) -> int:
        [(held,)] = self._database.execute("SELECT bytes FROM held")
        return int(held)

    def _model(self, response_id: str) -> str | None:
        wanted = "SELECT json_extract(CAST(body AS TEXT), '$.model') FROM responses WHERE id = ?"
        rows = self._database.execute(wanted, (response_id,)).fetchall()
        return rows[0][0] if rows else None

    def _get(self, response_id: str) -> bytes | None:
        self._expire()
        rows = self._database.execute("SELECT body FROM responses WHERE id = ?", (response_id,)).fetchall()
        self._touch([response_id])
        return rows[0][0] if rows else None

    def _delete(self, response_id: str) -> bool:
        with self._database:
            return self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount > 0

    def _given(self, response_id: str) -> list[dict[str, Any]] | None:
        if self._get(response_id) is None:
            return None
        wanted = "SELECT body FROM items WHERE response_id = ? AND NOT is_output ORDER BY position"
        return [json.loads(row[0]) for row in self._database.execute(wanted, (response_id,))]

    def _conversation(self, response_id: str, max_bytes: int) -> list[dict[str, Any]]:
        self._expire()
        chain: list[str] = []
        size, at = 0, response_id
        while at:
            rows = self._database.execute("SELECT previous_id, bytes FROM responses WHERE id = ?", (at,)).fetchall()
            if not rows:
                raise missing(response_id) if at == response_id else missing(response_id, before=at)
            chain.append(at)
            at, size = rows[0][0], size + rows[0][1]
            if size > max_bytes:
                raise ApiError(
                    400,
                    f"previous_response_id: the conversation before has more than {max_bytes} bytes; at most that many are "
                    "read (hint: begin a new one)",
                    param="previous_response_id",
                    code="conversation_too_long",
                )
        self._touch(chain)
        found: list[dict[str, Any]] = []
        for one in reversed(chain):
            items = self._database.execute("SELECT body FROM items WHERE response_id = ? ORDER BY position", (one,))
            found += [json.loads(item[0]) for item in items]
        return found

    def _items(self, item_ids: Sequence[str], max_bytes: int) -> dict[str, dict[str, Any]]:
        self._expire()
        found, size = {}, 0
        for item_id, times in Counter(item_ids).items():
            wanted = "SELECT response_id, body FROM items WHERE id = ? LIMIT 1"
            for response_id, body in self._database.execute(wanted, (item_id,)):
                size += times * len(body)
                if size > max_bytes:
                    raise ApiError(
                        400,
                        f"input refers to items of more than {max_bytes} bytes; at most that many are read",
                        param="input",
                        code="conversation_too_long",
                    )
                found[item_id] = json.loads(body)
                self._touch([response_id])
        return found

    def _touch(self, chain: Sequence[str]) -> None:
        """A response was used, and with it those before it, which come behind it in `chain`."""
        now_s = wall_time_s()
        rows = [(now_s + at * _TOUCH_S, response_id) for at, response_id in enumerate(chain)]
        with _if_written(), self._database:
            self._database.executemany("UPDATE responses SET used_s = ? WHERE id = ?", rows)

    def _expire(self) -> None:
        oldest_s = wall_time_s() - self._ttl_s
        for (response_id,) in self._database.execute(
            "SELECT id FROM responses WHERE used_s < ?", (oldest_s,)
        ).fetchall():
            with _if_written():
                self._delete(response_id)


def _if_written() -> AbstractContextManager[None]:
    """What a reader writes down beside: where it cannot be (a full disk), what is there is read all the same."""
    return suppress(sqlite3.OperationalError)


def missing(response_id: str, *, before: str | None = None) -> ApiError:
    """What `previous_response_id` gets for a response that is not here, or not any more."""
    gone = (
        f"{response_id[:100]!r}" if before is None else f"{before[:100]!r}, which {response_id[:100]!r} goes on from,"
    )
    return ApiError(
        400,
        f"previous_response_id: no response {gone} is stored here (it was deleted, not stored, or too long unused)",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _opened(path: Path | None) -> sqlite3.Connection:
    hint = "--response-store takes the path of a file that this server makes, or has made before"
    try:
        if path is not None:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # conversations are nobody else's business
        database = sqlite3.connect(":memory:" if path is None else str(path), check_same_thread=False)
        [(version,)] = database.execute("PRAGMA user_version")
        [(tables,)] = database.execute("SELECT COUNT(*) FROM sqlite_master")
        if version != VERSION and (version or tables):
            raise ConfigError(f"{path} is a database of another kind or version", hint=hint)
        for setting in ("foreign_keys = ON", "journal_mode = WAL", "synchronous = NORMAL", f"user_version = {VERSION}"):
            database.execute(f"PRAGMA {setting}")
        with suppress(sqlite3.OperationalError):
            database.execute("PRAGMA busy_timeout = 5000")
        database.executescript(_TABLES + _COUNT)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"the response store {path} cannot be used: {error}", hint=hint) from error
    return database
