"""The compliance suite of Open Responses (bin/compliance-test.ts of openresponses/openresponses), case by case.

A model of 10M parameters is told to call a tool where the suite hopes for it.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from open_responses import CASES, GET_WEATHER, REFUSED, check_resource, events_of, put_together, texts_of

ASK = {"model": "diptych-10m", "temperature": 0}


def completed(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The suite's look at every whole answer."""
    answer = http.post("/v1/responses", json={**ASK, **body})
    assert answer.status_code == 200, answer.text
    response = answer.json()
    check_resource(response)
    assert response["status"] == "completed"
    assert response["output"]
    return response


@pytest.mark.parametrize("name", CASES)
def test_case_whole_and_streamed(http: httpx.Client, name: str) -> None:
    """The shapes hold, and what the events build is the response."""
    body, kinds = CASES[name]
    if "tools" in body:
        body = {**body, "tool_choice": "required", "parallel_tool_calls": False}
    whole = completed(http, body)
    assert {item["type"] for item in whole["output"]} == (kinds or {"message"})
    events = events_of(http.post("/v1/responses", json={**ASK, **body, "stream": True}).text)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    last = events[-1]["response"]
    check_resource(last)
    assert put_together(events) == texts_of(last) == texts_of(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    if kinds:
        seen = {event["type"] for event in events}
        assert {f"response.function_call_arguments.{word}" for word in ("delta", "done")} <= seen


def test_case_function_call_roundtrip(http: httpx.Client) -> None:
    """The result of a named call goes back by its call's id alone."""
    first = completed(
        http,
        {"input": "Use the weather tool to get the temperature in San Francisco.", "tools": [GET_WEATHER],
         "tool_choice": {"type": "function", "name": "get_weather"}, "parallel_tool_calls": False},
    )  # fmt: skip
    [call] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "64 degrees and clear"}
    second = completed(http, {"previous_response_id": first["id"], "input": [result]})
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["output_tokens"]


def test_case_previous_response_id(http: httpx.Client) -> None:
    """The second answer has read the first turn, which the client did not send again."""
    first = completed(http, {"input": "Remember this code word: papaya. Reply with only OK."})
    second = completed(
        http, {"previous_response_id": first["id"], "input": "What code word did I ask you to remember?"}
    )
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]


@pytest.mark.parametrize("name", REFUSED)
def test_case_of_what_is_not_here_is_refused_by_name(http: httpx.Client, name: str) -> None:
    """A model of text sees no images and files, and runs no tools of its own; never ignored."""
    body, fault = REFUSED[name]
    answer = http.post("/v1/responses", json={**ASK, **body})
    assert answer.status_code == 400
    assert fault in answer.json()["error"]["message"]
