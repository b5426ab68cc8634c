"""Calls and thoughts as real models write them: the form is read off the template, and reads back what that renders."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from diptych.compute.sampling.structured import GrammarCompiler
from diptych.engine.text.call_form import HERMES, LFM2, LLAMA3, Style
from diptych.engine.text.dialect import Dialect
from diptych.engine.text.forced_calls import tool_call_spec
from diptych.engine.text.reasoning import Opening
from diptych.engine.text.template import ChatTemplate
from diptych.engine.text.tokenizer import Tokenizer
from diptych.engine.text.tools import ToolCallParser
from diptych.ground.request import FreeReasoning
from text import templates
from text.small_tokenizers import byte_level_json

FILES = {path.stem: path.read_text() for path in (Path(__file__).parents[2] / "data" / "templates").glob("*.jinja")}
SOURCES = FILES | templates.CALL_FORMS

# templates with tools whose calls are not read off them, and why; the same table as in docs/serving.md
NOT_PRINTED = {"HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"}
NOT_READ = {
    "MiniMax-M3": "do not read back",  # nested values are tags within tags
    "muse-glimmer": "do not read back",  # the name stands in the header of a message of its own
    "meetkai-functionary-medium-v3.2": "TypeError",  # the prompt itself ends within the tag of a call
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
}


def tool(name: str, **types: str) -> dict:
    properties = {
        key: {"type": kind, "description": "d"} | ({"additionalProperties": True} if kind == "object" else {})
        for key, kind in types.items()
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": properties, "required": list(types)},
        },
    }


TOOLS = [
    tool("do_it", text="string", count="integer", ratio="number", flag="boolean", options="object", items="array",
         word="string"),
    tool("get-time.now", zone="string"),
]  # fmt: skip
TEXT = 'it\'s "quoted" \\ back\nsecond line\n\n  <b>bold</b> & {"x": [1]} '
TEXT += "</think> </parameter> </arg_value> x </tool_call> 日本 🎉, done) ]"
WHOLE = {
    "text": TEXT, "count": 12, "ratio": -0.5, "flag": True, "word": "135",
    "options": {"deep": {"list": [1, "two's", None, False, {"k": 'v\n"w"'}]}, "e": {}}, "items": ["a, b", {"c": "}"}],
}  # fmt: skip
CALLS = [
    ("abcdefgh1", "do_it", WHOLE),
    ("abcdefgh2", "get-time.now", {"zone": 'Europe/"Rome"'}),
    ("abcdefgh3", "do_it", {"text": "\n lead", "word": " trail \n"}),
    ("abcdefgh4", "get-time.now", {}),
]


@cache
def chat_template(source: str) -> ChatTemplate:
    names = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    return ChatTemplate(Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()), names, []), source)


def written(template: ChatTemplate, calls: list) -> str:
    """What a model would have written for these calls: their rendering behind the prompt."""
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    asked = [{"role": "user", "content": "QUESTION"}]
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    whole = template.render([*asked, answer], tools=TOOLS, add_generation_prompt=False).text.rpartition("QUESTION")[2]
    prompt = template.render(asked, tools=TOOLS).text.rpartition("QUESTION")[2]
    same = next(whole[:n] for n in range(len(whole), -1, -1) if prompt.startswith(whole[:n]))
    return whole[same.rfind("<") if same.rfind("<") > same.rfind(">") else len(same) :]


def read(dialect: Dialect, pieces: list[str]) -> tuple[str, list]:
    """(content, calls) read in these pieces."""
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    parser = ToolCallParser(dialect.form, tools=schemas)
    content, calls = "", []
    splitter = dialect.splitter(Opening.FREE) if dialect.is_harmony else None
    if splitter is not None:
        pieces = [*(splitter.push(piece).answer for piece in pieces), splitter.finish().answer]
    for delta in [*map(parser.push, pieces), parser.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.id is not None:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return content, calls


def check_read_back(template: ChatTemplate, *, every_cut: bool) -> None:
    """every_cut: in two, everywhere; where calls may follow each other, those that do, which are the single ones."""
    dialect = template.dialect
    turns = [*([call] for call in CALLS), *([] if dialect.form.is_single else [CALLS])]
    for calls in turns:
        text = written(template, calls)
        content, got = read(dialect, [text])
        assert [(name, json.loads(arguments)) for name, arguments in got] == [call[1:] for call in calls], text
        assert not any(mark in content for mark in ("do_it", "lead", "Rome")), content
        assert read(dialect, list(text)) == (content, got)
        for at in range(len(text)) if every_cut and (calls is turns[-1] or dialect.form.is_single) else ():
            assert read(dialect, [text[:at], text[at:]]) == (content, got), text[:at]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_what_a_template_renders_is_read_back_whatever_the_cut(name):
    """Of 64 real templates 28 were not recognised, and 13 were taken for another's: their calls were lost."""
    template = chat_template(SOURCES[name])
    assert template.dialect.problem == ""
    check_read_back(template, every_cut=True)


def test_forms_that_were_taken_for_another():
    """`<tool_call>` was read as Hermes's JSON whatever stood in it, and Command-R's tools as Llama 3's."""
    for name in ("Qwen3-Coder", "GLM-4.6"):
        assert chat_template(SOURCES[name]).dialect.form.style is Style.TAGGED
    assert chat_template(templates.NUMBERED_CALLS).dialect.form.trigger == "<|act|>"
    assert chat_template(templates.CHATML).dialect.form.head.strip() == HERMES.head.strip()
    assert chat_template(templates.LLAMA3).dialect.form.head == LLAMA3.head


@pytest.mark.parametrize(("mention", "form"), [("<|tool_list_start|>", LFM2), ("<tool_call>", HERMES), ("", HERMES)])
def test_a_template_that_prints_no_calls_is_taken_at_its_word(mention, form):
    """Some only tell their model in prose how to call; that this was assumed is said, not hidden."""
    dialect = chat_template(templates.ZEPHYR + "{# " + mention + " #}").dialect
    assert dialect.form == form
    assert dialect.problem == "the template prints no calls"


def test_thinking_tags_are_those_around_a_thought():
    """Any model's tags, not only those that were known."""
    source = templates.THINKING.replace("<think>", "<|ponder|>").replace("</think>", "<|/ponder|>")
    source = source.replace("set ns.last_query_index = index", "set ns.last_query_index = index - 1")
    assert chat_template(source).dialect.tags == ("<|ponder|>", "<|/ponder|>")
    assert chat_template(templates.CHATML).dialect.tags is None


GPT_OSS = "openai-gpt-oss-120b"
HARMONY_OUTPUTS = [
    # (output behind `<|start|>assistant`, thought, said, calls): the examples of harmony's own documentation
    ("<|channel|>analysis<|message|>User asks.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.",
     "User asks.", "2 + 2 = 4.", []),
    ("<|channel|>analysis<|message|>Need a tool.<|end|><|start|>assistant<|channel|>commentary to=functions.get-time.now "
     '<|constrain|>json<|message|>{"zone":"Oslo"}', "Need a tool.", "", [["get-time.now", '{"zone":"Oslo"}']]),
    ('<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.get-time.now<|channel|>commentary json'
     '<|message|>{"zone": "<|x"}<|call|>', "", "I will look.", [["get-time.now", '{"zone": "<|x"}']]),
    ('{"plain": "under a grammar"}', "", '{"plain": "under a grammar"}', []),
    ("<b>plain</b> under a grammar", "", "<b>plain</b> under a grammar", []),
    ("assistant is a word", "", "assistant is a word", []),
    ("<|channel|>analysis<|message|>cut o", "cut o", "", []),
    ("<|channel|>fin", "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("output", "thought", "said", "calls"), HARMONY_OUTPUTS)
def test_harmony_is_read_by_its_channels_whatever_the_cut(output, thought, said, calls):
    """gpt-oss's channel names came as text, and its calls were lost."""
    dialect = chat_template(SOURCES[GPT_OSS]).dialect
    for at in range(len(output) + 1):
        pieces = [output[:at], output[at:]] if at else list(output)
        splitter = dialect.splitter(Opening.FREE)
        deltas = [*map(splitter.push, pieces), splitter.finish()]
        assert "".join(delta.reasoning for delta in deltas) == thought
        assert splitter.reasoning_tokens + splitter.answer_tokens == len(pieces)
        assert read(dialect, pieces) == (said, calls)


CITY = tool("weather", city="string", days="integer", near="boolean")
CITY["function"]["parameters"]["properties"]["city"] = {"enum": ["Paris", "Rome's"]}
CITY["function"]["parameters"]["properties"]["days"]["maximum"] = 99
NOTE = tool("note", text="string", tags="array")
NOTE["function"]["parameters"]["required"] = ["text"]
NOTE["function"]["parameters"]["properties"]["text"]["maxLength"] = 9
NOTE["function"]["parameters"]["properties"]["tags"] |= {"items": {"type": "string", "maxLength": 4}, "maxItems": 2}


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_forced_calls_are_written_in_the_models_own_form(name, has_tokens):
    """A call in another's form is one that the model was never trained on; random draws under the grammar must read back."""
    form = chat_template(SOURCES[name]).dialect.form
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    tags = [one for one in (form.trigger, *form.end_tags) if one.startswith("<") and one.endswith(">")]
    if has_tokens:
        backend.add_special_tokens([tokenizers.AddedToken(tag, special=True, normalized=False) for tag in tags])
    tokenizer = Tokenizer(backend, {}, (0,))
    tokenizer.show(form.literals)
    spec = tool_call_spec([CITY, NOTE], form, tag_ids=tokenizer.tags_in(form.literals))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = compiler.compile(spec)
    names = set()
    for seed in range(6):
        state, rng, ids = grammar.begin(), np.random.default_rng(seed), []
        while len(ids) < 900 and not state.is_complete:
            token_id = 0 if state.is_accepting else int(rng.choice(np.flatnonzero(state.allowed())))
            if token_id == 0:
                break
            ids.append(token_id)
            state.advance(token_id)
        output = tokenizer.decode(ids)
        parser = ToolCallParser(
            form, tools={one["function"]["name"]: one["function"]["parameters"] for one in (CITY, NOTE)}
        )
        deltas = [parser.push(output), parser.finish()]
        assert not "".join(delta.content for delta in deltas).strip(), output
        calls = [call for delta in deltas for call in delta.calls]
        names |= {call.name for call in calls if call.name}
        first = json.loads("".join(call.arguments for call in calls if call.index == 0))
        if calls[0].name == "weather":
            assert first["city"] in ("Paris", "Rome's"), output
            assert first["days"] <= 99
            assert isinstance(first["near"], bool)
        else:
            assert len(first["text"]) <= 9, output
    assert names == {"weather", "note"}
    compiler.close()


@pytest.mark.slow
def test_every_template_with_tools_reads_back_or_is_named(all_sources):
    """What is not read is known by name and reason, in the documentation too."""
    documented = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    n_read = 0
    for name, source in sorted(all_sources.items()):
        template = chat_template(source)
        if name in NOT_READ | dict.fromkeys(NOT_PRINTED):
            assert NOT_READ.get(name, "prints no calls") in template.dialect.problem
            assert f"`{name}`" in documented
        elif template.names("tools"):
            assert template.dialect.problem == "", name
            check_read_back(template, every_cut=False)
            n_read += 1
    assert n_read >= 56


def test_a_forced_call_behind_a_harmony_thought():
    """The tags of a thought are several tokens: spelled letter by letter they were none, and the model could not think."""
    template = chat_template(SOURCES[GPT_OSS])
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    names = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer = Tokenizer(backend, {}, (backend.token_to_id("<|call|>"),))
    tokenizer.show(template.dialect.texts)
    begin, end = template.dialect.tags
    spec = tool_call_spec(
        [CITY], template.dialect.form, tag_ids=tokenizer.tags_in(template.dialect.texts), stops=frozenset({"<|call|>"})
    )
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    state = compiler.compile(replace(spec, reasoning=FreeReasoning(begin=begin, end=end))).begin()
    written = f"{begin}a thought{end}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    for token_id in tokenizer.encode(written + '{"city": "Paris", "days": 2, "near": true}', add_special_tokens=False):
        assert state.allowed()[token_id], tokenizer.token(token_id)
        state.advance(token_id)
    assert state.is_accepting
    compiler.close()
