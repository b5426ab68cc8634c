"""Log-probabilities of the prompt over HTTP: how the server cuts a prompt may not show."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server_process import ServerProcess, check_account, events_of

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


def test_offsets_are_places_in_the_text(http: httpx.Client) -> None:
    """In a stream they stood still while a stop string might have begun, and a character of three tokens counted thrice."""
    body = {"prompt": "漢字 é ❤: once upon", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 0,
            "echo": True, "stop": [" the moon", "a ship", "e big"]}  # fmt: skip
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    text, tokens, offsets = (whole["text"], whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"])
    assert "\ufffd" in tokens
    for token, at in zip(tokens, offsets, strict=True):
        assert token == "\ufffd" or text[at : at + len(token)] == token
    parts = [one["choices"][0] for one in events_of(http.post("/v1/completions", json=body | {"stream": True}).content)]
    assert any(part["logprobs"]["tokens"] and not part["text"] for part in parts), "some text was held back"
    assert [at for part in parts for at in part["logprobs"]["text_offset"]] == offsets


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_has_an_account_without_output(http: httpx.Client, stream: bool) -> None:
    """The token that the engine writes all the same stood in `timings`, and was told as the end when it was a stop token."""
    body = {"prompt": [PROMPT, PROMPT], "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2, "stream": stream,
            "logit_bias": {"77": 100.0}, "stop_token_ids": [77]}  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    events = events_of(answer.content) if stream else [answer.json()]
    ends = [one for event in events for one in event["choices"] if one["finish_reason"] is not None]
    assert [(one["finish_reason"], one["stop_reason"]) for one in ends] == [("length", None)] * 4
    told = events[-1]
    assert (told["usage"]["completion_tokens"], told["timings"]["predicted_n"]) == (0, 0)
    for one in told["timings"]["diptych"]["prompts"]:
        assert (one["predicted_n"], one["diptych"]["answer_n"]) == (0, 0)
    timelines = http.get(f"/v1/requests/{told['id']}/timeline").json()["prompts"]
    assert [one["tokens_ms"] for one in timelines] == [{}, {}], "it stood there, too"
    single = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0, "echo": True}).json()
    check_account(single)


def test_a_prompt_alone_may_fill_the_context(http: httpx.Client) -> None:
    """Nothing follows it, and yet room for a token had to be left."""
    body = {"prompt": [77] * 4096, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 4096
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 4096
    assert http.post("/v1/completions", json=body | {"prompt": [77] * 4097}).status_code == 400


def test_metrics_count_no_token_where_none_was_asked_for(server: ServerProcess, http: httpx.Client) -> None:
    """The engine writes one, which nobody gets: it was counted as handed out, with a time to it."""
    names = (
        "diptych_output_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_generation_tokens_sum",
        "vllm:request_max_num_generation_tokens_sum",
        "vllm:request_params_max_tokens_sum",
        "diptych_ttft_seconds_count",
        "diptych_requests_total",
    )

    def told() -> list[float]:
        found = dict.fromkeys(names, 0.0)
        for family in text_string_to_metric_families(server.wait_idle()):
            for sample in family.samples:
                if sample.name in found:
                    found[sample.name] += sample.value
        return list(found.values())

    before = told()
    alone = {"prompt": [PROMPT, PROMPT], "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
    assert http.post("/v1/completions", json=alone).json()["usage"]["completion_tokens"] == 0
    after = told()
    assert after == [*before[:-1], before[-1] + 2]
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "echo": True}).status_code == 200
    assert told() == [*(one + 1 for one in after)]
