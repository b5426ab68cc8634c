"""What would have been, asked of a real server about a request that it has just answered."""

from __future__ import annotations

import httpx

from server_process import ServerProcess


def answered(http: httpx.Client, prompt: str, *, max_tokens: int = 24) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return str(http.post("/v1/completions", json=body).raise_for_status().json()["id"])


def test_a_recent_request_is_run_again_with_each_change(http: httpx.Client) -> None:
    """Tokens and cache hits are the server's own: the second of two equal prompts finds the first one again."""
    text = "A long story about a lighthouse and the people who kept its lamp. " * 20
    answered(http, text)
    name = answered(http, text)
    told = http.get(f"/v1/requests/{name}/what-if", params={"change": ["cached", "chunk=64", "device=h100-80gb-sxm"]})
    found = told.raise_for_status().json()
    assert found["id"] == name
    again, cached, chunk, device = found["outcomes"]
    assert again["change"] is None
    assert again["cached_tokens"] == found["measured"]["cached_tokens"] > 0
    assert cached["cached_tokens"] >= again["cached_tokens"]
    assert device["ttft_ms"] < again["ttft_ms"]
    for one in (again, cached, chunk, device):
        assert abs(one["ttft_ms"] - one["queue_ms"] - one["prefill_ms"]) < 0.01
    assert len(http.get(f"/v1/requests/{name}/what-if").json()["outcomes"]) == 6


def test_what_cannot_be_asked_is_refused_with_words(http: httpx.Client) -> None:
    name = answered(http, "Once")
    refused = http.get(f"/v1/requests/{name}/what-if", params={"change": "quicker"})
    assert refused.status_code == 400
    assert "cannot change 'quicker'" in refused.json()["error"]["message"]
    assert http.get("/v1/requests/nobody/what-if").status_code == 404


def test_a_server_that_keeps_nothing_says_so() -> None:
    with ServerProcess("--keep-minutes", "0", "--kv-memory-bytes", "33554432") as server:
        http = server.client()
        name = answered(http, "Once", max_tokens=2)
        refused = http.get(f"/v1/requests/{name}/what-if")
        assert refused.status_code == 404
        assert "--keep-minutes" in refused.json()["error"]["message"]
