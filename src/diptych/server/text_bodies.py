"""Bodies of the routes that turn text into token ids and back, and generate nothing."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from diptych.server.http.bases import StopAtFirst, conflict
from diptych.server.schema import MAX_MESSAGES, ChatPrompt, Message, TellingBody
from diptych.server.values import CacheSalt, Whole


def _given(name: str, kind: str) -> JsonDict:
    return {"required": [name], "properties": {name: {"type": kind}}}


class TokenizeBody(ChatPrompt, TellingBody):
    """`POST /tokenize`: a prompt (`content` in llama.cpp), or messages that go through the chat template first."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [_given("prompt", "string"), _given("content", "string"), _given("messages", "array")]
        }
    )
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None  # llama.cpp's, off unless asked for, as there
    parse_special: bool | None = None
    with_pieces: bool | None = None
    messages: Annotated[list[Message], StopAtFirst()] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeBody:
        if sum(one is not None for one in (self.prompt, self.content, self.messages)) != 1:
            raise conflict("prompt", "exactly one of prompt, content and messages must be given")
        for name in ("add_special", "parse_special"):
            if getattr(self, name) is not None and self.content is None:
                raise conflict(name, f"{name} is set; it is only allowed with content")
        chats = next((name for name in ChatPrompt.model_fields if self.messages is None and getattr(self, name)), None)
        if chats is not None:
            raise conflict(chats, f"{chats} is set; it is only allowed with messages")
        if self.messages is not None and self.add_special_tokens:
            told = "add_special_tokens is true; with messages the template writes what stands before them"
            raise conflict("add_special_tokens", told)
        return self

    @property
    def text(self) -> str:
        """Of either name."""
        return self.content if self.content is not None else self.prompt or ""

    @property
    def adds_special(self) -> bool:
        """Whether BOS comes first where the tokenizer says so: by vLLM's name unless told not to, by llama.cpp's if told to."""
        if self.content is not None:
            return bool(self.add_special if self.add_special is not None else self.add_special_tokens)
        return self.add_special_tokens is not False


class DetokenizeBody(TellingBody):
    """`POST /detokenize`."""

    tokens: Annotated[list[Annotated[Whole, Field(ge=0, lt=2**31)]], StopAtFirst()]


class TemplateBody(ChatPrompt, TellingBody):
    """`POST /apply-template`: what the template makes of messages, without generating; cache_salt: whose cache is asked."""

    messages: Annotated[list[Message], StopAtFirst()] = Field(min_length=1, max_length=MAX_MESSAGES)
    cache_salt: CacheSalt = None
