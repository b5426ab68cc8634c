"""schemathesis on the server's own OpenAPI document: well-formed and malformed requests, no 5xx, no 422, no hang.

Normal runs make 20 examples per operation and mode, the same ones each time, with lists of at most three where the document
has no bound, and a third as many on routes that read the body of another; `pytest -m slow -s` with this file makes 1,000, of
any length, and shows which statuses came.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation

from server_process import ServerProcess

MAX_OUTPUT_TOKENS = 3
# for one answer, of a few milliseconds: no answer is a hang, but a machine that gives us no time is none
TIMEOUT_S = 900


# routes that generate -> what they call the limit of an answer
LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
# routes -> whose body they read too, only to count it
TWINS = {
    "/v1/chat/completions/input_tokens": "/v1/chat/completions",
    "/v1/responses/input_tokens": "/v1/responses",
    "/v1/messages/count_tokens": "/v1/messages",
}
MOST_ITEMS = 3


def shortened(part: Any) -> Any:
    """The same document with a bound for lists that have none: lists of messages of lists of parts take what draws take."""
    if isinstance(part, list):
        return [shortened(one) for one in part]
    if not isinstance(part, dict):
        return part
    bound = {"maxItems": max(MOST_ITEMS, part.get("minItems", 0))} if part.get("type") == "array" else {}
    return bound | {name: shortened(one) for name, one in part.items()}


def tamed(body: object, limit: str) -> object:
    """The same body, but short in what it makes the model write: what is tried here is the door, not the engine."""
    if not isinstance(body, dict):
        return body
    if limit == "max_output_tokens":  # a made-up id is never stored, and without one there must be an input
        body = {**body, "previous_response_id": None, "input": body.get("input") or "Hi"}
    n_max = body.get(limit)
    if n_max is None:
        return body | {limit: MAX_OUTPUT_TOKENS}
    is_number = isinstance(n_max, int) and not isinstance(n_max, bool)
    return body | {limit: min(n_max, MAX_OUTPUT_TOKENS)} if is_number else body


def try_operation(
    operation: APIOperation, url: str, session: requests.Session, *, examples: int, mode: GenerationMode
) -> Counter[int]:
    """Send examples of one operation; returns how often each status came."""
    counts: Counter[int] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def send(case: schemathesis.Case) -> None:
        limit = LIMITS.get(operation.path.removesuffix("/input_tokens"))
        if limit is not None:
            case.body = tamed(case.body, limit)
        answer = case.call(base_url=url, session=session, timeout=TIMEOUT_S)
        counts[answer.status_code] += 1
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        assert answer.status_code != 422
        if answer.status_code >= 400:
            is_anthropic = operation.path.startswith("/v1/messages")
            shape = {"type", "message"} if is_anthropic else {"message", "type", "param", "code"}
            assert set(answer.json()["error"]) == shape

    send()
    return counts


def try_operations(
    server: ServerProcess, *, examples: int, twins: int, mode: GenerationMode, is_short: bool
) -> dict[str, Counter[int]]:
    """The statuses of every operation. twins: examples of a body whose fields another route is tried with."""
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(shortened(document) if is_short else document)
    statuses: dict[str, Counter[int]] = {}
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            has_body = bool(operation.body.items)
            if not has_body and mode is GenerationMode.NEGATIVE:
                continue  # a path parameter is any text, so nothing is malformed
            n_examples = examples if has_body or operation.path_parameters.items else 1
            n_examples = min(n_examples, twins) if operation.path in TWINS else n_examples
            name = f"{operation.method.upper()} {operation.path}"
            statuses[name] = try_operation(operation, server.url, session, examples=n_examples, mode=mode)
            print(f"{mode.value} {name}: {dict(sorted(statuses[name].items()))}", flush=True)
    return statuses


def check_modes(server: ServerProcess, *, examples: int, twins: int, is_short: bool) -> None:
    good, bad = (
        try_operations(server, examples=examples, twins=twins, mode=mode, is_short=is_short)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )
    texts = ("/tokenize", "/apply-template", "/v1/responses/input_tokens", "/v1/messages/count_tokens")
    states = ("/v1/embeddings", "/v1/rerank", "/v1/score")
    for route in (f"POST {path}" for path in (*LIMITS, *texts, *states)):
        assert good[route][200] > 0, (route, good[route])
        assert bad[route][400] > 0, (route, bad[route])
    server.wait_idle(TIMEOUT_S)


def test_the_document_tells_the_bounds_of_whole_numbers(server: ServerProcess) -> None:
    """They stood there as `ge` and `le`, so that a client made from it, or this fuzzer, knew of none. Of a chat it said
    0 tokens, which only a completion may ask for, whose prompt is echoed.
    """
    schemas = httpx.get(f"{server.url}/openapi.json", timeout=TIMEOUT_S).json()["components"]["schemas"]

    def bounds(body: str, name: str) -> tuple[int, int]:
        whole = schemas[body]["properties"][name]["anyOf"][0]
        return whole.get("minimum"), whole.get("maximum")

    most = 2**31 - 1
    wanted = {
        "n": (1, 64),
        "top_logprobs": (0, 20),
        "max_tokens": (1, most),
        "max_completion_tokens": (1, most),
        "min_tokens": (0, most),
        "top_k": (-1, most),
        "seed": (-(2**63), 2**64 - 1),
    }
    assert {name: bounds("ChatBody", name) for name in wanted} == wanted
    assert bounds("CompletionBody", "max_tokens") == (0, most)
    assert not re.search(r'"(ge|gt|le|lt)":', json.dumps(schemas))


FUZZED = ("--max-queue-s", "0", "--kv-memory-bytes", "67108864", "--task", "embed", "--runtime-lora")


@pytest.fixture(scope="module")
def every_task() -> Iterator[ServerProcess]:
    """One that gives states beside text and loads adapters, so that all routes answer."""
    with ServerProcess(*FUZZED) as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


@pytest.mark.timeout(3600)  # twenty seconds alone; others may be using the cores
def test_no_request_makes_a_server_error(every_task: ServerProcess) -> None:
    check_modes(every_task, examples=20, twins=7, is_short=True)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)  # a quarter of an hour alone
def test_no_request_makes_a_server_error_in_a_thousand_tries(every_task: ServerProcess) -> None:
    check_modes(every_task, examples=1000, twins=1000, is_short=False)
