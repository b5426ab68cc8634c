"""The sums of the contract (usage, phases, segments) in every state a request can be in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest

from diptych.ground.clock import sleep_s
from server_process import CLOCK, ServerProcess, check_account, events_of

LONG = "the history of the old town and its river and the people who lived there " * 12


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    """A pool of 1,024 tokens and steps of 64: prompts are chunked, and sequences preempt each other."""
    with ServerProcess(
        "--max-context-tokens",
        "512",
        "--kv-memory-bytes",
        "2400000",
        "--max-step-tokens",
        "64",
        "--max-queue-s",
        "0",
        "--max-running-sequences",
        "64",
    ) as process:
        yield process
        assert process.stop()[0] == 0


def chat(**extra: object) -> dict[str, object]:
    messages = [
        {"role": "system", "content": "You are brief. " * 8},
        {"role": "user", "content": "Tell me about Finland."},
        {"role": "assistant", "content": "It is in the north."},
        {"role": "user", "content": "And its capital?"},
    ]
    return {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **extra}


def test_segments_of_a_chat_carry_its_parts_and_its_prefill_time(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=chat(cache_salt="segments")).json()
    check_account(answer)
    names = [part["name"] for part in answer["timings"]["diptych"]["segments"]]
    assert names == ["system", "turn 1 user", "turn 1 assistant", "new message", "generation prompt"]
    template = http.post("/apply-template", json={"messages": chat()["messages"]}).json()
    assert [part["tokens"] for part in template["segments"]] == [
        part["tokens"] for part in answer["timings"]["diptych"]["segments"]
    ]
    assert template["segments"][-1]["end"] == len(template["tokens"]) == answer["usage"]["prompt_tokens"]


def test_a_second_turn_is_cached_and_charged_for_its_new_part_only(http: httpx.Client) -> None:
    http.post("/reset_prefix_cache")
    first = http.post("/v1/chat/completions", json=chat()).json()
    second = http.post("/v1/chat/completions", json=chat()).json()
    salted = http.post("/v1/chat/completions", json=chat(cache_salt="another tenant")).json()
    for answer in (first, second, salted):
        check_account(answer)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert cached % 32 == 0
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    parts = second["timings"]["diptych"]["segments"]
    assert parts[0]["cached_tokens"] == parts[0]["tokens"]
    assert parts[0]["prefill_ms"] == 0
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    assert http.post("/reset_prefix_cache").json() == {"reset": True}
    after = http.post("/v1/chat/completions", json=chat()).json()
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_sums_hold_for_chunked_prompts_streams_and_several_choices(small: ServerProcess, stream: bool, n: int) -> None:
    body = {
        "prompt": LONG,
        "max_tokens": 8,
        "n": n,
        "temperature": 1.0,
        "seed": 3,
        "stream": stream,
        "cache_salt": f"{stream}{n}",
    }
    with small.client() as http:
        raw = http.post("/v1/completions", json=body)
        answer = events_of(raw.content)[-1] if stream else raw.json()
        check_account(answer)
        timeline = http.get(f"/v1/requests/{answer['id']}/timeline").json()
    chunks = timeline["prefill_chunks"]
    assert len(chunks) > 1
    assert [chunk["start"] for chunk in chunks[1:]] == [chunk["end"] for chunk in chunks[:-1]]
    assert chunks[-1]["end"] == answer["usage"]["prompt_tokens"]
    assert sum(len(times) for times in timeline["tokens_ms"].values()) == answer["usage"]["completion_tokens"]


def test_sums_hold_under_preemption_and_recomputed_tokens_are_no_cache_hits(small: ServerProcess) -> None:
    """More work than the pool holds: sequences lose their blocks and come back; nobody sees a wrong account or text."""
    prompts = [f"number {number}: " + LONG[: 150 + 7 * number] for number in range(7)]

    async def run() -> list[dict[str, object]]:
        async with httpx.AsyncClient(base_url=small.url, timeout=120) as http:
            bodies = [
                {"prompt": text, "max_tokens": 150, "temperature": 0, "ignore_eos": True, "cache_salt": text}
                for text in prompts
            ]
            return [
                one.json()
                for one in await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
            ]

    answers = asyncio.run(run())
    preempted = [one for one in answers if one["timings"]["diptych"]["preemptions"] > 0]  # type: ignore[index]
    assert preempted, "the load was meant to preempt"
    for answer in answers:
        check_account(answer)
        assert answer["usage"]["completion_tokens"] == 150  # type: ignore[index]
    for answer in preempted:
        assert answer["timings"]["diptych"]["recomputed_tokens"] > 0  # type: ignore[index]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # type: ignore[index]
    small.wait_idle()


def test_an_aborted_request_keeps_its_sums_and_gives_its_blocks_back(small: ServerProcess) -> None:
    with small.client() as http:
        answers: list[httpx.Response] = []
        body = {"prompt": LONG, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "request_id": "victim"}
        sender = threading.Thread(target=lambda: answers.append(small.client().post("/v1/completions", json=body)))
        sender.start()
        deadline_s = CLOCK.now_s() + 30
        while http.delete("/v1/requests/victim").status_code == 404:
            assert CLOCK.now_s() < deadline_s
            sleep_s(0.01)
        sender.join()
        answer = answers[0].json()
        assert answer["choices"][0]["finish_reason"] == "abort"
        check_account(answer)
        assert http.delete("/v1/requests/victim").status_code == 404
        assert http.get("/v1/requests/victim/timeline").json()["is_finished"] is True
    small.wait_idle()


def test_a_stall_names_who_caused_it(small: ServerProcess) -> None:
    """A long prompt arrives while a stream decodes: the stream's timeline lists the shared steps and the culprit."""
    with small.client() as http, small.client() as other:
        body = {
            "prompt": "Once",
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "request_id": "slow",
        }
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            other.post(
                "/v1/completions",
                json={"prompt": LONG, "max_tokens": 1, "request_id": "culprit", "cache_salt": "stall"},
            )
            rest = [line for line in lines if line.startswith("data: {")]
        assert rest
        timeline = other.get("/v1/requests/slow/timeline").json()
    shared = [step for step in timeline["shared_steps"] if "cmpl-culprit" in step["caused_by"]]
    assert shared
    assert all(step["prefill_tokens"] > 0 for step in shared)


def test_metrics_agree_with_the_answers(server: ServerProcess, http: httpx.Client) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count")
    before = [server.metric(name) for name in names]
    answers = [http.post("/v1/completions", json={"prompt": f"metric {i}", "max_tokens": 5}).json() for i in range(3)]
    after = [server.metric(name) for name in names]
    prompt = sum(one["usage"]["prompt_tokens"] for one in answers)
    output = sum(one["usage"]["completion_tokens"] for one in answers)
    assert [new - old for new, old in zip(after, before, strict=True)] == [prompt, output, 3]


def test_every_state_at_once_adds_up_request_by_request_and_in_the_totals(small: ServerProcess) -> None:
    """Cached, chunked, preempted, aborted, n > 1, streamed and several prompts, beside each other on a small pool."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total")
    before = [small.metric(name) for name in names]
    shared = LONG[:300]
    options = {"max_tokens": 90, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    bodies: list[tuple[str, dict[str, object]]] = []
    for number in range(4):
        prompt = f"{shared} tale {number}"
        bodies.append(
            ("/v1/completions", {**options, "prompt": prompt, "n": 1 + number % 3, "stream": number % 2 == 0})
        )
        bodies.append(
            ("/v1/completions", {**options, "prompt": prompt, "request_id": f"leaves-{number}", "stream": True})
        )
        bodies.append(("/v1/chat/completions", chat(max_tokens=60, stream=number % 2 == 1, n=2)))
    bodies.append(("/v1/completions", {**options, "prompt": [shared, f"{shared} and", "short"], "n": 2}))
    bodies.append(("/v1/completions", {**options, "prompt": [shared, "short"], "stream": True}))

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=small.url, timeout=300) as http:

            async def leave(number: int) -> None:
                while (await http.delete(f"/v1/requests/leaves-{number}")).status_code == 404:
                    await asyncio.sleep(0.01)

            sent = [asyncio.create_task(http.post(path, json=body)) for path, body in bodies]
            await asyncio.gather(*(leave(number) for number in range(0, 4, 2)))
            return await asyncio.gather(*sent)

    answers = [
        events_of(response.content)[-1] if body.get("stream") else response.json()
        for response, (_, body) in zip(asyncio.run(run()), bodies, strict=True)
    ]
    for answer, (_, body) in zip(answers, bodies, strict=True):
        if isinstance(body.get("prompt"), list):
            check_prompts(answer, len(body["prompt"]))  # type: ignore[arg-type]
        else:
            check_account(answer)
    reasons = [answer["choices"][0]["finish_reason"] for answer in answers]
    assert reasons.count("abort") >= 1
    after = [small.metric(name) for name in names]
    assert after[0] - before[0] == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert after[1] - before[1] == sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert after[2] > before[2], "the pool was meant to be too small"
    assert any(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in answers)
    small.wait_idle()


def check_prompts(answer: dict[str, object], n_prompts: int) -> None:
    """A body with several prompts: each has an account of its own, and usage is their sum."""
    usage, parts = answer["usage"], answer["timings"]["diptych"]["prompts"]  # type: ignore[index]
    assert len(parts) == n_prompts
    assert sum(part["prompt_n"] + part["cache_n"] for part in parts) == usage["prompt_tokens"]  # type: ignore[index]
    assert sum(part["predicted_n"] for part in parts) == usage["completion_tokens"]  # type: ignore[index]
    for part in parts:
        own = part["diptych"]
        assert own["queue_ms"] + own["prefill_ms"] + own["decode_ms"] == pytest.approx(own["e2e_ms"], abs=1.0)
        assert sum(segment["prefill_ms"] for segment in own["segments"]) == pytest.approx(own["prefill_ms"], abs=1e-3)
