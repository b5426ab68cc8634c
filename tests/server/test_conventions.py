"""What clients lean on without asking: the fingerprint, the first chunk, progress, short paths, counts, names."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from server_process import ServerProcess, events_of

TEXT = "the history of the old town and its river and the people who lived there " * 12
CHAT = {
    "messages": [{"role": "system", "content": TEXT[:400]}, {"role": "user", "content": "Tell me of it."}],
    "max_tokens": 24, "temperature": 1.0, "seed": 11, "ignore_eos": True, "logprobs": True, "return_token_ids": True,
}  # fmt: skip


def bits(answer: dict[str, Any]) -> tuple[Any, ...]:
    """All that the promise of the fingerprint is about."""
    choice = answer["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return answer["system_fingerprint"], choice["token_ids"], logprobs, choice["message"]


async def beside_others(url: str) -> dict[str, Any]:
    """The answer to CHAT while seven other requests are prefilled and decode."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        others = [
            http.post("/v1/completions", json={"prompt": f"{number} {TEXT}", "max_tokens": 40, "ignore_eos": True})
            for number in range(7)
        ]
        *_, answer = await asyncio.gather(*others, http.post("/v1/chat/completions", json=CHAT))
    return answer.json()


def test_equal_fingerprint_seed_and_request_give_equal_bits(server: ServerProcess, http: httpx.Client) -> None:
    """The promise of docs/serving.md: across cache states, batches, restarts, chunks, threads and speculation."""
    http.post("/reset_prefix_cache")
    first, again = (http.post("/v1/chat/completions", json=CHAT).json() for _ in range(2))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["system_fingerprint"].startswith("fp_")
    seen = [bits(first), bits(again), bits(asyncio.run(beside_others(server.url)))]
    options = (
        "--max-step-tokens",
        "48",
        "--max-running-sequences",
        "3",
        "--speculate",
        "lookup",
        "--threads",
        "2",
        "--max-queue-s",
        "0",
    )
    with ServerProcess(*options, "--kv-memory-bytes", "67108864", "--served-model-name", "other") as process:
        seen.append(bits(asyncio.run(beside_others(process.url))))
    assert seen == [seen[0]] * 4


def test_another_format_context_or_reading_of_text_is_another_fingerprint(
    server: ServerProcess, http: httpx.Client
) -> None:
    """Or equal fingerprints would promise what nobody keeps."""
    body = {"prompt": "Hi", "max_tokens": 1}
    seen = [http.post("/v1/completions", json=body).json()["system_fingerprint"]]
    for options in (("--weights", "int8"), ("--max-context-tokens", "512"), ("--read-control-tokens",)):
        with ServerProcess(*options, "--kv-memory-bytes", "16777216") as process, process.client() as other:
            seen.append(other.post("/v1/completions", json=body).json()["system_fingerprint"])
    assert len(set(seen)) == len(seen)
    streamed = events_of(http.post("/v1/completions", json={**body, "stream": True}).content)
    assert {event["system_fingerprint"] for event in streamed} == {seen[0]}


def test_a_stream_begins_with_the_role_and_no_text(http: httpx.Client) -> None:
    """The first text rode on the role, and clients that skip the role's chunk lost it."""
    events = events_of(http.post("/v1/chat/completions", json={**CHAT, "stream": True, "n": 2}).content)
    for index in (0, 1):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert mine[0]["finish_reason"] is None
        assert "token_ids" not in mine[0]
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert sum(len(choice.get("token_ids", ())) for choice in mine) == 24


def test_progress_of_a_long_prompt_is_told_chunk_by_chunk() -> None:
    """llama.cpp's `prompt_progress`: its clients draw a bar from it."""
    with ServerProcess("--max-step-tokens", "32", "--kv-memory-bytes", "16777216") as process, process.client() as http:
        chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "ignore_eos": True, "stream": True}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": TEXT, "max_tokens": 4, "ignore_eos": True, "stream": True}),
        ):
            events = events_of(http.post(path, json={**body, "return_progress": True}).content)
            told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
            usage = events[-1]["usage"]
            assert len(told) > 4
            assert all("prompt_progress" not in event for event in events[len(told) :])
            assert {one["total"] for one in told} == {usage["prompt_tokens"]}
            done = [one["processed"] for one in told]
            assert done == sorted(done)
            assert done[-1] == usage["prompt_tokens"]
            times = [one["time_ms"] for one in told]
            assert times == sorted(times)
            assert times[0] == 0
            assert told[-1]["cache"] == usage["prompt_tokens_details"]["cached_tokens"]
            plain = events_of(http.post(path, json=body).content)
            assert not any("prompt_progress" in event for event in plain)
        again = events_of(http.post("/v1/chat/completions", json={**chat, "return_progress": True}).content)
        cached = again[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again[0]["prompt_progress"]["cache"] == again[0]["prompt_progress"]["processed"] == cached > 0
        assert again[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        for body in ({"prompt": "a"}, {"prompt": ["a", "b"], "stream": True}):
            refused = http.post("/v1/completions", json={**body, "return_progress": True})
            assert refused.json()["error"]["param"] == "return_progress"


def test_routes_answer_without_v1(http: httpx.Client) -> None:
    """Many clients are given an address and put the rest behind it."""
    text, chat = {"prompt": "Hi", "max_tokens": 2, "seed": 1}, {**CHAT, "max_tokens": 2}
    for path, body in (("/completions", text), ("/chat/completions", chat), ("/chat/completions/input_tokens", chat)):
        short, long = http.post(path, json=body), http.post(f"/v1{path}", json=body)
        assert short.status_code == long.status_code == 200, (path, short.text)
        assert short.json().get("choices") == long.json().get("choices")
    assert http.get("/models").json() == http.get("/v1/models").json()
    name = http.get("/models").json()["data"][0]["id"]
    assert http.get(f"/models/{name}").json()["id"] == name
    assert "/models" not in http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
def test_a_load_balancer_may_ask_by_head(http: httpx.Client, path: str) -> None:
    """It got a 405 and took the server for one that is down."""
    answer = http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    if path != "/":  # a page
        assert list(http.get("/openapi.json").json()["paths"][path]) == ["get"]


def test_the_count_of_a_chat_is_what_its_prompt_has(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT).json()
    counted = http.post("/v1/chat/completions/input_tokens", json=CHAT).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["prompt_tokens"]}


def test_tokenize_takes_llama_cpp_s_names(http: httpx.Client) -> None:
    """`content` was unknown, so its clients were told that exactly one of prompt and messages must be given."""
    text = "naïve <|im_end|>"
    theirs = http.post("/tokenize", json={"content": text}).json()["tokens"]
    ours = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert theirs == ours
    end = http.post("/tokenize", json={"content": "<|im_end|>"}).json()["tokens"]
    assert len(end) == 1
    assert end[0] in theirs
    plain = http.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert end[0] not in plain
    assert http.post("/detokenize", json={"tokens": plain}).json()["content"] == text
    shown = http.post("/tokenize", json={"content": "日", "with_pieces": True}).json()["tokens"]
    raw = b"".join(bytes(one["piece"]) if isinstance(one["piece"], list) else one["piece"].encode() for one in shown)
    assert raw.decode() == "日"
    for body in ({"prompt": "a", "content": "b"}, {"prompt": "a", "parse_special": False}):
        assert http.post("/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("takes_any", [False, True])
def test_a_model_of_several_names(takes_any: bool) -> None:
    """Many tools have a name built in."""
    options = ["--served-model-name", "a", "--served-model-name", "b", *(["--any-model-name"] if takes_any else [])]
    with ServerProcess(*options, "--kv-memory-bytes", "16777216") as process, process.client() as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["a", "b"]
        for name, status in (("a", 200), ("b", 200), ("gpt-9", 200 if takes_any else 404)):
            answer = http.post("/v1/completions", json={"model": name, "prompt": "Hi", "max_tokens": 1})
            assert answer.status_code == status, answer.text
            assert http.get(f"/v1/models/{name}").status_code == status
            if status == 200:
                assert answer.json()["model"] == "a"
