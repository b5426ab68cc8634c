"""Every field that clients send is honoured, refused by name, or harmless; none is dropped without a word."""

import importlib
import json
import math
import re
import typing
from pathlib import Path

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from diptych.server import schema, tool_choice
from diptych.server.embeddings import body as embeddings_body
from diptych.server.embeddings.body import ClassifyBody, EmbeddingBody, RerankBody, ScoreBody
from diptych.server.http.bases import Body
from diptych.server.http.door import parse
from diptych.server.http.errors import ApiError
from diptych.server.http.fields import NO_EFFECT, OF_CHATS, OF_PROMPTS, REFUSED, Refusal, ignored_header
from diptych.server.messages import body as messages_body
from diptych.server.messages.body import MessagesBody
from diptych.server.reader import message_dicts
from diptych.server.responses import body as responses_body
from diptych.server.responses.body import ResponsesBody
from diptych.server.schema import ChatBody, CompletionBody
from diptych.server.text_bodies import TokenizeBody

DOCS = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
TEXT = {"prompt": "Hi", "max_tokens": 4, "temperature": 0}
# vLLM 2026: ChatCompletionRequest and CompletionRequest, and what newer ones took out but clients still send
VLLM = set(
    """use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
    add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs
    priority request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
    return_token_offsets return_prompt_text return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection stream_interval thinking_token_budget include_reasoning prompt_embeds logits_processors best_of
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag
    """.split()  # noqa: SIM905  (a list of one to a line would be a page)
)
# values that ask for something, where the first one below would not
ASKING = {
    "modalities": ["text", "audio"], "length_penalty": 2.0, "repeat_penalty": 1.3, "typical_p": 0.5,
    "routed_experts_prompt_start": 3, "skip_special_tokens": False, "include_reasoning": False, "function_call": {"name": "f"},
}  # fmt: skip


def fields_of(module: typing.Any, name: str) -> set[str]:
    return set(typing.get_type_hints(getattr(module, name)))


def test_every_field_of_openai_and_vllm_is_known() -> None:
    """`guided_json`, `functions`, `store` and others used to be taken as unknown, and the answer was another than asked for."""
    openai = fields_of(chat_create_params, "CompletionCreateParamsBase")
    openai |= fields_of(completion_create_params, "CompletionCreateParamsBase") | {"stream"}
    honoured = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    assert sorted((openai | VLLM) - honoured - REFUSED.keys() - NO_EFFECT.keys()) == []
    # user and metadata are validated, and then have no effect
    assert not honoured & REFUSED.keys()
    assert honoured & NO_EFFECT.keys() == {"user", "metadata"}
    assert not REFUSED.keys() & NO_EFFECT.keys()


def test_the_page_shows_every_field_in_its_table() -> None:
    """Who reads the page must not learn by trying."""
    page = DOCS.read_text()
    tables = page[page.index("| honoured |") : page.index("A field that stands in none")]
    honoured, refused, harmless = (
        {word for span in re.findall(r"`([^`]+)`", part) for word in span.split()}
        for part in re.split(r"\| refused \||\| no effect \|", tables)
    )
    assert sorted((set(ChatBody.model_fields) | set(CompletionBody.model_fields)) - honoured - harmless) == []
    assert sorted(REFUSED.keys() - refused) == []
    assert sorted(NO_EFFECT.keys() - harmless) == []


@pytest.mark.parametrize(
    ("heading", "body_type", "refused_here", "harmless_here"),
    [
        ("Responses", ResponsesBody, responses_body.REFUSED, responses_body.NO_EFFECT),
        ("Messages", MessagesBody, messages_body.REFUSED, messages_body.NO_EFFECT),
        *(
            ("Embeddings", one, embeddings_body.REFUSED, embeddings_body.NO_EFFECT)
            for one in (EmbeddingBody, RerankBody, ScoreBody, ClassifyBody)
        ),
    ],
)
def test_the_page_shows_every_field_of_a_protocol_in_its_table(
    heading: str, body_type: type, refused_here: dict, harmless_here: dict
) -> None:
    """What only the chat route knows stands in its own tables, to which these point."""
    page = DOCS.read_text()
    section = page[page.index(f"\n## {heading}\n") + 4 :]
    tables = section[section.index("| honoured |") : section.index("\n## ")]
    honoured, refused, harmless = (
        {word for span in re.findall(r"`([^`]+)`", part) for word in re.split(r"[ .]", span)}
        for part in re.split(r"\| refused \||\| no effect \|", tables)
    )
    assert sorted(set(body_type.model_fields) - honoured - refused - harmless) == []
    assert sorted(refused_here.keys() - REFUSED.keys() - refused) == []
    assert sorted(harmless_here.keys() - NO_EFFECT.keys() - harmless) == []


# what clients' types have within bodies, and what reads it here; hints where a prefix ends have no effect
CHATS, RESPONSES, MESSAGES = "openai.types.chat", "openai.types.responses", "anthropic.types"
WITHIN = [
    (CHATS, "ChatCompletionAssistantMessageParam", schema.Message),
    (CHATS, "ChatCompletionUserMessageParam", schema.Message),
    (CHATS, "ChatCompletionFunctionToolParam", schema.Tool),
    (CHATS, "ChatCompletionNamedToolChoiceParam", tool_choice.NamedToolChoice),
    (CHATS, "ChatCompletionAllowedToolChoiceParam", tool_choice.AllowedToolsOfChat),
    (CHATS, "ChatCompletionAllowedToolsParam", tool_choice.AllowedNames),
    (RESPONSES, "ToolChoiceFunctionParam", tool_choice.FunctionChoice),
    (RESPONSES, "ToolChoiceAllowedParam", tool_choice.AllowedTools),
    ("openai.types.shared_params", "FunctionDefinition", schema.FunctionSpec),
    (RESPONSES, "FunctionToolParam", responses_body.FunctionTool),
    (RESPONSES, "ResponseFunctionToolCallParam", responses_body.FunctionCallItem),
    (f"{RESPONSES}.response_input_item_param", "FunctionCallOutput", responses_body.FunctionCallOutputItem),
    (RESPONSES, "ResponseReasoningItemParam", responses_body.ReasoningItem),
    (RESPONSES, "ResponseOutputMessageParam", responses_body.MessageItem),
    (RESPONSES, "ResponseTextConfigParam", responses_body.TextParam),
    ("openai.types.shared_params", "Reasoning", responses_body.ReasoningParam),
    (MESSAGES, "ToolUseBlockParam", messages_body.ToolUseBlock),
    (MESSAGES, "ToolResultBlockParam", messages_body.ToolResultBlock),
    (MESSAGES, "TextBlockParam", messages_body.TextBlock),
    (MESSAGES, "ThinkingBlockParam", messages_body.ThinkingBlock),
    (MESSAGES, "ToolParam", messages_body.ToolParam),
    (MESSAGES, "OutputConfigParam", messages_body.OutputConfig),
    (MESSAGES, "ThinkingConfigEnabledParam", messages_body.ThinkingParam),
    (MESSAGES, "ToolChoiceToolParam", messages_body.ToolChoice),
    (f"{MESSAGES}.beta", "BetaOutputConfigParam", messages_body.OutputConfig),
    (f"{MESSAGES}.beta", "BetaThinkingConfigEnabledParam", messages_body.ThinkingParam),
    (f"{MESSAGES}.beta", "BetaThinkingConfigAdaptiveParam", messages_body.ThinkingParam),
    *(
        (f"{MESSAGES}.beta", f"Beta{role}MessageParam", messages_body.MessageParam)
        for role in ("User", "Assistant", "System")
    ),
    (f"{MESSAGES}.beta", "BetaToolParam", messages_body.ToolParam),
]


@pytest.mark.parametrize(("module", "name", "ours"), WITHIN)
def test_every_field_within_a_body_is_known(module: str, name: str, ours: type[Body]) -> None:
    """`refusal` of a message, `defer_loading` of a tool and others were dropped without a word."""
    known = {field.alias or name for name, field in ours.model_fields.items()}
    assert sorted(fields_of(importlib.import_module(module), name) - known) == []


ASK, CALL = {"role": "user", "content": "Hi"}, {"call_id": "1", "type": "function_call", "name": "f", "arguments": "{}"}
MESSAGE = {"max_tokens": 1, "messages": [ASK]}
ALLOWED = "tool_choice.allowed_tools"
NOT_A_FUNCTION = {"allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "f"}}]}}
F = {"type": "function", "function": {"name": "f"}}
NO_TOOL, NO_MODE = {"allowed_tools": {"mode": "auto", "tools": []}}, {"allowed_tools": {"mode": "none", "tools": [F]}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
FUNCTION = {"type": "function", "name": "f", "parameters": {}}
SPACE = {"type": "namespace", "name": "n.m", "description": "for all", "tools": [FUNCTION]}
MANY = {**SPACE, "name": "m", "tools": [{**FUNCTION, "name": f"f{i}"} for i in range(65)]}
CLEAR, TURNS = {"type": "clear_thinking_20251015"}, {"type": "thinking_turns", "value": 1}


@pytest.mark.parametrize(
    ("body_type", "fields", "param"),
    [
        (ChatBody, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        (ChatBody, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        (ChatBody, {**CHAT, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        (ChatBody, {**CHAT, "tool_choice": {"type": "allowed_tools", **NOT_A_FUNCTION}}, f"{ALLOWED}.tools[0].type"),
        (ChatBody, {**CHAT, "tool_choice": {"type": "allowed_tools", **NO_TOOL}}, f"{ALLOWED}.tools"),
        (ChatBody, {**CHAT, "tool_choice": {"type": "allowed_tools", **NO_MODE}}, f"{ALLOWED}.mode"),
        (ChatBody, {**CHAT, "tool_choice": "any"}, "tool_choice"),
        (ResponsesBody, {"input": "Hi", "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        (ResponsesBody, {"input": "Hi", "tool_choice": 1}, "tool_choice"),
        (ResponsesBody, {"input": "Hi", "tools": [{**FUNCTION, "async": True}]}, "tools[0].async"),
        (ResponsesBody, {"input": "Hi", "tools": [{**FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading"),
        (ResponsesBody, {"input": "Hi", "tools": [{**FUNCTION, "output_schema": {}}]}, "tools[0].output_schema"),
        (ResponsesBody, {"input": "Hi", "tools": [{**FUNCTION, "parameters": {"x": math.nan}}]}, "tools[0].parameters"),
        (ResponsesBody, {"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0]"),
        (ResponsesBody, {"input": "Hi", "tools": [SPACE, SPACE]}, "tools"),
        (ResponsesBody, {"input": "Hi", "tools": [{**SPACE, "tools": [{"type": "custom"}]}]}, "tools[0].tools[0]"),
        (ResponsesBody, {"input": "Hi", "tools": [{**SPACE, "tools": []}]}, "tools[0].tools"),
        (ResponsesBody, {"input": "Hi", "tools": [MANY, {**MANY, "name": "n"}]}, "tools"),
        (
            ResponsesBody,
            {"input": "Hi", "tools": [SPACE], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice",
        ),
        (ResponsesBody, {"input": "Hi", "reasoning": {"mode": "pro"}}, "reasoning.mode"),
        (ResponsesBody, {"input": "Hi", "reasoning": {"context": "all_turns"}}, "reasoning.context"),
        (ResponsesBody, {"input": "Hi", "prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        (MessagesBody, {**MESSAGE, "output_config": {"task_budget": {"total": 9}}}, "output_config.task_budget"),
        (
            MessagesBody,
            {**MESSAGE, "thinking": {"type": "adaptive", "block_binding": {"a": 1}}},
            "thinking.block_binding",
        ),
        (MessagesBody, {**MESSAGE, "context_management": {"edits": [CLEAR]}}, "context_management"),
        (MessagesBody, {**MESSAGE, "context_management": {"edits": [{**CLEAR, "keep": TURNS}]}}, "context_management"),
        (
            MessagesBody,
            {"max_tokens": 1, "messages": [{**ASK, "clear_at": "next_user_message"}]},
            "messages[0].clear_at",
        ),
        (
            MessagesBody,
            {"max_tokens": 1, "messages": [{**ASK, "output_config": {"effort": "low"}}]},
            "messages[0].output_config",
        ),
        (
            MessagesBody,
            {"max_tokens": 1, "messages": [{"role": "assistant", "content": [{**USE, "caller": {"type": "code"}}]}]},
            "messages[0].content[0].caller.type",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_asked_for_within_a_body_is_refused_by_name(body_type: type, fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(json.dumps(fields).encode(), body_type)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)


def test_values_within_a_body_that_ask_for_nothing_are_taken() -> None:
    """As clients send back what they got, every field of it."""
    reply = {
        "role": "assistant",
        "content": "No",
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
    }
    parse(json.dumps({"messages": [ASK, reply]}).encode(), ChatBody)
    tool = {**FUNCTION, "async": False, "defer_loading": False, "allowed_callers": ["direct"], "output_schema": None}
    call = {**CALL, "async": False, "caller": {"type": "direct"}, "namespace": None}
    body = parse(json.dumps({"input": [ASK, call], "tools": [tool]}).encode(), ResponsesBody)
    assert body.tools[0].model_dump(exclude_none=True) == FUNCTION
    assert "async_" not in body.input[1].model_dump()
    for keep in ("all", {"type": "all"}):  # as Claude Code asks
        asked = {"context_management": {"edits": [{**CLEAR, "keep": keep}]}}
        assert "context_management" not in parse(json.dumps(MESSAGE | asked).encode(), MessagesBody).ignored_fields


def test_a_refusal_of_before_is_shown_to_the_model() -> None:
    reply = schema.Message(role="assistant", refusal="I would rather not.")
    assert message_dicts([reply]) == [{"role": "assistant", "content": "I would rather not."}]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("body_type", "body"), [(ChatBody, CHAT), (CompletionBody, TEXT)])
def test_refused_by_name_with_the_reason(name: str, body_type: type, body: dict) -> None:
    with pytest.raises(ApiError) as caught:
        parse(httpx.Request("POST", "http://x", json={**body, name: ASKING.get(name, True)}).content, body_type)
    assert caught.value.status == 400
    assert caught.value.param == name
    assert caught.value.message == f"{name} is not supported: {REFUSED[name].why}"


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_asks_for_nothing_is_taken(name: str) -> None:
    """Clients send every field of their form, with its default."""
    for value in (None, *REFUSED[name].harmless):
        parse(httpx.Request("POST", "http://x", json={**CHAT, name: value}).content, ChatBody)


@pytest.mark.parametrize(
    ("body_type", "body", "other", "elsewhere"),
    [(CompletionBody, TEXT, ChatBody, OF_CHATS), (ChatBody, CHAT, CompletionBody, OF_PROMPTS)],
)
def test_what_one_route_honours_the_other_refuses(
    body_type: type, body: dict, other: type, elsewhere: dict[str, Refusal]
) -> None:
    """Tools sent to /v1/completions, and best_of sent to a chat, were taken for unknown and dropped."""
    assert set(other.model_fields) - set(body_type.model_fields) == elsewhere.keys()
    for name, refusal in elsewhere.items():
        for value in (None, *refusal.harmless):
            parse(httpx.Request("POST", "http://x", json={**body, name: value}).content, body_type)
        with pytest.raises(ApiError, match=f"{name} is not supported") as caught:
            parse(httpx.Request("POST", "http://x", json={**body, name: "x"}).content, body_type)
        assert caught.value.param == name


def test_both_names_of_the_limit_hold_on_both_routes(http: httpx.Client) -> None:
    """/v1/completions dropped max_completion_tokens, and wrote 16 tokens."""
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        for older, newer in ((None, 2), (3, 2), (2, 3)):  # of both the smaller
            fields = {"max_tokens": older, "max_completion_tokens": newer}
            answer = http.post(path, json={**body, "ignore_eos": True, **fields})
            assert answer.json()["usage"]["completion_tokens"] == 2, answer.text
        refused = http.post(path, json={**body, "best_of": 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template"])
def test_documents_that_the_template_would_drop_are_refused(http: httpx.Client, path: str) -> None:
    """The bundled model's template prints none, so the answer came from a prompt without them."""
    answer = http.post(path, json={"messages": CHAT["messages"], "documents": [{"text": "The sky is green."}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "documents"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"])
def test_the_requests_own_fields_are_no_template_variables(http: httpx.Client, name: str) -> None:
    """As chat_template_kwargs they were overwritten without a word."""
    answer = http.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": {name: False}})
    assert answer.status_code == 400
    assert f"chat_template_kwargs has '{name}'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_harmless_field_changes_nothing(http: httpx.Client, name: str) -> None:
    """Said to have no effect, so the answer is the same and nothing is called ignored."""
    value = {"k": "v"} if name == "metadata" else "x"
    plain, with_field = (
        http.post("/v1/completions", json=TEXT),
        http.post("/v1/completions", json={**TEXT, name: value}),
    )
    assert with_field.status_code == 200, with_field.text
    assert with_field.json()["choices"] == plain.json()["choices"]
    assert "x-diptych-ignored" not in with_field.headers


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_field_is_named_in_the_answer(http: httpx.Client, stream: bool) -> None:
    """A field that nobody knows used to vanish without a trace."""
    answer = http.post("/v1/chat/completions", json={**CHAT, "warmth": 2, "é": 1, "stream": stream})
    assert answer.status_code == 200
    assert answer.headers["x-diptych-ignored"] == "warmth, \\xe9"


def test_the_header_is_bounded_and_one_line() -> None:
    """Names come from the client."""
    made = ignored_header(("a\r\nset-cookie: b", "x" * 10_000, "c"))["x-diptych-ignored"]
    assert len(made) <= 512
    assert made.startswith("xxx")


CONSTRAINED = [
    (
        {"guided_json": {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}},
        r"\{\s*\"a\"\s*:\s*7\s*\}",
    ),
    ({"guided_json": '{"enum": [17]}'}, "17"),
    ({"guided_regex": "[0-9]{3}!"}, "[0-9]{3}!"),
    ({"guided_choice": ["maybe"]}, "maybe"),
    ({"guided_grammar": 'root ::= "x" [0-9] "."'}, r"x[0-9]\."),
    ({"grammar": 'root ::= ("ab" | "cd") "!"'}, "(ab|cd)!"),
    ({"json_schema": {"enum": [[1, 2]]}}, r"\[\s*1\s*,\s*2\s*\]"),
    ({"response_format": {"type": "json_object", "schema": {"enum": [True]}}}, "true"),
    ({"response_format": {"type": "json_schema", "schema": {"enum": [None]}}}, "null"),
    ({"structured_outputs": {"regex": "z{4}", "disable_additional_properties": True}}, "z{4}"),
]


@pytest.mark.parametrize(("constraint", "pattern"), CONSTRAINED, ids=lambda value: str(value)[:40])
def test_every_form_of_a_constraint_holds(http: httpx.Client, constraint: dict, pattern: str) -> None:
    """All but structured_outputs and OpenAI's own forms used to be dropped without a word."""
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        answer = http.post(path, json={**body, **constraint, "max_tokens": 64})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(pattern, text), text
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"reasoning_effort": "medium", "verbosity": "high"}, "verbosity"),
        ({"echo": True}, "echo"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}}}], "tool_choice": "required"},
         "tools"),
    ],
)  # fmt: skip
def test_what_cannot_hold_is_refused_with_its_field(http: httpx.Client, fields: dict, param: str) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_reasoning_effort_switches_thinking(http: httpx.Client) -> None:
    """The bundled model's template knows enable_thinking and no levels; the field used to be dropped."""

    def prompt(effort: str | None) -> int:
        return http.post("/v1/chat/completions", json={**CHAT, "reasoning_effort": effort}).json()["usage"][
            "prompt_tokens"
        ]

    assert prompt("none") == prompt(None)
    assert prompt("high") < prompt("none"), "without the empty thought that switches thinking off"


def test_running_usage_counts_up(http: httpx.Client) -> None:
    """vLLM's continuous_usage_stats, which load generators ask for."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        raw = http.post(path, json={**body, "ignore_eos": True, "stream": True, "stream_options": options}).text
        chunks = [
            httpx.Response(200, content=line[6:]).json() for line in raw.split("\n\n") if line.startswith("data: {")
        ]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[path.startswith("/v1/chat")] == 1, "behind the role, which a chat begins with"
        assert counts[-1] == 4
        assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([5, 6, -1], "prompt has -1 at place 2; token ids are whole numbers between 0 and 2147483647"),
        ([5, True], "prompt has True at place 1; token ids are"),
        ([2**40], "prompt has 1099511627776 at place 0; token ids are"),
        ([7] * 70 + [1.5], "prompt has 1.5 at place 70; token ids are"),
        (["a", [5, "b"]], "prompt entry 1 has 'b' at place 1; token ids are"),
        (["a", []], "prompt entry 1 is []; it must be a string or a non-empty list of token ids"),
        ([{"a": 1}], "prompt entry 0 is {'a': 1}; it must be a string or a non-empty list of token ids"),
    ],
)
def test_a_prompt_of_wrong_ids_is_told_which(http: httpx.Client, prompt: list, said: str) -> None:
    """Of [5, 6, -1] entry 0 was to be "a string or a non-empty list of token ids"."""
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


def test_the_routes_of_texts_make_the_prompt_that_a_chat_has(http: httpx.Client) -> None:
    """They dropped `tool_choice`, `reasoning_effort` and `chat_template` without a word, and showed another prompt."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("get_time", "get_weather")]
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    for asked in (
        {},
        {"tools": tools},
        {"tools": tools, "tool_choice": "none"},
        {"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": some}},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none", "verbosity": "medium"},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ):
        chat = http.post("/v1/chat/completions", json={**CHAT, **asked, "return_token_ids": True}).json()
        for path in ("/tokenize", "/apply-template"):
            shown = http.post(path, json={"messages": CHAT["messages"], **asked})
            assert shown.json()["tokens"] == chat["prompt_token_ids"], (path, asked)
    for path in ("/tokenize", "/apply-template"):
        for name, value in (
            ("chat_template", "x"), ("mm_processor_kwargs", {"a": 1}), ("verbosity", "low"), ("tool_choice", "required"),
        ):  # fmt: skip
            refused = http.post(path, json={"messages": CHAT["messages"], name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), path
        told = http.post(path, json={"messages": CHAT["messages"], "warmth": 1, "max_tokens": 3, "user": "a"})
        assert told.headers["x-diptych-ignored"] == "warmth, max_tokens"
    assert http.post("/detokenize", json={"tokens": [1], "warmth": 1}).headers["x-diptych-ignored"] == "warmth"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"content": "a", "chat_template_kwargs": {"b": 1}}, "chat_template_kwargs"),
        ({**CHAT, "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_what_a_text_or_a_chat_alone_has_is_refused_with_the_other(fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(json.dumps(fields).encode(), TokenizeBody)
    assert caught.value.param == param
