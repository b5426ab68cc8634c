"""Adapters over HTTP: chosen as a model, listed with their parent, loaded and unloaded while others run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from diptych.engine.load import bundled_dir
from diptych.ground.errors import RequestError
from diptych.server.http.errors import from_engine_error
from lora import ALL, write_adapter
from server_process import ServerProcess, check_account, events_of

LONG = "The history of the old town and its river. " * 8
ASK: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "poet": write_adapter(folder / "poet", bundled_dir(), ALL, seed=1),
        "clerk": write_adapter(folder / "clerk", bundled_dir(), {"q_proj": 8, "o_proj": 8}, seed=2, size=2.0),
    }


@pytest.fixture(scope="module")
def adapted(paths: dict[str, Path]) -> Iterator[ServerProcess]:
    options = (
        "--lora",
        f"poet={paths['poet']}",
        "--lora",
        f"clerk={paths['clerk']}",
        "--runtime-lora",
        "--max-loras",
        "3",
    )
    with ServerProcess(*options, "--max-queue-s", "0", "--kv-memory-bytes", "67108864") as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


@pytest.fixture
def http_(adapted: ServerProcess) -> Iterator[httpx.Client]:
    with adapted.client() as client:
        yield client


def complete(http: httpx.Client, model: str | None, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": LONG, **ASK, **({"model": model} if model else {}), **more})
    assert answer.status_code == 200, answer.text
    check_account(answer.json())
    return answer.json()


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def test_the_model_of_a_request_chooses_the_adapter(adapted: ServerProcess, http_: httpx.Client) -> None:
    """As in vLLM. The openai client sees the names, with the model as their parent, and its answers say who answered."""
    client = adapted.openai()
    listed = {one.id: one for one in client.models.list().data}
    assert list(listed) == ["diptych-10m", "poet", "clerk"]
    assert [listed[name].to_dict()["parent"] for name in listed] == [None, "diptych-10m", "diptych-10m"]
    assert client.models.retrieve("poet").to_dict()["root"].endswith("poet")
    answers = {
        name: client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Tell me of the town."}], max_tokens=12, temperature=0
        )
        for name in listed
    }
    assert [one.model for one in answers.values()] == list(listed)
    assert len({one.system_fingerprint for one in answers.values()}) == 3
    assert len({one.choices[0].message.content for one in answers.values()}) == 3
    with pytest.raises(openai.NotFoundError, match="poet"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "Hi"}])
    assert complete(http_, None)["model"] == "diptych-10m"


def test_all_protocols_give_the_adapter_s_answer(http_: httpx.Client) -> None:
    """One turn, four shapes."""
    message = [{"role": "user", "content": "Tell me of the town."}]
    chat = {"model": "poet", "messages": message, "max_tokens": 12, "temperature": 0.0}
    first = http_.post("/v1/chat/completions", json=chat).json()
    said = first["choices"][0]["message"]["content"]
    streamed = events_of(http_.post("/v1/chat/completions", json={**chat, "stream": True}).content)
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in streamed if one["choices"]) == said
    assert {one["model"] for one in streamed} == {"poet"}
    told = http_.post("/v1/messages", json=chat).json()
    assert (told["model"], told["content"][0]["text"]) == ("poet", said)
    made = http_.post(
        "/v1/responses", json={"model": "poet", "input": message, "max_output_tokens": 12, "temperature": 0.0}
    ).json()
    assert (made["model"], made["output"][0]["content"][0]["text"]) == ("poet", said)
    fingerprints = {one["system_fingerprint"] for one in (first, told, made)}
    assert len(fingerprints) == 1


def test_what_goes_on_without_a_model_is_answered_by_who_began(http_: httpx.Client, paths: dict[str, Path]) -> None:
    """The base model took a conversation over without a word; also where the adapter is gone, which is an error now."""

    def respond(status: int = 200, **body: Any) -> dict[str, Any]:
        answer = http_.post(
            "/v1/responses", json={"input": "Go on.", "max_output_tokens": 8, "temperature": 0.0, **body}
        )
        assert answer.status_code == status, answer.text
        return answer.json()

    load = {"lora_name": "guest", "lora_path": str(paths["poet"])}
    assert http_.post("/v1/load_lora_adapter", json=load).status_code == 200
    begun = {name: respond(model=name)["id"] for name in ("guest", "clerk", "diptych-10m")}
    for name, before in begun.items():
        named = respond(model=name, previous_response_id=before)
        left_out = respond(previous_response_id=before)
        third = respond(previous_response_id=left_out["id"])
        assert left_out["model"] == third["model"] == name
        assert left_out["system_fingerprint"] == named["system_fingerprint"]
        assert [one["content"] for one in left_out["output"]] == [one["content"] for one in named["output"]]
    assert respond(model="clerk", previous_response_id=begun["guest"])["model"] == "clerk"
    assert respond()["model"] == "diptych-10m"
    assert http_.post("/v1/unload_lora_adapter", json={"lora_name": "guest"}).status_code == 200
    gone = respond(404, previous_response_id=begun["guest"])["error"]
    assert (gone["code"], gone["param"]) == ("model_not_found", "model")
    assert "'guest'" in gone["message"]
    counted = {"input": "Go on.", "previous_response_id": begun["guest"]}
    assert http_.post("/v1/responses/input_tokens", json=counted).status_code == 404
    assert respond(400, previous_response_id="resp_none")["error"]["code"] == "previous_response_not_found"


def test_cached_prefixes_are_told_by_adapter(http_: httpx.Client) -> None:
    """What the cache holds of a text depends on who read it, also where a client asks before."""
    http_.post("/reset_prefix_cache")
    for name in ("poet", "clerk", None):
        assert complete(http_, name)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, name
        assert complete(http_, name)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, name
    http_.post("/reset_prefix_cache")
    body = {"messages": [{"role": "user", "content": LONG}]}
    http_.post("/v1/chat/completions", json={**body, "model": "poet", "max_tokens": 1})
    cached = [
        http_.post("/apply-template", json={**body, "model": name}).json()["cached_tokens"]
        for name in ("poet", "clerk")
    ]
    assert cached[0] > 0 == cached[1]


async def load_and_unload(url: str, path: Path, n: int) -> list[str]:
    """An adapter comes and goes while it is asked; answers of all requests that were taken."""
    said: list[str] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        for _ in range(n):
            loaded = await http.post("/v1/load_lora_adapter", json={"lora_name": "guest", "lora_path": str(path)})
            assert loaded.status_code == 200, loaded.text
            assert loaded.text == "Success: LoRA adapter 'guest' added successfully."
            body = {"prompt": LONG, "model": "guest", "stream": True, **ASK}
            async with http.stream("POST", "/v1/completions", json=body) as stream:
                gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "guest"})
                assert gone.status_code == 200, gone.text
                events = events_of(await stream.aread())
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            said.append("".join(one["choices"][0]["text"] for one in events))
            again = await http.post("/v1/completions", json={"prompt": "a", "model": "guest", **ASK})
            assert again.status_code == 404
    return said


def test_adapters_come_and_go_under_load(adapted: ServerProcess, http_: httpx.Client, paths: dict[str, Path]) -> None:
    """No answer is cut short or another's, and the memory is what it was."""
    wanted = {name: text(complete(http_, name)) for name in ("poet", "clerk", None)}
    before = adapted.metric("diptych_adapter_bytes")

    async def steady(name: str | None) -> None:
        async with httpx.AsyncClient(base_url=adapted.url, timeout=120) as http:
            for _ in range(5):
                body = {"prompt": LONG, **ASK, **({"model": name} if name else {})}
                assert text((await http.post("/v1/completions", json=body)).json()) == wanted[name]

    async def everyone() -> list[str]:
        said, *_ = await asyncio.gather(
            load_and_unload(adapted.url, paths["clerk"], 4), steady("poet"), steady("clerk"), steady(None)
        )
        return said

    assert asyncio.run(everyone()) == [wanted["clerk"]] * 4
    assert adapted.metric("diptych_adapter_bytes") == before
    assert adapted.metric("diptych_adapters") == 2
    adapted.check_balance()


def test_the_prompts_of_a_body_all_have_its_adapter(
    adapted: ServerProcess, http_: httpx.Client, paths: dict[str, Path]
) -> None:
    """They come to the engine one by one; an adapter that is unloaded between two of them answers the rest, too."""
    http_.post("/v1/load_lora_adapter", json={"lora_name": "guest", "lora_path": str(paths["clerk"])})
    body = {"model": "guest", "prompt": [f"{number} towns" for number in range(64)], "max_tokens": 1}
    before = adapted.metric("diptych_requests_taken_total")

    async def both() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=adapted.url, timeout=120) as http:
            answering = asyncio.ensure_future(http.post("/v1/completions", json=body))
            while (
                not answering.done()
                and await asyncio.to_thread(adapted.metric, "diptych_requests_taken_total") == before
            ):
                pass
            gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "guest"})
            return await answering, gone

    answer, gone = asyncio.run(both())
    assert (answer.status_code, gone.status_code) == (200, 200), answer.text
    assert len(answer.json()["choices"]) == 64


def test_an_adapter_that_goes_as_a_body_comes_is_one_that_is_not_there() -> None:
    """Whether the server sees it before it reads the prompt or behind."""
    told = from_engine_error(RequestError("the adapter 'poet' has been unloaded", param="adapter"))
    assert (told.status, told.param, told.code) == (404, "model", "model_not_found")


def refused(http: httpx.Client, route: str, body: dict[str, Any]) -> tuple[int, str]:
    answer = http.post(route, json=body)
    return answer.status_code, answer.json()["error"]["message"]


def test_what_cannot_be_loaded_is_refused_by_name(http_: httpx.Client, paths: dict[str, Path], tmp_path: Path) -> None:
    """A bad adapter is the client's fault, whatever is wrong with it; vLLM's statuses where it has them."""
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    poet = str(paths["poet"])

    def body(name: str, path: str = poet, **more: Any) -> dict[str, Any]:
        return {"lora_name": name, "lora_path": path, **more}

    assert refused(http_, load, body("poet")) == (400, refused(http_, load, body("poet"))[1])
    assert "already loaded" in refused(http_, load, body("poet"))[1]
    assert refused(http_, load, body("new", "/nowhere"))[0] == 404
    assert refused(http_, load, body("diptych-10m"))[0] == 400
    assert refused(http_, load, body("new", is_3d_lora_weight=True))[0] == 400
    assert refused(http_, unload, {"lora_name": "nobody"})[0] == 404
    bad = write_adapter(tmp_path / "bad", bundled_dir(), {"q_proj": 3}, use_dora=True)
    status, why = refused(http_, load, body("new", str(bad)))
    assert (status, "use_dora" in why) == (400, True)
    assert http_.post(load, json=body("poet", load_inplace=True)).status_code == 200
    assert http_.post(load, json=body("third")).status_code == 200
    status, why = refused(http_, load, body("fourth"))
    assert (status, "at most 3" in why) == (400, True)
    assert http_.post(unload, json={"lora_name": "third"}).status_code == 200
    assert [one["id"] for one in http_.get("/v1/models").json()["data"]] == ["diptych-10m", "clerk", "poet"]


def test_metrics_tell_whose_requests_run(adapted: ServerProcess) -> None:
    """vLLM's name and labels, which routers that choose by adapter read."""

    async def seen() -> str:
        async with httpx.AsyncClient(base_url=adapted.url, timeout=120) as http:
            body = {"prompt": LONG, "model": "clerk", "stream": True, **ASK, "max_tokens": 200}
            async with http.stream("POST", "/v1/completions", json=body) as stream:
                async for _ in stream.aiter_lines():
                    return (await http.get("/metrics")).text
        raise AssertionError

    line = next(line for line in asyncio.run(seen()).splitlines() if line.startswith("vllm:lora_requests_info"))
    assert 'running_lora_adapters="clerk"' in line
    assert 'waiting_lora_adapters=""' in line
    assert 'max_lora="3"' in line
    adapted.wait_idle()


def test_loading_at_run_time_is_off_unless_asked_for(http: httpx.Client, paths: dict[str, Path]) -> None:
    """Whoever may generate could read any folder of the machine."""
    for route, body in (
        ("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": str(paths["poet"])}),
        ("/v1/unload_lora_adapter", {"lora_name": "poet"}),
    ):
        status, why = refused(http, route, body)
        assert (status, "--runtime-lora" in why) == (403, True)
    assert json.loads(http.get("/v1/models").text)["data"][0]["parent"] is None
