"""Log-probabilities of the prompt over HTTP: how the server cuts a prompt may not show."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server_process import ServerProcess

PROMPT = "It was a dark and stormy night, and the old lighthouse keeper climbed the stairs once more to light the lamp."


def echoed(http: httpx.Client) -> dict[str, Any]:
    body = {"model": "diptych-10m", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    logprobs: dict[str, Any] = answer.json()["choices"][0]["logprobs"]
    return logprobs


def test_prompt_logprobs_are_those_of_a_prompt_read_at_once(http: httpx.Client) -> None:
    """With chunked prefill entries were lost or stood at their neighbours' places."""
    whole = echoed(http)
    assert whole["token_logprobs"][0] is None
    with ServerProcess("--max-step-tokens", "5", "--kv-memory-bytes", "67108864") as chunked:
        with chunked.client() as client:
            first, again = echoed(client), echoed(client)  # the second time the prompt is in the prefix index
        assert chunked.stop()[0] == 0
    for cut in (first, again):
        assert cut["tokens"] == whole["tokens"]
        assert cut["text_offset"] == whole["text_offset"]
        assert cut["token_logprobs"][1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-4)
