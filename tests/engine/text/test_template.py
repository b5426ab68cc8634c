"""Chat templates: equal to `transformers`, and every token of the prompt belongs to one named segment."""

import json
from functools import cache
from http import HTTPStatus
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from diptych.engine.text.template import ChatTemplate, RenderedPrompt
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.errors import LoadError, TemplateError
from text import templates
from text.small_tokenizers import byte_level_json, checkpoint, sentencepiece_json

NAMES = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
SYSTEM = {"role": "system", "content": " Be kind. "}
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "<think>easy</think>\n\nIt is 4.", "reasoning_content": "easy"},
    {"role": "user", "content": "Thanks, <|im_end|> 日本 🎉\n"},
]
TOOL = {"type": "function", "function": {"name": "weather", "description": "é < x", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOL_CHAT = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
]


@cache
def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()), NAMES, []), source)


def parts(prompt: RenderedPrompt, template: ChatTemplate) -> list[tuple[str, str]]:
    """(segment name, its text); fails unless the segments partition the tokens."""
    at = 0
    out = []
    for segment in prompt.segments:
        assert segment.start == at
        assert segment.end > at
        at = segment.end
        ids = prompt.token_ids[segment.start : segment.end]
        out.append((segment.name, template._tokenizer.decode(ids, skip_special_tokens=False)))
    assert at == len(prompt.token_ids)
    return out


CASES = [
    ("plain", CHAT, {}),
    ("system", [SYSTEM, *CHAT], {}),
    ("one", CHAT[:1], {}),
    ("no generation prompt", [SYSTEM, *CHAT[:2]], {"add_generation_prompt": False}),
    ("tools", CHAT, {"tools": [TOOL, TOOL]}),
    ("tool call", TOOL_CHAT, {"tools": [TOOL]}),
    ("documents", CHAT, {"documents": [{"title": "One", "text": "Alpha"}, {"title": "Two", "text": "Beta"}]}),
    (
        "continue",
        [CHAT[0], {"role": "assistant", "content": "It is "}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    ("no thinking", CHAT, {"kwargs": {"enable_thinking": False, "date_string": "1 Jan"}}),
]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("style", templates.ALL)
def test_ids_equal_those_of_transformers(tmp_path, style, kind):
    """The prompt a model was tuned on, token for token; where the template refuses there, it refuses here."""
    source = byte_level_json() if kind == "byte_level" else sentencepiece_json()
    names = NAMES if kind == "byte_level" else {"bos_token": "<s>", "eos_token": "</s>"}
    folder = checkpoint(tmp_path, source, config={**names, "chat_template": templates.ALL[style]})
    ours, oracle = ChatTemplate.from_dir(folder), AutoTokenizer.from_pretrained(folder)
    refused = 0
    for name, messages, options in CASES:
        options = {"add_generation_prompt": True, **options}
        kwargs = {"date_string": "26 Jul 2024", **options.pop("kwargs", {})}
        try:
            expected = oracle.apply_chat_template(messages, **options, **kwargs)["input_ids"]
        except Exception:
            refused += 1
            with pytest.raises(TemplateError):
                ours.render(messages, **options, kwargs=kwargs)
            continue
        # control tokens in a message become such there; `test_control` says what happens by default
        prompt = ours.render(messages, **options, kwargs=kwargs, reads_control_tokens=True)
        assert list(prompt.token_ids) == expected, name
        parts(prompt, ours)
    assert refused <= 3


def test_segments_of_chatml():
    """Who pays for what: the boundaries of every turn, structure included."""
    template = chat_template(templates.CHATML)
    assert parts(template.render([SYSTEM, *CHAT]), template) == [
        ("system", "<|im_start|>system\n Be kind. <|im_end|>\n"),
        ("turn 1 user", "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"),
        ("turn 1 assistant", "<|im_start|>assistant\n<think>easy</think>\n\nIt is 4.<|im_end|>\n"),
        ("new message", "<|im_start|>user\nThanks, <|im_end|> 日本 🎉\n<|im_end|>\n"),
        ("generation prompt", "<|im_start|>assistant\n"),
    ]


def test_default_system_prompt_of_a_template_is_system():
    """Tokens the user never wrote should not be charged to the user."""
    template = chat_template(templates.CHATML)
    first = parts(template.render(CHAT[:1]), template)[0]
    assert first == ("system", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")


def test_tools_and_tool_turns_have_their_segments():
    """Tools are often the longest part of a prompt."""
    template = chat_template(templates.CHATML)
    found = parts(template.render([SYSTEM, *TOOL_CHAT], tools=[TOOL]), template)
    names = [name for name, _ in found]
    assert names == ["tools", "system", "tools", "turn 1 user", "turn 1 assistant", "new message", "generation prompt"]
    assert '"weather"' in found[2][1]
    assert found[5][1] == "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"


def test_trimmed_and_moved_messages_are_found():
    """Llama 3 prints the first user message with the tools; Mistral prints the system prompt in the last turn."""
    llama = chat_template(templates.LLAMA3)
    found = parts(llama.render([SYSTEM, *CHAT], tools=[TOOL], kwargs={"date_string": "x"}), llama)
    assert [name for name, text in found if "Be kind" in text] == ["system"]
    assert [name for name, text in found if '"weather"' in text] == ["tools"]
    assert ("turn 1 user", "What is 2 + 2?<|eot_id|>") in found
    mistral = chat_template(templates.MISTRAL)
    moved = parts(mistral.render([SYSTEM, *CHAT]), mistral)
    assert [name for name, text in moved if "Be kind" in text] == ["system"]
    assert [name for name, text in moved if "Thanks" in text] == ["new message"]
    gemma = chat_template(templates.GEMMA)
    assert [name for name, text in parts(gemma.render([SYSTEM, *CHAT]), gemma) if "Be kind" in text] == ["system"]


def test_generation_prompt_inside_the_loop_and_documents_are_named():
    """Templates put these in odd places."""
    zephyr = chat_template(templates.ZEPHYR)
    assert parts(zephyr.render(CHAT), zephyr)[-1] == ("generation prompt", "<|assistant|>\n")
    thinking = chat_template(templates.THINKING)
    prompt = thinking.render(CHAT, documents=[{"title": "One", "text": "Alpha"}])
    assert ("documents", "<|im_start|>documents\nOne: Alpha<|im_end|>\n") in parts(prompt, thinking)


@given(
    style=st.sampled_from(list(templates.ALL)),
    texts=st.lists(st.text(max_size=20), min_size=1, max_size=7),
    system=st.none() | st.text(max_size=10),
    has_tools=st.booleans(),
    generates=st.booleans(),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_segments_always_partition_the_prompt(style, texts, system, has_tools, generates):
    """Any content, also one that repeats another's, is empty, or looks like the template's own marks."""
    template = chat_template(templates.ALL[style])
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    prompt = template.render(messages, tools=[TOOL] if has_tools else None, add_generation_prompt=generates)
    assert list(prompt.token_ids) == template._tokenizer.encode(prompt.text, add_special_tokens=False)
    parts(prompt, template)


def test_arguments_sent_as_json_text_are_objects_for_the_template():
    """OpenAI's clients send them as text; printed as text they would be quoted twice."""
    template = chat_template(templates.CHATML)
    call = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    sent = [TOOL_CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}, TOOL_CHAT[2]]
    assert '"arguments": {"city": "Paris"}}' in template.render(sent).text


IDEFICS = (
    "<|begin|>{% for message in messages %}{{message['role'].capitalize()}}{% if message['content'][0]['type'] == 'image' %}"
    "{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def test_a_template_that_prints_parts_alone_gets_them():
    """Such templates (Idefics 3, SmolVLM) take the letters of a text for parts and print none of them."""
    template = chat_template(IDEFICS)
    assert template.wants_parts
    found = parts(template.render([SYSTEM, *CHAT]), template)
    assert [name for name, text in found if "Be kind" in text] == ["system"]
    assert [name for name, text in found if "What is 2 + 2?" in text] == ["turn 1 user"]
    assert [name for name, text in found if "Thanks" in text] == ["new message"]
    in_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    assert template.render(CHAT).token_ids == template.render(in_parts).token_ids
    assert template.render([{"role": "user", "content": ""}]).text == "<|begin|>User: <|im_end|>\nAssistant:"
    sent = [CHAT[0], {"role": "assistant", "content": "It is "}]
    told = template.render(sent, add_generation_prompt=False, continue_final_message=True).text
    assert told.endswith("Assistant: It is ")
    assert not any(
        chat_template(source).wants_parts for source in (templates.CHATML, templates.LLAMA3, templates.GEMMA)
    )


@pytest.mark.parametrize("style", templates.ALL)
def test_texts_in_parts_are_the_text_that_they_make(style):
    """From Python they were lost, or printed as Python spells a list, and so was a developer's message."""
    template = chat_template(templates.ALL[style])
    in_parts = [{"type": "text", "text": "What is "}, {"type": "input_text", "text": "2 + 2?"}]
    sent = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": in_parts},
    ]
    told = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 2 + 2?"}]
    assert template.render(sent) == template.render(told)


def test_every_place_of_a_template_is_read(tmp_path):
    """tokenizer_config.json (text or named list), chat_template.json, chat_template.jinja: the last one wins."""
    named = [{"name": "default", "template": "D{{ messages[0].content }}"}, {"name": "tool_use", "template": "T"}]
    folder = checkpoint(tmp_path, byte_level_json(), config={"chat_template": named})
    template = ChatTemplate.from_dir(folder)
    assert template.render(CHAT).text == "DWhat is 2 + 2?"
    assert template.render(CHAT, tools=[TOOL]).text == "T"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert ChatTemplate.from_dir(folder).render(CHAT).text == "J"
    (folder / "chat_template.jinja").write_text("F\n")
    assert ChatTemplate.from_dir(folder).render(CHAT).text == "F"
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(LoadError, match=r"chat_template\.json"):
        ChatTemplate.from_dir(folder)


@pytest.mark.parametrize("listed", [[{"name": "default", "template": 3}], [{"name": "default"}], ["text"]])
def test_a_list_of_templates_holds_names_and_texts(tmp_path, listed):
    """A number in a template's place was a TypeError of another room."""
    folder = checkpoint(tmp_path, byte_level_json(), config={"chat_template": listed})
    with pytest.raises(LoadError, match="is a list without name and template"):
        ChatTemplate.from_dir(folder)


def test_model_without_template_gets_the_plain_one(tmp_path):
    """Base models can be chatted with, and say that the template is not theirs."""
    template = ChatTemplate.from_dir(checkpoint(tmp_path, byte_level_json()))
    assert template.is_default
    prompt = template.render([SYSTEM, *CHAT[:1]])
    assert prompt.text == "System:  Be kind. \n\nUser: What is 2 + 2?\n\nAssistant:"
    assert [name for name, _ in parts(prompt, template)] == ["system", "new message", "generation prompt"]


def test_the_plain_template_begins_as_each_text_of_the_tokenizer(tmp_path):
    """Gemma 3 270M, a base model, was given conversations without its BOS, and wrote `Assistant:` for ever."""
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    begin = backend.token_to_id("<|begin|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", begin)]
    )
    template = ChatTemplate.from_dir(checkpoint(tmp_path, backend.to_str(), config={"bos_token": "<|begin|>"}))
    prompt = template.render(CHAT[:1])
    assert prompt.text == "<|begin|>User: What is 2 + 2?\n\nAssistant:"
    assert list(prompt.token_ids) == backend.encode("User: What is 2 + 2?\n\nAssistant:").ids
    spelt = template.render([{"role": "user", "content": "<|begin|>"}]).token_ids
    assert spelt.count(begin) == 1, "what a message spells stays text"


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "0 entries"),
        (CHAT[:2], {"continue_final_message": True}, "exclude"),
        ([{"role": "assistant"}], {"continue_final_message": True, "add_generation_prompt": False}, "text content"),
        ([CHAT[1]], {"kwargs": {"deep": json.loads("[" * 900 + "]" * 900)}}, "nested too deeply"),
        ("hi", {}, "messages is 'hi'; it must be a list"),
        (CHAT[0], {}, "messages is {'role'.*; it must be a list"),
        ([CHAT[0], SimpleNamespace(role="user", content="hi")], {}, "message 1 is namespace.*; it must be an object"),
        ([{"content": "hi"}], {}, "role of message 0 is None; it must be a text"),
        ([{"role": 5, "content": "hi"}], {}, "role of message 0 is 5; it must be a text"),
        ([{"role": "user", "content": 5}], {}, "content of message 0 is 5; it must be a text"),
        (
            [CHAT[0], {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]}],
            {},
            "content of message 1 has a part of type 'image_url'; texts alone are read",
        ),
        (
            [CHAT[0], {"role": "user", "content": b"hi"}],
            {},
            "takes texts, numbers, lists and objects; b'hi' is a bytes",
        ),
        ([CHAT[0]], {"tools": [{"name": "f", "type": int}]}, "is a type"),
        ([{"role": "assistant", "tool_calls": 5}], {}, "tool_calls of message 0 is 5; it must be a list of objects"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], {}, "it must be a list of objects"),
    ],
)
def test_impossible_requests_are_refused(messages, options, words):
    """A 400 with a reason. From Python, bytes became the text "<bytes>", a message without a role was passed over, and one that
    is no mapping an AttributeError.
    """
    with pytest.raises(TemplateError, match=words):
        chat_template(templates.CHATML).render(messages, **options)


def test_numbers_of_other_libraries_are_numbers_for_the_template():
    """An `enum` made with NumPy was told to the model as "<int64>"."""
    template = chat_template("{% for m in messages %}{{ m.content }}{% endfor %} {{ numbers }}")
    numbers = [np.int64(7), np.float32(0.5), HTTPStatus.OK]
    assert template.render([{"role": "user", "content": "hi"}], kwargs={"numbers": numbers}).text == "hi [7, 0.5, 200]"
