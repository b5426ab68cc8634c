from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from diptych.ground.errors import (
    CapacityError,
    ConfigError,
    ExecutorError,
    InternalError,
    PromptTooLong,
    RequestError,
    SequenceError,
)
from diptych.ground.request import SamplingParams
from diptych.server.config import ServerConfig
from diptych.server.http.bases import Body
from diptych.server.http.door import parse
from diptych.server.http.errors import ApiError, error_body, error_response, from_engine_error
from diptych.server.schema import ChatBody, CompletionBody
from diptych.server.text_bodies import TokenizeBody
from diptych.server.values import depth_of

USER = {"role": "user", "content": "hi"}


def refused(body_type: type[Body], body: object) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse(raw, body_type)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("n", 65, ["n is 65", "64"]),
        ("n", 0, ["n is 0", "1"]),
        ("n", "2", ["n is '2'", "whole number"]),
        ("n", True, ["n is True"]),
        ("temperature", -0.5, ["temperature is -0.5", "0"]),
        ("top_p", 0, ["top_p is 0", "greater than 0"]),
        ("top_k", -2, ["top_k is -2"]),
        ("logprobs", 21, ["logprobs is 21", "20"]),
        ("stop", ["x"] * 17, ["stop has 17 entries", "16"]),
        ("stop", ["x" * 257], ["257 bytes", "256"]),
        ("stop", "", ["stop", "0 bytes"]),
        ("stop_token_ids", [1] * 65, ["stop_token_ids", "64"]),
        ("stop_token_ids", [-1], ["stop_token_ids[0] is -1"]),
        ("logit_bias", {str(i): 1 for i in range(1025)}, ["logit_bias has 1025 entries", "1024"]),
        ("logit_bias", {"5": 101}, ["logit_bias of token 5 is 101", "100"]),
        ("logit_bias", {"x": 1}, ["logit_bias has the key 'x'"]),
        ("user", "é" * 257, ["user has 514 bytes", "512"]),
        ("best_of", 2, ["best_of is 2", "n"]),
        ("suffix", "x", ["suffix"]),
        ("stream_options", {"include_usage": True}, ["stream_options", "stream"]),
        ("response_format", {"type": "json_schema"}, ["response_format", "schema"]),
        ("response_format", {"type": "xml"}, ["response_format.type is 'xml'"]),
        ("structured_outputs", {"regex": "a" * 4097}, ["structured_outputs.regex", "4096"]),
        ("structured_outputs", {}, ["structured_outputs has no constraint", "regex"]),
        ("seed", 2**64, ["seed is 18446744073709551616", "18446744073709551615"]),
        ("seed", -(2**63) - 1, ["seed is -9223372036854775809"]),
        ("request_id", "a b", ["request_id is 'a b'"]),
        ("prompt", [], ["prompt"]),
        ("prompt", [1, 2.5], ["prompt"]),
        ("prompt", [[]], ["prompt entry 0"]),
        ("prompt", ["a"] * 65, ["65 entries", "64"]),
    ],
)
def test_a_bad_value_is_refused_with_its_field_value_and_limit(field: str, value: object, words: list[str]) -> None:
    error = refused(CompletionBody, {"prompt": "hi", field: value})
    for word in words:
        assert word in error.message
    assert (error.param or "").split("[")[0].split(".")[0] == field


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "king", "content": "x"}]}, ["messages[0].role is 'king'"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["messages[0].content[0]"]),
        (
            {"messages": [USER, {"role": "user", "text": "Hi"}]},
            ["messages[1].content is missing", "role 'user' needs one"],
        ),
        ({"messages": [USER, {"role": "tool", "content": None}]}, ["messages[1].content is missing"]),
        ({"max_tokens": 0}, ["max_tokens is 0", "1"]),
        ({"max_completion_tokens": 0}, ["max_completion_tokens is 0", "1"]),
        ({"top_logprobs": 3}, ["top_logprobs", "logprobs"]),
        ({"tool_choice": "required"}, ["tool_choice", "tools"]),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ["tool_choice names 'f'"]),
        ({"chat_template_kwargs": {"a": "x" * 20000}}, ["chat_template_kwargs", "16384"]),
        ({"continue_final_message": True, "add_generation_prompt": True}, ["continue_final_message"]),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, ["tools[0].function.name is 'a b'"]),
    ],
)
def test_a_bad_chat_value_is_refused(extra: dict[str, object], words: list[str]) -> None:
    error = refused(ChatBody, {"messages": [USER], **extra})
    for word in words:
        assert word in error.message
    assert (error.param or "").split("[")[0] == next(iter(extra))


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_a_seed_is_as_wide_as_in_python(seed: int) -> None:
    """Half of them was refused over HTTP."""
    body = parse(json.dumps({"prompt": "hi", "seed": seed}).encode(), CompletionBody)
    assert body.seed == SamplingParams(seed=body.seed).seed == seed


def test_deep_json_is_refused_by_depth_not_by_a_crash() -> None:
    """A parameter bomb: the depth is measured without recursion."""
    deep: object = 1
    for _ in range(40):
        deep = {"properties": {"a": deep}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    error = refused(ChatBody, {"messages": [USER], "tools": tools})
    assert "nested 80 deep" in error.message
    assert "32" in error.message
    refused(ChatBody, b"[" * 100_000)
    refused(ChatBody, b'{"a":' * 100_000)
    assert depth_of({"a": [{"b": 1}]}) == 3


def test_millions_of_bad_entries_make_one_error() -> None:
    """A list that fails at every entry must not make an error record per entry."""
    many = b"3," * 1_000_000 + b"3"
    for body in (b'{"messages":[' + many + b"]}", b'{"messages":[{"role":"user","content":[' + many + b"]}]}"):
        with pytest.raises(ValidationError) as caught:
            ChatBody.model_validate_json(body)
        assert caught.value.error_count() <= 2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":NaN}',
        b'{"prompt":"a","temperature":1e999}',
    ],
)
def test_broken_json_and_bad_utf8_are_a_400(raw: bytes) -> None:
    error = refused(CompletionBody, raw)
    assert error.message.encode()


def test_unknown_fields_are_ignored_and_null_means_absent() -> None:
    body = parse(
        b'{"prompt":[1,2],"n":null,"stop":null,"logit_bias":null,"made_up":{"a":1},"seed":3.0}', CompletionBody
    )
    assert body.prompt == [[1, 2]]
    assert body.n is None
    assert body.stop == ()
    assert body.seed == 3


def test_one_of_prompt_and_messages_is_needed_to_tokenize() -> None:
    refused(TokenizeBody, {})
    refused(TokenizeBody, {"prompt": "a", "messages": [USER]})


def test_engine_errors_keep_their_words_and_get_the_right_status() -> None:
    too_long = from_engine_error(
        PromptTooLong("prompt has 5210 tokens; this engine accepts at most 4096", hint="cut it")
    )
    assert (too_long.status, too_long.code) == (400, "context_length_exceeded")
    assert "5210" in too_long.message
    assert from_engine_error(RequestError("x", param="n")).param == "n"
    busy = from_engine_error(CapacityError("full"), retry_after_s=2.3)
    assert (busy.status, error_response(busy).headers["retry-after"]) == (503, "3")
    unknown = from_engine_error(ValueError("another user's secret"))
    assert unknown.status == 500
    assert "secret" not in json.dumps(error_body(unknown))


PYDANTIC = ("Input should", "Value error", "valid dictionary", "valid string", "instance of", "validation error")


@pytest.mark.parametrize("field", [*CompletionBody.model_fields, "messages", "tools", "tool_choice", "top_logprobs"])
def test_every_complaint_is_in_our_words(field: str) -> None:
    """Some used to be pydantic's: "Input should be a valid dictionary or instance of Message"."""
    body_type, base = (CompletionBody, {"prompt": "hi"})
    if field not in CompletionBody.model_fields:
        body_type, base = (ChatBody, {"messages": [{"role": "user", "content": "x"}]})
    values = (
        7.5,
        -(10**30),
        "x\n",
        "",
        True,
        [],
        [[]],
        [{}],
        {},
        {"type": 1},
        {"a": {"b": []}},
        ["x"] * 2000,
        "x" * 70_000,
    )
    complaints = []
    for value in values:
        try:
            parse(json.dumps({**base, field: value}).encode(), body_type)
        except ApiError as error:
            complaints.append(error)
    assert complaints
    for error in complaints:
        assert not any(words in error.message for words in PYDANTIC), error.message
        assert "which cannot be read" not in error.message, "a complaint that `wording` does not know"
        assert error.param is not None


@pytest.mark.parametrize(
    "error", [SequenceError("boom"), ExecutorError("boom"), InternalError("boom"), ValueError("boom")]
)
def test_a_server_error_says_nothing_of_the_inside(error: Exception) -> None:
    """The text of a crash used to be shown to every client; it is for the log alone."""
    answer = from_engine_error(error)
    assert answer.status == 500
    assert "boom" not in answer.message
    assert "log" in answer.message


@pytest.mark.parametrize("key", ["secret\n", "", "ключ", "a\tb"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    """A key read from a file with its line break let nobody in, and nothing said why."""
    with pytest.raises(ConfigError, match="line break"):
        ServerConfig(api_key=key)
