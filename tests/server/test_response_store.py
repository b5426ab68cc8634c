"""The store behind Responses: bounded in bytes and time, whole as long as it is used, and no place to lose things."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych.ground.errors import ConfigError
from diptych.server.http.errors import ApiError
from diptych.server.responses import store as store_module
from diptych.server.responses.store import ResponseStore, StoredResponse

MAX_BYTES = 10_000


def item(name: str, size: int = 10) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "user", "content": "x" * size}


def response(name: str, previous: str | None = None, *, size: int = 10) -> StoredResponse:
    given, output = [item(f"{name}-in", size)], [item(f"{name}-out")]
    return StoredResponse(id=name, previous_id=previous, body=b"{}", given=given, output=output)


def with_store(
    run: Callable[[ResponseStore], Coroutine[Any, Any, None]], path: Path | None = None, *, ttl_s: float = 100.0
) -> None:
    store = ResponseStore(path, max_bytes=MAX_BYTES, ttl_s=ttl_s)
    try:
        asyncio.run(run(store))
    finally:
        store.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall clock that the store reads; set its entry."""
    now = [1000.0]
    monkeypatch.setattr(store_module, "wall_time_s", lambda: now[0])
    return now


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def ids(items: list[dict[str, Any]]) -> list[str]:
    return [one["id"] for one in items]


def test_a_chain_is_read_in_order() -> None:
    async def run(store: ResponseStore) -> None:
        for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "b")):
            await store.put(response(name, previous))
        assert ids(await store.conversation("c", max_bytes=MAX_BYTES)) == [
            "a-in",
            "a-out",
            "b-in",
            "b-out",
            "c-in",
            "c-out",
        ]
        assert ids(await store.conversation("d", max_bytes=MAX_BYTES))[-2:] == ["d-in", "d-out"]
        assert ids(await store.given("b") or []) == ["b-in"]
        assert (await store.items(["b-out", "nobody's"], max_bytes=MAX_BYTES)).keys() == {"b-out"}
        with pytest.raises(ApiError, match="at most that many"):
            await store.conversation("c", max_bytes=100)
        assert await store.delete("a")
        assert not await store.delete("a")
        with pytest.raises(ApiError, match="'a', which 'c' goes on from"):
            await store.conversation("c", max_bytes=MAX_BYTES)
        assert await store.items(["a-in"], max_bytes=MAX_BYTES) == {}, "items go with their response"

    with_store(run)


def test_what_was_used_longest_ago_goes_first_and_a_conversation_stays_whole(clock: list[float]) -> None:
    """Its beginning is the oldest of all, and would go first if going on from it did not count as use."""

    async def run(store: ResponseStore) -> None:
        await store.put(response("begin", size=2000))
        clock[0] += 1
        await store.put(response("other", size=2000))
        clock[0] += 1
        await store.put(response("next", "begin", size=2000))
        clock[0] += 1
        await store.conversation("next", max_bytes=MAX_BYTES)
        for number in range(2):
            clock[0] += 1
            await store.put(response(f"new {number}", size=2000))
        assert await store.get("other") is None
        assert len(await store.conversation("next", max_bytes=MAX_BYTES)) == 4
        clock[0] += 1
        assert not await store.put(response("huge", size=MAX_BYTES))
        assert await store.get("huge") is None
        assert await store.get("next") == b"{}", "what alone is too large takes no other's place"

    with_store(run)


def test_what_several_servers_keep_in_one_file_is_bounded_together(tmp_path: Path, clock: list[float]) -> None:
    """Each counted what it had put there itself, and kept as much once more; and what another forgets leaves room."""
    path = tmp_path / "store"
    one, other = (ResponseStore(path, max_bytes=MAX_BYTES, ttl_s=100.0) for _ in range(2))

    async def run() -> None:
        for number in range(20):
            clock[0] += 1.0
            store = one if number % 2 else other
            assert await store.put(response(f"r{number}", size=1500))
        kept = [number for number in range(20) if await one.get(f"r{number}")]
        assert kept == [number for number in range(20) if await other.get(f"r{number}")]
        with sqlite3.connect(path) as reader:
            [(held,)] = reader.execute("SELECT SUM(bytes) FROM responses")
        assert 0.8 * MAX_BYTES < held <= MAX_BYTES
        assert kept == list(range(20 - len(kept), 20)), "what was used longest ago goes first, whoever put it there"
        for number in kept:
            assert await other.delete(f"r{number}")
        for number in kept:
            assert await one.put(response(f"s{number}", size=1500))
        assert [bool(await one.get(f"s{number}")) for number in kept] == [True] * len(kept)

    try:
        asyncio.run(run())
    finally:
        one.close()
        other.close()


def test_a_file_of_before_its_database_counted_is_bounded(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "store"

    async def fill(store: ResponseStore) -> None:
        for number in range(5):
            clock[0] += 1.0
            await store.put(response(f"r{number}", size=1500))

    with_store(fill, path)
    with sqlite3.connect(path) as before:
        before.executescript("DROP TRIGGER put; DROP TRIGGER gone; DROP TABLE held;")

    async def go_on(store: ResponseStore) -> None:
        clock[0] += 1.0
        assert await store.put(response("large", size=8000))
        assert [bool(await store.get(f"r{number}")) for number in range(5)] == [False] * 4 + [True]

    with_store(go_on, path)


def test_the_end_of_a_response_takes_the_place_of_its_beginning(clock: list[float]) -> None:
    """Also where the end alone is more than may be kept; neither counts for what the other had."""

    async def run(store: ResponseStore) -> None:
        for _ in range(3):
            assert await store.put(response("a", size=6_000), replaces=True)
        assert await store.put(response("b", size=3_000))  # beside one of the three
        assert ids(await store.conversation("a", max_bytes=MAX_BYTES)) == ["a-in", "a-out"]
        assert not await store.put(response("a", size=MAX_BYTES), replaces=True)
        assert await store.get("a") is None
        assert await store.put(response("c", size=6_000))
        assert None not in [await store.get(name) for name in "bc"]

    with_store(run)


def test_what_is_unused_for_too_long_is_gone(clock: list[float]) -> None:
    async def run(store: ResponseStore) -> None:
        for name in ("read", "unread"):
            await store.put(response(name))
        clock[0] += 60
        assert await store.get("read") == b"{}"
        clock[0] += 60
        assert await store.get("read") == b"{}"
        assert await store.get("unread") is None

    with_store(run)


def test_what_is_there_can_be_read_on_a_full_disk(tmp_path: Path, clock: list[float]) -> None:
    """That it was used cannot be written down: reading it was a 500."""

    async def run(store: ResponseStore) -> None:
        await store.put(response("old"))
        clock[0] += 60
        await store.put(response("a"))
        await store.put(response("b", "a"))
        clock[0] += 60  # "old" is to go
        with full_disk():
            assert await store.get("a") == b"{}"
            assert ids(await store.conversation("b", max_bytes=MAX_BYTES))[-1] == "b-out"
            assert ids(await store.given("b") or []) == ["b-in"]
            assert (await store.items(["a-out"], max_bytes=MAX_BYTES)).keys() == {"a-out"}
            with pytest.raises(sqlite3.OperationalError):
                await store.put(response("c"))
            with pytest.raises(ApiError, match="b cannot be deleted"):
                await store.delete("b")
        assert await store.get("old") is None
        assert await store.delete("b")

    with_store(run, tmp_path / "responses.db")


def test_a_file_is_kept_and_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def put(store: ResponseStore) -> None:
        await store.put(response("a"))
        with pytest.raises(sqlite3.IntegrityError):
            await store.put(response("a"))
        assert await store.get("a") == b"{}"

    async def get(store: ResponseStore) -> None:
        assert await store.get("a") == b"{}"
        for number in range(8):  # what was there before counts
            await store.put(response(f"{number}", size=1500))
        assert await store.get("a") is None

    with_store(put, path)
    with_store(get, path)
    (tmp_path / "text").write_text("no database " * 100)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE mine (a)")
    other.close()
    for wrong in ("text", "other.db", "no/folder.db"):
        with pytest.raises(ConfigError, match=r"response store|database of another kind"):
            ResponseStore(tmp_path / wrong, max_bytes=MAX_BYTES, ttl_s=1.0)
