"""One plain server is shared by every module that does not need its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from live_page import CHROMIUM
from server_process import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The bundled model with default settings, never refusing for a long queue."""
    with ServerProcess("--max-queue-s", "0", "--kv-memory-bytes", "67108864") as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def kept_context(browser: Any) -> Iterator[Any]:
    """One for all tests of a module: of another the first page takes a process that begins, four times what it takes here."""
    kept = browser.new_context()
    kept.new_page()
    yield kept
    kept.close()


@pytest.fixture
def context(kept_context: Any, server: ServerProcess) -> Iterator[Any]:
    """Of one who was never here, 1280 by 720, light; an error of a page's scripts, anything that its policy forbids, and a
    request to another than our servers fail the test.
    """
    problems: list[str] = []
    foreign: list[str] = []

    def on_console(one: Any) -> None:
        if "Content Security Policy" in one.text:
            problems.append(one.text)

    def on_request(one: Any) -> None:
        if not one.url.startswith(("data:", *(process.url for process in ServerProcess.running))):
            foreign.append(one.url)

    watched = {"console": on_console, "weberror": lambda one: problems.append(str(one.error)), "request": on_request}
    for event, see in watched.items():
        kept_context.on(event, see)
    yield kept_context
    tab, *others = kept_context.pages
    for other in others:
        other.close()
    tab.unroute_all()
    tab.goto(f"{server.url}/health")  # a page that is left may store something
    tab.evaluate("[localStorage, sessionStorage].forEach(store => store.clear())")
    tab.set_viewport_size({"width": 1280, "height": 720})
    tab.emulate_media(color_scheme="light", reduced_motion="no-preference")
    kept_context.clear_permissions()
    for event, see in watched.items():
        kept_context.remove_listener(event, see)
    assert problems == []
    assert foreign == []


@pytest.fixture
def tab(context: Any) -> Any:
    """The one that stays open."""
    return context.pages[0]


@pytest.fixture(autouse=True)
def balance(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test with a server, nothing is lost in any: no token, no request, no block."""
    yield
    if any(isinstance(value, ServerProcess | httpx.Client) for value in request.node.funcargs.values()):
        for process in ServerProcess.running:
            process.check_balance()


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
