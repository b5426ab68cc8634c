"""What `vllm bench serve` sends and how it reads the answer, replayed: its users compare servers with it.

Shapes as in vLLM's `vllm/benchmarks/lib/endpoint_request_func.py` and `vllm/benchmarks/serve.py` (2026): a model asked for by
`/v1/models`, one probe request, streams of completions or chats with `ignore_eos`, counters of `/metrics` before and after.
It reads the stream as it arrives from the socket: every event with choices is a token, the last one with usage has the counts.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from server_process import ServerProcess

OUTPUT_TOKENS = 9
# sent for every backend that speaks the OpenAI API; -1 and None are the client's words for "not set"
SAMPLING = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def completion_body(model: str, prompt: object) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": OUTPUT_TOKENS,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **SAMPLING,
    }


def chat_body(model: str, prompt: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
        "max_completion_tokens": OUTPUT_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **SAMPLING,
    }


class Answer:
    """The parts of a stream that the benchmark makes its numbers from."""

    def __init__(self) -> None:
        self.token_events = 0
        self.text = ""
        self.usage: dict[str, Any] | None = None
        self.is_done = False

    def read(self, message: str) -> None:
        chunk = message.removeprefix("data: ")
        if chunk == "[DONE]":
            self.is_done = True
            return
        data = json.loads(chunk)
        if data.get("choices"):
            choice = data["choices"][0]
            self.token_events += 1
            self.text += (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
        elif data.get("usage"):
            assert self.usage is None
            self.usage = data["usage"]


async def send(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    answer, buffer = Answer(), ""
    headers = {"x-request-id": f"bench-{id(answer)}"}
    async with client.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for part in response.aiter_raw():
            *messages, buffer = (buffer + part.decode()).split("\n\n")
            for message in messages:
                answer.read(message.strip())
    assert buffer == ""
    return answer


def spec_decode_counters(text: str) -> dict[str, float]:
    lines = [line for line in text.split("\n") if line.startswith("vllm:spec_decode")]
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize("kind", ["text", "token ids", "chat"])
def test_the_benchmark_of_vllm_runs_against_this_server(server: ServerProcess, kind: str) -> None:
    async def run() -> list[Answer]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            assert (await client.get("/health")).status_code == 200
            card = (await client.get("/v1/models")).json()["data"][0]
            assert card["root"] == "diptych-10m"
            before = spec_decode_counters((await client.get("/metrics")).text)

            def request(number: int) -> tuple[str, dict[str, Any]]:
                if kind == "chat":
                    return "/v1/chat/completions", chat_body(card["id"], f"Tell me about number {number}.")
                prompt = [5 + number] * 20 if kind == "token ids" else f"The story of number {number} begins"
                return "/v1/completions", completion_body(card["id"], prompt)

            probe = await send(client, *request(0))
            answers = await asyncio.gather(*(send(client, *request(number)) for number in range(8)))
            assert probe.text == answers[0].text
            after = spec_decode_counters((await client.get("/metrics")).text)
            assert before == after
            assert set(after) >= {f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens")}
            return answers

    for answer in asyncio.run(run()):
        assert answer.is_done
        # a chat begins with a chunk of the role alone, as vLLM's own server sends it
        assert answer.token_events == OUTPUT_TOKENS + (kind == "chat")
        assert answer.text
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == OUTPUT_TOKENS
        if kind == "token ids":
            assert answer.usage["prompt_tokens"] == 20
