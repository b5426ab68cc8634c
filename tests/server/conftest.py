"""One plain server is shared by every module that does not need its own."""

from __future__ import annotations

from collections.abc import Iterator

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
def browser() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


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
