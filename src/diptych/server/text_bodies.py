"""Bodies of the routes that turn text into token ids and back, and generate nothing."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from diptych.server.bases import MAX_TOOLS, Body, StopAtFirst, conflict
from diptych.server.schema import MAX_MESSAGES, CacheSalt, Message, Name, TemplateVariables, Tool, Whole


def _given(name: str, kind: str) -> JsonDict:
    return {"required": [name], "properties": {name: {"type": kind}}}


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt (`content` in llama.cpp), or messages that go through the chat template first."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [_given("prompt", "string"), _given("content", "string"), _given("messages", "array")]
        }
    )
    model: Name | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None  # llama.cpp's, off unless asked for, as there
    parse_special: bool | None = None
    with_pieces: bool | None = None
    messages: Annotated[list[Message], StopAtFirst()] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], StopAtFirst()] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeBody:
        if sum(one is not None for one in (self.prompt, self.content, self.messages)) != 1:
            raise conflict("prompt", "exactly one of prompt, content and messages must be given")
        for name in ("add_special", "parse_special"):
            if getattr(self, name) is not None and self.content is None:
                raise conflict(name, f"{name} is set; it is only allowed with content")
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


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[Annotated[Whole, Field(ge=0, lt=2**31)]], StopAtFirst()]


class TemplateBody(Body):
    """`POST /apply-template`: what the template makes of messages, without generating; cache_salt: whose cache is asked."""

    model: Name | None = None
    messages: Annotated[list[Message], StopAtFirst()] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Annotated[list[Tool], StopAtFirst()] | None = Field(None, max_length=MAX_TOOLS)
    documents: Annotated[list[dict[str, Any]], StopAtFirst()] | None = Field(None, max_length=1024)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables = None
    cache_salt: CacheSalt = None
