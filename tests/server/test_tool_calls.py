"""Tool calls as the `openai` client sees them: every tool_choice, whole and streamed, in the formats of several models."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionAllowedToolChoiceParam
from openai.types.chat.chat_completion import Choice

from diptych.engine.load import bundled_dir
from diptych.engine.text.call_form import KEY, KIND, NAME, CallForm, Style
from diptych.engine.text.template import ChatTemplate
from diptych.engine.text.tokenizer import Tokenizer
from diptych.server.http.door import Workers
from diptych.server.reader import Reader
from engine.text import templates
from server_process import ServerProcess, check_account

TEMPLATE_FILES = Path(__file__).parent.parent / "data" / "templates"


def tool(name: str, **properties: object) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    tool("get_time", city={"enum": ["Rome", "Oslo"]}),
    tool(
        "note",
        text={"type": "string", "maxLength": 24},
        tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    ),
]
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "What time is it in Rome?"}],
    "tools": TOOLS,
    "max_tokens": 150,
    "temperature": 0,
}


def with_template(folder: Path, template: str) -> Path:
    """The bundled model under another model's chat template."""
    shutil.copytree(bundled_dir(), folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@dataclass(frozen=True)
class Served:
    """A server and the way its model writes calls."""

    client: OpenAI
    form: CallForm

    def writes(self, *calls: tuple[str, str], before: str = "") -> dict[str, object]:
        """The constraint that makes the model write exactly these calls (name, arguments), as if it had chosen to."""
        form = self.form
        texts = [
            f"{form.head.replace(NAME, name)}{self._arguments(arguments)}{form.close}" for name, arguments in calls
        ]
        written = before + form.begin + form.separator.join(texts) + form.end
        parts = [part if part in TAGS else json.dumps(part) for part in re.split("(</?tool_call>)", written) if part]
        return {"structured_outputs": {"grammar": "start: " + " ".join(parts)}}

    def _arguments(self, arguments: str) -> str:
        if self.form.style is not Style.TAGGED:
            return arguments
        values = [
            (key, value if isinstance(value, str) else json.dumps(value))
            for key, value in json.loads(arguments).items()
        ]
        key_close = self.form.key_close.replace(KIND, "string")
        ends = self.form.value_close.replace(KEY, "")
        return "".join(f"{self.form.key_open}{key}{key_close}{value}{ends}" for key, value in values)

    def read(self, arguments: str) -> str:
        """What a client gets for arguments that were written so: to the letter where the model writes JSON."""
        if self.form.style is not Style.TAGGED:
            return arguments
        return json.dumps(json.loads(arguments), ensure_ascii=False)


TAGS = ("<tool_call>", "</tool_call>")
TEMPLATES = {
    "hermes": None,
    "llama3": templates.LLAMA3,
    "mistral_named": templates.MISTRAL_NAMED,
    "tagged": (TEMPLATE_FILES / "Qwen3-Coder.jinja").read_text(),
}


@pytest.fixture(scope="module", params=list(TEMPLATES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = bundled_dir()
    template = TEMPLATES[request.param]
    if template is not None:
        folder = with_template(tmp_path_factory.mktemp("models") / request.param, template)
    form = ChatTemplate.from_dir(folder).dialect.form
    with ServerProcess(str(folder), "--served-model-name", "m", "--kv-memory-bytes", "33554432") as process:
        yield Served(process.openai(), form)
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


def whole(served: Served, **options: Any) -> Choice:
    return served.client.chat.completions.create(**{**ASK, **options}).choices[0]


def streamed(served: Served, **options: Any) -> tuple[str, list[tuple[str, str]], str | None, int]:
    """(content, calls, finish_reason, fragments of arguments), the shape of every delta checked on the way."""
    content, calls, reason, n_fragments = "", [], None, 0
    for chunk in served.client.chat.completions.create(**{**ASK, **options}, stream=True):
        (choice,) = chunk.choices
        assert reason is None, "something came behind the finish_reason"
        reason = choice.finish_reason
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                assert part.id
                assert part.type == "function"
                assert part.function.arguments == ""
                calls.append([part.function.name, ""])
            else:
                assert (part.id, part.type, part.function.name) == (None, None, None)
                assert part.index == len(calls) - 1
                n_fragments += 1
            calls[part.index][1] += part.function.arguments
    return content, [tuple(call) for call in calls], reason, n_fragments


def calls_of(choice: Choice) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


NOTE = '{"text": "a \\"b\\" {é} </tool_call>, and so on", "tags": ["a", "b"]}'


def test_auto_streams_the_arguments_as_they_are_written(served: Served) -> None:
    """They used to come as one piece at the end; a client that shows them sees nothing for seconds."""
    options = {"tool_choice": "auto", "extra_body": served.writes(("note", NOTE))}
    choice = whole(served, **options)
    note = served.read(NOTE)
    assert calls_of(choice) == [("note", note)]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    content, calls, reason, n_fragments = streamed(served, **options)
    assert (content, calls, reason) == ("", [("note", note)], "tool_calls")
    assert n_fragments > 10


def test_several_calls_and_text_before_them(served: Served) -> None:
    before = "" if not served.form.trigger else "Let me look."
    written = served.writes(("get_time", '{"city": "Rome"}'), ("note", '{"text":"x","tags":[]}'), before=before)
    choice = whole(served, extra_body=written)
    assert calls_of(choice) == [
        ("get_time", served.read('{"city": "Rome"}')),
        ("note", served.read('{"text":"x","tags":[]}')),
    ]
    assert (choice.message.content or "") == before
    assert len({call.id for call in choice.message.tool_calls or ()}) == 2
    assert streamed(served, extra_body=written)[:3] == (before, calls_of(choice), "tool_calls")


def test_arguments_cut_off_by_max_tokens_are_what_was_written(served: Served) -> None:
    """OpenAI's behaviour: the call is there, its arguments end where the output did, and the reason says length."""
    options = {"extra_body": served.writes(("note", NOTE)), "max_tokens": 30}
    choice = whole(served, **options)
    ((name, arguments),) = calls_of(choice)
    assert (name, choice.finish_reason) == ("note", "length")
    assert served.read(NOTE).startswith(arguments)
    assert 0 < len(arguments) < len(NOTE)
    assert streamed(served, **options)[:3] == ("", [(name, arguments)], "length")


def test_none_leaves_a_call_as_text(served: Served) -> None:
    """The tools are not shown to the model, and what looks like a call is no call."""
    options = {"tool_choice": "none", "extra_body": served.writes(("get_time", '{"city": "Rome"}'))}
    choice = whole(served, **options)
    assert choice.message.tool_calls is None
    assert "get_time" in (choice.message.content or "")
    content, calls, reason, _ = streamed(served, **options)
    assert (content, calls, reason) == (choice.message.content, [], "stop")
    with_tools = served.client.chat.completions.create(**ASK).usage
    without = served.client.chat.completions.create(**{**ASK, "tool_choice": "none"}).usage
    assert with_tools is not None
    assert without is not None
    assert without.prompt_tokens < with_tools.prompt_tokens


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_required_is_a_valid_call_of_some_tool(served: Served, is_parallel: bool, seed: int) -> None:
    """Drawn hot, so that the model alone would not; `max_tokens` may still cut the last of several."""
    options = {"tool_choice": "required", "parallel_tool_calls": is_parallel, "temperature": 1.0, "seed": seed}
    choice = whole(served, **options, max_tokens=600)
    calls = calls_of(choice)
    assert calls
    assert is_parallel or len(calls) == 1
    for name, arguments in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
        schema = next(one["function"]["parameters"] for one in TOOLS if one["function"]["name"] == name)
        jsonschema_rs.validate(schema, json.loads(arguments))
    assert streamed(served, **options, max_tokens=600)[:3] == ("", calls, choice.finish_reason)


@pytest.mark.parametrize("name", ["get_time", "note"])
def test_named_is_that_tool_once(served: Served, name: str) -> None:
    options = {"tool_choice": {"type": "function", "function": {"name": name}}, "temperature": 1.0, "seed": 4}
    choice = whole(served, **options)
    assert [called for called, _ in calls_of(choice)] == [name]
    assert choice.finish_reason == "tool_calls"
    assert streamed(served, **options)[:3] == ("", calls_of(choice), "tool_calls")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_the_model_is_shown_no_others(served: Served, mode: Literal["auto", "required"]) -> None:
    """Which was refused, while /v1/responses took its own form of it."""
    name = TOOLS[1]["function"]["name"]
    choice: ChatCompletionAllowedToolChoiceParam = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]},
    }
    options = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 1.0, "seed": 4}
    alone = {"tools": [TOOLS[1]], "tool_choice": mode, "parallel_tool_calls": False, "temperature": 1.0, "seed": 4}
    some, only = whole(served, **options), whole(served, **alone)
    assert (some.message.content, calls_of(some), some.finish_reason) == (
        only.message.content, calls_of(only), only.finish_reason,
    )  # fmt: skip
    assert mode == "auto" or [called for called, _ in calls_of(some)] == [name]
    assert streamed(served, **options)[:3] == (some.message.content or "", calls_of(some), some.finish_reason)
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "nobody"}}]
    with pytest.raises(BadRequestError, match="tool_choice names 'nobody'; it must be one of the tools"):
        whole(served, **options)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_beside_a_form_of_the_answer_calls_are_still_made_and_read(served: Served, seed: int) -> None:
    """An answer in JSON is no call, also where calls are JSON, and a call is no answer."""
    form = {
        "type": "json_schema",
        "json_schema": {"name": "sum", "schema": tool("sum", sum={"enum": [7]})["function"]["parameters"]},
    }
    options = {"response_format": form, "parallel_tool_calls": False, "temperature": 1.0, "seed": seed}
    choice = whole(served, **options)
    for name, arguments in calls_of(choice):
        schema = next(one["function"]["parameters"] for one in TOOLS if one["function"]["name"] == name)
        jsonschema_rs.validate(schema, json.loads(arguments))
    assert bool(calls_of(choice)) != (json.loads(choice.message.content or "0") == {"sum": 7})
    assert streamed(served, **options)[:3] == (choice.message.content or "", calls_of(choice), choice.finish_reason)
    answer = whole(served, **options, tool_choice="none")
    assert json.loads(answer.message.content or "0") == {"sum": 7}


def test_a_conversation_goes_on_behind_a_call(served: Served) -> None:
    """What the client got is what it sends back."""
    choice = whole(served, tool_choice="required", parallel_tool_calls=False)
    (call,) = choice.message.tool_calls or ()
    history = [
        *ASK["messages"],
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "12:00"},
    ]
    after = whole(served, messages=history, max_tokens=5, tool_choice="auto")
    assert after.finish_reason in ("length", "stop")


def test_the_account_counts_every_token_of_a_call(served: Served) -> None:
    answer = served.client.chat.completions.with_raw_response.create(
        **ASK, tool_choice="required", extra_body={"return_token_ids": True}
    )
    body = json.loads(answer.content)
    check_account(body)
    assert len(body["choices"][0]["token_ids"]) == body["usage"]["completion_tokens"]


def test_the_log_says_how_calls_are_written_or_that_nobody_knows(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A form that was assumed used to lose every call of a model without a word."""
    silent = templates.CHATML.replace("message.tool_calls or []", "[]")
    for number, (template, level, said) in enumerate(
        [(templates.CHATML, "INFO", "writes tool calls as"), (silent, "WARNING", "the template prints no calls")]
    ):
        caplog.clear()
        folder = with_template(tmp_path / str(number), template)
        with caplog.at_level("INFO", logger="diptych.server"):
            Reader(
                Tokenizer.from_dir(folder), ChatTemplate.from_dir(folder), Workers(), reads_control_tokens=False
            )  # fmt: skip
        (record,) = caplog.records
        assert record.levelname == level
        assert said in record.getMessage()
        assert "<tool_call>" in record.getMessage()


def test_strict_tools_bind_the_calls_that_auto_makes(served: Served) -> None:
    """`strict` had no effect unless a call was forced: drawn hot, a call that auto began broke its schema."""
    begin = Tokenizer.from_dir(bundled_dir()).token_id(served.form.trigger)
    if begin is None:
        pytest.skip("this model's calls begin with plain text, which strict does not bind")
    strict = [{"type": "function", "function": {**one["function"], "strict": True}} for one in TOOLS]
    options: dict[str, Any] = {
        "tool_choice": "auto",
        "temperature": 2.0,
        "parallel_tool_calls": False,
        "max_tokens": 300,
    }
    for seed in range(3):
        # the model is led to begin a call, and to nothing behind that
        choice = whole(served, **options, seed=seed, tools=strict, logit_bias={str(begin): 100})
        assert choice.finish_reason == "tool_calls"
        ((name, arguments),) = calls_of(choice)
        schema = next(one["function"]["parameters"] for one in TOOLS if one["function"]["name"] == name)
        jsonschema_rs.validate(schema, json.loads(arguments))
    free = whole(served, **options, seed=1, tools=strict, logit_bias={str(begin): -100})
    assert not free.message.tool_calls
    assert free.message.content, "text is as free as ever"
