"""Conversations of agents reach the model whole, whatever its chat template takes of them."""

from functools import cache
from pathlib import Path

import pytest
import tokenizers

from diptych.engine.text.taken import Taken, fitted
from diptych.engine.text.template import ChatTemplate
from diptych.engine.text.tokenizer import Tokenizer
from text import templates
from text.small_tokenizers import byte_level_json

NAMES = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
FILES = {path.stem: path.read_text() for path in (Path(__file__).parents[2] / "data" / "templates").glob("*.jinja")}
# Gemma 2's way
KNOWS_NONE = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<' + message.role + '>' + message.content }}
{%- endfor %}"""
# Llama 3's
KNOWS_ONE_CALL = """\
{%- for message in messages %}
    {%- if message.tool_calls and message.tool_calls | length > 1 %}{{ raise_exception('one at once') }}{% endif %}
    {{- '<' + message.role + '>' + message.content }}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}{{ tools }}"""
SOURCES = {**FILES, **templates.ALL, "knows none": KNOWS_NONE, "knows one call": KNOWS_ONE_CALL}
# as a coding agent begins, and goes on: rules twice, and what it is told meanwhile
RULES, MORE, MEANWHILE = ({"role": "system", "content": text} for text in ("Be kind.", "Be short.", "A file changed."))
ASK, ANSWER, AGAIN = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"))
)
FIRST_ID, SECOND_ID = "call_0123456789abcdef01234567", "toolu_01"
CALLS = [
    {"id": name, "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    for name in (FIRST_ID, SECOND_ID)
]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look", "parameters": {"properties": {}}}}
CALLED: dict
BOTH: dict
CALLED, BOTH = ({"role": "assistant", "content": "", "tool_calls": CALLS[:n]} for n in (1, 2))
FOUND, ELSE = (
    {"role": "tool", "tool_call_id": name, "name": "look", "content": text}
    for name, text in ((FIRST_ID, "It is there."), (SECOND_ID, "Nothing else."))
)
THOUGHT = {**CALLED, "content": "Looking.", "reasoning_content": "Where is it?"}
CONVERSATIONS: dict[str, list] = {
    "two": [RULES, MORE, ASK],
    "developer": [RULES, {**MORE, "role": "developer"}, ASK],
    "developer alone": [{**RULES, "role": "developer"}, ASK],
    "at once": [ASK, MEANWHILE],
    "last": [RULES, ASK, ANSWER, AGAIN, MEANWHILE],
    "between": [RULES, MORE, ASK, MEANWHILE, ANSWER, AGAIN],
    "before a question": [RULES, ASK, ANSWER, MEANWHILE, AGAIN],
    "in parts": [RULES, ASK, {**MEANWHILE, "content": [{"type": "text", "text": text} for text in ("A file ", "changed.")]}],
    "two questions": [RULES, ASK, AGAIN],
    "two answers": [RULES, ASK, ANSWER, {**ANSWER, "content": "I am well."}, AGAIN],
}  # fmt: skip
WITH_CALLS: dict[str, list] = {
    "a call": [ASK, CALLED, FOUND],
    "its user goes on": [ASK, CALLED, FOUND, AGAIN],
    "its system goes on": [ASK, CALLED, FOUND, MEANWHILE],
    "two calls": [ASK, BOTH, FOUND, ELSE],
    "turned around": [ASK, BOTH, ELSE, FOUND],
    "two steps": [ASK, CALLED, FOUND, {**CALLED, "tool_calls": CALLS[1:]}, ELSE, AGAIN],
}

CALLING = [style for style, source in SOURCES.items() if "tools" in source]


@cache
def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()), NAMES, []), source)


def texts_of(messages: list) -> list[str]:
    return ["A file changed." if isinstance(one["content"], list) else one["content"] for one in messages]


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("style", SOURCES)
def test_every_message_is_shown(style: str, name: str) -> None:
    text = chat_template(SOURCES[style]).render(CONVERSATIONS[name]).text
    assert [content for content in texts_of(CONVERSATIONS[name]) if content not in text] == []


@pytest.mark.parametrize("style", CALLING)
def test_every_turn_of_an_agent_is_shown(style: str) -> None:
    """With ids as this server and others make them."""
    template = chat_template(SOURCES[style])
    for name, messages in WITH_CALLS.items():
        text = template.render(messages, tools=[TOOL]).text
        assert [content for content in texts_of(messages) if content not in text] == [], name


def test_gpt_oss_takes_what_was_said_beside_a_thought_and_a_call() -> None:
    """It was refused: any turn in which the model wrote a preamble ended its agent's conversation."""
    text = chat_template(FILES["openai-gpt-oss-120b"]).render([ASK, THOUGHT, FOUND], tools=[TOOL]).text
    assert "<|channel|>analysis<|message|>Where is it?\n\nLooking.<|end|>" in text


def test_a_template_of_no_chat_gets_messages_as_they_are() -> None:
    """As rerankers have: what it shows of queries and documents says nothing of users."""
    source = "{% for m in messages %}{% if m.role in ('system', 'query') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    query = {"role": "query", "content": "Who?"}
    assert chat_template(source).render([RULES, query]).text == "[system]Be kind.[query]Who?"


def test_the_log_says_once_what_a_template_does_not_take(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()), NAMES, []), KNOWS_NONE)
    with caplog.at_level("INFO", logger="diptych.engine"):
        template.render([ASK, ANSWER, AGAIN])
        assert caplog.messages == [], "nothing is looked for where every template takes it"
        for _ in range(2):
            template.render([RULES, ASK])
    (told,) = caplog.messages
    assert (
        "takes no system messages, several system messages, later system messages, two messages of the user's" in told
    )


def test_what_no_template_would_show_is_said_otherwise() -> None:
    first_alone = Taken(systems=False, later_system=False)
    one = {"role": "system", "content": "Be kind.\n\nBe short."}
    said = {"role": "user", "content": "Hi\n\nA file changed."}
    assert fitted([RULES, MORE, ASK, MEANWHILE], first_alone) == [one, said]
    assert fitted([ASK, MEANWHILE, MORE, ANSWER], first_alone) == [
        {"role": "user", "content": "Hi\n\nA file changed.\n\nBe short."},
        ANSWER,
    ]
    before = {"role": "user", "content": "A file changed.\n\nBye"}
    assert fitted([RULES, ASK, ANSWER, MEANWHILE, AGAIN], first_alone) == [RULES, ASK, ANSWER, before]
    moved = {"role": "user", "content": "A file changed."}
    assert fitted([RULES, ASK, CALLED, FOUND, MEANWHILE], first_alone) == [RULES, ASK, CALLED, FOUND, moved]
    unread = {"role": "user", "content": [{"type": "other"}]}
    assert fitted([unread, MEANWHILE], first_alone) == [unread, moved], "what is no text is not added to"
    assert fitted([RULES, MORE, ASK, MEANWHILE], Taken(later_system=False)) == [RULES, MORE, said]
    assert fitted([RULES, MORE, ASK, MEANWHILE], Taken(systems=False)) == [one, ASK, MEANWHILE]
    asked = {"role": "user", "content": "Be kind.\n\nBe short.\n\nHi\n\nA file changed."}
    none = Taken(system=False, systems=False, later_system=False)
    assert fitted([RULES, MORE, ASK, MEANWHILE, ANSWER], none) == [asked, ANSWER]
    assert [RULES["content"], ASK["content"]] == ["Be kind.", "Hi"], "what was given stays as it was"


def test_turns_join_and_calls_go_one_by_one_where_a_template_wants_them_so() -> None:
    in_turns = Taken(users=False, answers=False, after_result=False)
    assert fitted([ASK, AGAIN], in_turns) == [{"role": "user", "content": "Hi\n\nBye"}]
    assert fitted([ASK, ANSWER, THOUGHT], in_turns)[1:] == [{**THOUGHT, "content": "Hello\n\nLooking."}]
    assert fitted([ASK, THOUGHT, ANSWER], in_turns)[1:] == [THOUGHT, ANSWER], (
        "nothing is said before a call that was said behind"
    )
    assert fitted([ASK, CALLED, FOUND, AGAIN], in_turns)[2:] == [{**FOUND, "content": "It is there.\n\nBye"}]
    second = {**CALLED, "tool_calls": CALLS[1:]}
    for results in ([FOUND, ELSE], [ELSE, FOUND]):
        alone = fitted([ASK, BOTH, *results, AGAIN], Taken(calls=False))
        calls = [CALLED, second] if results[0] is FOUND else [second, CALLED]
        assert alone == [ASK, calls[0], results[0], calls[1], results[1], AGAIN]
    assert fitted([ASK, BOTH], Taken(calls=False)) == [ASK, CALLED, second], "without results"
    *_, called, found = fitted([ASK, CALLED, FOUND], Taken(long_ids=False))
    assert called["tool_calls"][0]["id"] == found["tool_call_id"]
    assert len(found["tool_call_id"]) == 9
    assert found["tool_call_id"].isalnum()
    assert CALLED["tool_calls"][0]["id"] == FIRST_ID, "what was given stays as it was"


# templates that want more of tools than there is here, or do what no sandbox lets them
NEEDING = ("command-r-plus", "firefunction", "Kimi-K2-", "Hermes-2-Pro", "Hermes-3", "functionary")


@pytest.mark.slow
def test_what_published_templates_take_is_what_the_documentation_says(all_sources: dict[str, str]) -> None:
    """Counted before anything is said otherwise; then all is shown."""
    found = {
        name: chat_template(source).taken
        for name, source in all_sources.items()
        if not any(one in name for one in NEEDING)
    }
    refused = [name for name, taken in found.items() if not (taken.systems and taken.later_system)]
    documented = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    assert f"| {len(refused) - 1}, among them gpt-oss'" in documented, "all but Gemma 2's, which takes none"
    assert [name for name, taken in found.items() if not taken.system] == ["google-gemma-2-2b-it"]
    for name in found:
        template = chat_template(all_sources[name])
        for messages in [*CONVERSATIONS.values(), *(WITH_CALLS.values() if template.names("tools") else ())]:
            text = template.render(messages, tools=[TOOL] if template.names("tools") else None).text
            assert [content for content in texts_of(messages) if content not in text] == [], (name, messages)
