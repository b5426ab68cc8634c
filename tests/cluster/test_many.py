"""A hundred prompts of every length to real pools: each answer is that of one engine, whole or as a stream."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.test_hand_off import random_model

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams, StructuredSpec
from server_process import ServerProcess, check_account

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]
CONTEXT, ANSWER, BLOCK = 4200, 12, 32
REGEX = "[a-f]{4}-[0-9]{6}"
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.3}
# what clients ask for: fields of a body, and the same in the engine's words
KINDS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"temperature": 0.0}, {"temperature": 0.0}),
    (SAMPLED, SAMPLED),
    ({**SAMPLED, "n": 3}, {**SAMPLED, "n": 3}),
    ({**SAMPLED, "logprobs": 2}, {**SAMPLED, "logprobs": 2}),
    (
        {**SAMPLED, "structured_outputs": {"regex": REGEX}},
        {**SAMPLED, "structured": StructuredSpec(kind="regex", source=REGEX)},
    ),
)


def answered(server: ServerProcess, body: dict[str, Any]) -> tuple[list[str], list[list[float]], dict[str, Any]]:
    """The texts, their log-probabilities, and the event with the account."""
    n = body.get("n", 1)
    texts, logprobs = [""] * n, [list[float]() for _ in range(n)]
    end: dict[str, Any] = {}
    with server.client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        if not body["stream"]:
            events = [json.loads(answer.read())]
        else:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
            events = [json.loads(line) for line in lines]
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            logprobs[choice["index"]] += (choice["logprobs"] or {}).get("token_logprobs", [])
        if event.get("usage"):
            end = event
    return texts, logprobs, end


def test_a_hundred_prompts_of_every_length(tmp_path: Path) -> None:
    """Edges of blocks and steps, with everything that a client can ask for: which process read what cannot be told."""
    random_model(tmp_path, max_position_embeddings=8192)
    rng = random.Random(7)
    edges = [n * BLOCK + by for n in (1, 2, 3, 8, 15, 16, 17, 32, 50, 64, 100, 127) for by in (-1, 0, 1)]
    lengths = [1, 2, 4095, 4096, *edges, *(rng.randrange(3, 4096) for _ in range(60))]
    prompts = [[rng.randrange(300, 4000) for _ in range(n)] for n in lengths]
    options = ["--max-queue-s", "0", "--kv-memory-bytes", "67108864", "--max-context-tokens", str(CONTEXT)]
    options += ["--max-step-tokens", "512", "--local-prefill-tokens", "0"]
    with ServerProcess(
        str(tmp_path), "--served-model-name", "m", "--prefill", "1", "--decode", "1", *options
    ) as server:

        def ask(number: int) -> tuple[list[str], list[list[float]], dict[str, Any]]:
            wants_stream = number % 2 == 0  # and there is an odd number of kinds
            extra = {"stream_options": {"include_usage": True}} if wants_stream else {}
            asked = {"model": "m", "prompt": prompts[number], "max_tokens": ANSWER, "stream": wants_stream}
            return answered(server, asked | extra | KINDS[number % len(KINDS)][0])

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(ask, range(len(prompts))))
        one = LLM(str(tmp_path), threads=1, kv_memory_bytes=67108864, max_context_tokens=CONTEXT)
        sampling = [SamplingParams(max_tokens=ANSWER, **KINDS[n % len(KINDS)][1]) for n in range(len(prompts))]
        for prompt, wanted, (texts, logprobs, end) in zip(
            prompts, one.generate(prompts, sampling), answers, strict=True
        ):
            assert texts == [choice.text for choice in wanted.choices], len(prompt)
            check_account(end)
            assert end["timings"]["transfer_n"] == (len(prompt) - 1) // BLOCK * BLOCK, "every whole block travels"
            for own, choice in zip(logprobs, wanted.choices, strict=True):
                if own:
                    assert own == pytest.approx([each.logprob for each in choice.logprobs], abs=0)
        server.check_balance()
        code, errors = server.stop()
        assert code == 0, errors
