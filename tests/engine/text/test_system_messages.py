"""Every system message of a conversation reaches the model, whatever its chat template knows of such messages."""

from functools import cache
from pathlib import Path

import pytest
import tokenizers

from diptych.engine.text.system_messages import SystemPlaces, placed
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
SOURCES = {**FILES, **templates.ALL, "knows none": KNOWS_NONE}
# as a coding agent begins, and goes on: rules twice, and what it is told meanwhile
RULES, MORE, MEANWHILE = ({"role": "system", "content": text} for text in ("Be kind.", "Be short.", "A file changed."))
ASK, ANSWER, AGAIN = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"))
)
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
CONVERSATIONS: dict[str, list] = {
    "two": [RULES, MORE, ASK],
    "developer": [RULES, {**MORE, "role": "developer"}, ASK],
    "developer alone": [{**RULES, "role": "developer"}, ASK],
    "at once": [ASK, MEANWHILE],
    "last": [RULES, ASK, ANSWER, AGAIN, MEANWHILE],
    "between": [RULES, MORE, ASK, MEANWHILE, ANSWER, AGAIN],
    "before a question": [RULES, ASK, ANSWER, MEANWHILE, AGAIN],
    "in parts": [RULES, ASK, {**MEANWHILE, "content": [{"type": "text", "text": text} for text in ("A file ", "changed.")]}],
}  # fmt: skip


@cache
def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()), NAMES, []), source)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("style", SOURCES)
def test_every_message_is_shown(style: str, name: str) -> None:
    text = chat_template(SOURCES[style]).render(CONVERSATIONS[name]).text
    wanted = ["A file changed." if isinstance(one["content"], list) else one["content"] for one in CONVERSATIONS[name]]
    assert [content for content in wanted if content not in text] == []


def test_what_no_template_would_show_is_said_by_the_user_and_roles_alternate_as_before() -> None:
    first_alone = SystemPlaces(several=False, later=False)
    one = {"role": "system", "content": "Be kind.\n\nBe short."}
    said = {"role": "user", "content": "Hi\n\nA file changed."}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    given = {"role": "tool", "tool_call_id": "call00001", "content": "it is"}
    assert placed([RULES, MORE, ASK, MEANWHILE], first_alone) == [one, said]
    assert placed([ASK, MEANWHILE, MORE, ANSWER], first_alone) == [
        {"role": "user", "content": "Hi\n\nA file changed.\n\nBe short."},
        ANSWER,
    ]
    before = {"role": "user", "content": "A file changed.\n\nBye"}
    assert placed([RULES, ASK, ANSWER, MEANWHILE, AGAIN], first_alone) == [RULES, ASK, ANSWER, before]
    moved = {"role": "user", "content": "A file changed."}
    assert placed([RULES, ASK, called, given, MEANWHILE], first_alone) == [RULES, ASK, called, given, moved]
    unread = {"role": "user", "content": [{"type": "other"}]}
    assert placed([unread, MEANWHILE], first_alone) == [unread, moved], "what is no text is not added to"
    assert placed([RULES, MORE, ASK, MEANWHILE], SystemPlaces(several=True, later=False)) == [RULES, MORE, said]
    assert placed([RULES, MORE, ASK, MEANWHILE], SystemPlaces(several=False, later=True)) == [one, ASK, MEANWHILE]
    none = SystemPlaces(first=False, several=False, later=False)
    asked = {"role": "user", "content": "Be kind.\n\nBe short.\n\nHi\n\nA file changed."}
    assert placed([RULES, MORE, ASK, MEANWHILE, ANSWER], none) == [asked, ANSWER]
    assert [RULES["content"], ASK["content"]] == ["Be kind.", "Hi"], "what was given stays as it was"
