"""Pages of other sites: what a browser on this machine can be made to send here. Real requests over TCP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from diptych.ground.errors import ConfigError
from diptych.server.config import ServerConfig
from server_process import ServerProcess

APP = "https://app.example.com"
PROMPT = {"prompt": "Once", "max_tokens": 2}


@pytest.fixture(scope="module")
def open_to_app() -> Iterator[ServerProcess]:
    """With a key, one more name, and one site whose pages may use it."""
    options = ("--allow-origin", APP, "--allowed-host", "llm.example.com", "--kv-memory-bytes", "33554432")
    with ServerProcess(*options, key="a-key") as process:
        yield process


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("[::1]:8000", True),
        ("192.168.1.7:8000", True),
        (socket.gethostname(), True),
        ("evil.example.com", False),
        ("evil.example.com:8000", False),
        ("localhost.evil.example.com", False),
        ("127.0.0.1.evil.example.com", False),
        ("", False),
        ("[", False),
    ],
)
def test_only_names_of_this_machine_are_answered_to(http: httpx.Client, host: str, is_ours: bool) -> None:
    """DNS rebinding: a page's own name pointed at 127.0.0.1 used to read everything on a loopback server."""
    for path in ("/health", "/metrics", "/v1/models"):
        answer = http.get(path, headers={"Host": host})
        if is_ours:
            assert answer.status_code == 200
        else:
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "host_not_allowed"
            assert "--allowed-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("request_line", "status", "code"),
    [("GET /v1/models HTTP/1.0", b"200", None), ("GET /v1/models HTTP/1.1", b"400", "no_host")],
)
def test_a_request_without_host_is_a_programs(
    server: ServerProcess, request_line: str, status: bytes, code: str | None
) -> None:
    """Both were told that the host '' is not allowed; every browser names its host."""
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(f"{request_line}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    assert json.loads(body).get("error", {}).get("code") == code


@pytest.mark.parametrize("origin", ["https://evil.example.com", "http://localhost:1", "null", "file://"])
def test_another_sites_page_changes_nothing(server: ServerProcess, http: httpx.Client, origin: str) -> None:
    """A form's POST needs no permission of the browser; it used to reset the prefix cache."""
    for path in ("/reset_prefix_cache", "/v1/completions", "/tokenize"):
        answer = http.post(path, json=PROMPT, headers={"Origin": origin})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert http.post("/reset_prefix_cache", headers={"Origin": server.url}).json() == {"reset": True}
    assert http.post("/reset_prefix_cache").json() == {"reset": True}


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_must_say_that_it_is_json(http: httpx.Client, kind: str) -> None:
    answer = http.post("/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "invalid_content_type")


def test_an_allowed_site_asks_first_and_then_reads(open_to_app: ServerProcess) -> None:
    """The preflight carries no key and must be answered; the answer's head must name the site."""
    asks = {"Origin": APP, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization, content-type"
    with httpx.Client(base_url=open_to_app.url, timeout=60) as http:
        preflight = http.options("/v1/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == APP
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for stream in (False, True):
            sent = {**open_to_app.headers, "Origin": APP}
            answer = http.post("/v1/completions", json={**PROMPT, "stream": stream}, headers=sent)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
        stranger = http.options("/v1/completions", headers={**asks, "Origin": "https://evil.example.com"})
        assert stranger.status_code == 400
        assert "access-control-allow-origin" not in stranger.headers
        assert http.post("/v1/completions", json=PROMPT, headers={"Origin": APP}).status_code == 401
        assert http.get("/health", headers={"Host": "llm.example.com"}).status_code == 200


def test_without_an_option_no_site_is_allowed(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"Origin": APP})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"allow_origins": ("app.example.com",)}, "allow_origin"),
        ({"allow_origins": ("https://app.example.com/",)}, "allow_origin"),
        ({"allowed_hosts": ("http://x",)}, "allowed_host"),
        ({"allowed_hosts": ("x:80",)}, "allowed_host"),
        ({"api_key": "a\nb"}, "line break"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
    ],
)
def test_settings_that_could_never_match_are_refused(values: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ServerConfig(**values)  # type: ignore[arg-type]
