"""Parameters of queries: each is honoured, refused by name, or named in the answer's header; none is dropped without a word."""

from __future__ import annotations

import importlib
import typing

import httpx
import openai
import pytest

from diptych.server.http.query import NO_EFFECT, page
from server_process import ServerProcess

MODEL = "diptych-10m"
SHORT: dict[str, typing.Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 4}
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


@pytest.mark.parametrize(
    ("path", "module", "names"),
    [
        (
            "/v1/responses/{response_id}",
            "openai.types.responses.response_retrieve_params",
            ("ResponseRetrieveParamsBase", "ResponseRetrieveParamsStreaming"),
        ),
        (
            "/v1/responses/{response_id}/input_items",
            "openai.types.responses.input_item_list_params",
            ("InputItemListParams",),
        ),
        ("/v1/models", "anthropic.types.model_list_params", ("ModelListParams",)),
    ],
)
def test_every_parameter_of_the_clients_is_known(
    http: httpx.Client, path: str, module: str, names: tuple[str, ...]
) -> None:
    """`include` and `starting_after` of a stored response, and the pages of models, were dropped without a word."""
    theirs = {name for one in names for name in typing.get_type_hints(getattr(importlib.import_module(module), one))}
    operation = http.get("/openapi.json").json()["paths"][path]["get"]
    ours = {one["name"] for one in operation["parameters"]}
    assert theirs - ours - {"workspace_id"} == set()  # that one is sent as a header


def test_a_stored_response_is_read_with_what_is_included(server: ServerProcess, http: httpx.Client) -> None:
    client = server.openai()
    plain = client.responses.create(**SHORT)
    told = client.responses.create(**SHORT, include=[LOGPROBS])
    assert client.responses.retrieve(told.id, include=[LOGPROBS, ENCRYPTED]) == told
    assert told.output[0].content[0].logprobs
    for ask in (client.responses.retrieve, client.responses.input_items.list):
        with pytest.raises(
            openai.BadRequestError, match=r"include\[0\] is 'code_interpreter_call.outputs'; it must be"
        ):
            ask(plain.id, include=["code_interpreter_call.outputs"])
    with pytest.raises(openai.BadRequestError, match=r"which '.*' was written without") as caught:
        client.responses.retrieve(plain.id, include=[LOGPROBS])
    assert caught.value.param == "include"
    # curl's way to write a list
    assert http.get(f"/v1/responses/{plain.id}", params={"include": LOGPROBS}).status_code == 400
    assert client.responses.retrieve(plain.id, include=[ENCRYPTED]) == plain


def test_reasoning_is_encoded_for_those_who_ask_for_it_later(server: ServerProcess) -> None:
    client = server.openai()
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    question = {"role": "user", "content": "What is 3 + 4?"}
    grammar = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0, "max_output_tokens": 200}
    sealed = client.responses.create(
        model=MODEL, input=[question, thought, question], include=[ENCRYPTED], extra_body=grammar
    )
    plain = client.responses.create(model=MODEL, input=[question, thought, question], extra_body=grammar)
    (then,) = (item for item in sealed.output if item.type == "reasoning")
    (now,) = (item for item in plain.output if item.type == "reasoning")
    assert then.encrypted_content
    assert now.encrypted_content is None
    (later,) = (item for item in client.responses.retrieve(plain.id, include=[ENCRYPTED]).output[:1])
    assert later.encrypted_content == then.encrypted_content
    shown = {item.id: item for item in client.responses.input_items.list(plain.id, include=[ENCRYPTED])}
    assert shown["rs_1"].encrypted_content
    assert {item.id: item for item in client.responses.input_items.list(plain.id)}["rs_1"].encrypted_content is None


@pytest.mark.parametrize(
    "options",
    [{"stream": True}, {"starting_after": 0}, {"stream": True, "starting_after": 3}, {"include_obfuscation": True}],
)
def test_a_stored_response_is_no_stream(server: ServerProcess, options: dict[str, typing.Any]) -> None:
    client = server.openai()
    made = client.responses.create(**SHORT)
    with pytest.raises(openai.BadRequestError, match=f"{next(iter(options))} is of streams") as caught:
        client.responses.retrieve(made.id, **options)
    assert caught.value.param == next(iter(options))
    assert client.responses.retrieve(made.id, stream=False, include_obfuscation=False) == made


def test_models_come_in_pages_to_those_who_ask_for_them() -> None:
    from anthropic import Anthropic  # two seconds, of each process that collects the tests

    options = ("--served-model-name", "a", "--served-model-name", "b", "--served-model-name", "c")
    with ServerProcess(*options, "--kv-memory-bytes", "16777216") as process, process.client() as http:
        client = Anthropic(base_url=process.url, api_key="none", max_retries=0)
        assert [one.id for one in client.models.list(limit=1)] == ["a", "b", "c"], "the pages go on by themselves"
        assert [one.id for one in client.models.list(after_id="a").data] == ["b", "c"]
        last = client.models.list(before_id="c", limit=1)
        assert ([one.id for one in last.data], last.has_more) == (["b"], True)
        assert [one.id for one in client.models.list(lifecycle=["active"])] == ["a", "b", "c"]
        assert client.models.list(lifecycle=["retired", "deprecated"]).data == []
        assert [one.id for one in process.openai().models.list()] == ["a", "b", "c"]
        for wrong, param in (("after_id=d", "after_id"), ("limit=0", "limit"), ("lifecycle=new", "lifecycle[0]")):
            refused = http.get(f"/v1/models?{wrong}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), wrong


def test_pages_end_where_the_list_does() -> None:
    entries = [{"id": one} for one in "abc"]

    def ids(**options: typing.Any) -> tuple[str, bool]:
        made = page(
            entries,
            after=("after", options.pop("after", None)),
            before=("before", options.pop("before", None)),
            **options,
        )
        assert made["first_id"] == (made["data"][0]["id"] if made["data"] else None)
        return "".join(one["id"] for one in made["data"]), made["has_more"]

    assert ids(limit=None) == ("abc", False)
    assert ids(limit=2) == ("ab", True)
    assert ids(limit=2, after="a") == ("bc", False)
    assert ids(limit=2, after="c") == ("", False)
    assert ids(limit=1, before="c") == ("b", True)
    assert ids(limit=9, before="c") == ("ab", False)
    assert ids(limit=1, after="a", before="c") == ("b", False)
    assert ids(limit=1, after="c", before="a") == ("", False)


def test_what_no_route_reads_is_named(http: httpx.Client) -> None:
    """As unknown fields of bodies are, together with these."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "warmth": 1}
    for path in ("/v1/chat/completions", "/v1/messages", "/chat/completions", "/v1/chat/completions/input_tokens"):
        for stream in (False, True):
            answer = http.post(f"{path}?depth=3&depth=4&beta=true", json={**body, "stream": stream})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-diptych-ignored"] == "warmth, depth", path
    assert http.get("/v1/models?depth=3").headers["x-diptych-ignored"] == "depth"
    known = http.get("/v1/models?limit=3&lifecycle[]=active&lifecycle=retired")
    assert "x-diptych-ignored" not in known.headers
    assert NO_EFFECT.keys() == {"beta"}
