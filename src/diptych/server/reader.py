"""Texts and messages of a body to token ids: the tokenizer and the chat template, on threads where it takes long."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diptych.engine.text.template import ChatTemplate, RenderedPrompt
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.errors import TemplateError
from diptych.server.http.door import Workers
from diptych.server.prompts import Prompt
from diptych.server.schema import ChatBody, Message, Tool
from diptych.server.template_settings import effort_settings, verbosity_settings
from diptych.server.text_bodies import TemplateBody, TokenizeBody

logger = logging.getLogger("diptych.server")

Ids = tuple[int, ...]

INLINE_CHARS = 2048  # shorter texts are tokenised in less time than a hand-over to a thread takes


def message_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: parts joined, a refusal as text, `developer` as `system`, absent fields left out."""
    made = []
    for message in messages:
        fields: dict[str, Any] = message.model_dump(exclude_none=True, exclude={"refusal"})
        parts = message.content if isinstance(message.content, list) else ()
        said = message.content if isinstance(message.content, str) else "".join(part.text for part in parts)
        fields["content"] = said + (message.refusal or "")
        if message.role == "developer":
            fields["role"] = "system"
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = object_or_text(call["function"]["arguments"])
        made.append(fields)
    return made


def object_or_text(arguments: str) -> Any:
    """Templates print arguments as JSON themselves, so they want the object; broken JSON stays text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def tool_dicts(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them."""
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat template is run over, in its own words. continues: the prompt ends within the last message.

    variables: those of the template besides its own (chat_template_kwargs).
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    adds_prompt: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


def conversation_of(body: ChatBody | TokenizeBody | TemplateBody, template_source: str) -> Conversation:
    """The conversation of a body with OpenAI's messages. Raises ApiError 400 for a setting that the template does not read."""
    continues = bool(body.continue_final_message)
    settings = {
        **effort_settings(template_source, body.reasoning_effort),
        **verbosity_settings(template_source, body.verbosity),
    }
    return Conversation(
        messages=message_dicts(body.messages or ()),
        tools=tool_dicts(body.offered),
        documents=body.documents,
        adds_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continues=continues,
        variables={**settings, **(body.chat_template_kwargs or {})},
    )


def piece(raw: bytes) -> str | list[int]:
    """A token as llama.cpp shows it: its text, or its bytes where these are no whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


class Reader:
    """The words of one model. Used on the event loop."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, workers: Workers, *, reads_control_tokens: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._workers = workers
        self._reads_control_tokens = reads_control_tokens
        self._learn_dialect()

    def _learn_dialect(self) -> None:
        """Know the model's forms of calls and thoughts before its first word, and say what could not be known."""
        dialect, reads_tools = self.template.dialect, self.template.names("tools")
        self.tokenizer.show(dialect.texts)
        if reads_tools and dialect.problem:
            logger.warning(
                "how this model writes tool calls cannot be read off its chat template: %s; calls are expected as %r",
                dialect.problem,
                dialect.form.example,
            )
        elif reads_tools:
            logger.info("this model writes tool calls as %r", dialect.form.example)

    async def render(self, make: Callable[[], Conversation], *, limit_tokens: int) -> RenderedPrompt:
        """Run the chat template over what `make` returns, on a thread.

        Raises TemplateError, or PromptTooLong for far more than limit_tokens. What the template would drop is refused.
        """
        return await self._workers.run(self._render, make, limit_tokens)

    def _render(self, make: Callable[[], Conversation], limit_tokens: int) -> RenderedPrompt:
        conversation = make()
        for name, given in (("tools", conversation.tools), ("documents", conversation.documents)):
            if given and not self.template.names(name):
                raise TemplateError(
                    f"{name} has {len(given)} entries; the chat template of this model shows none of them",
                    hint="write into a message what the model should know of them",
                    param=name,
                )
        return self.template.render(
            conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.adds_prompt,
            continue_final_message=conversation.continues,
            kwargs=conversation.variables,
            limit_tokens=limit_tokens,
            reads_control_tokens=self._reads_control_tokens,
        )

    async def chat(self, body: ChatBody | TokenizeBody | TemplateBody, *, limit_tokens: int) -> RenderedPrompt:
        """The prompt of a body with OpenAI's messages. Raises as `render` and `conversation_of`."""
        return await self.render(lambda: conversation_of(body, self.template.source), limit_tokens=limit_tokens)

    async def ids(self, prompts: Sequence[Prompt], *, limit_tokens: int, add_special_tokens: bool = True) -> list[Ids]:
        """Token ids of prompts; those that are ids already stay as they are."""

        def ids_of(prompt: Prompt) -> Ids:
            if not isinstance(prompt, str):
                return tuple(prompt)
            self.tokenizer.refuse_endless(prompt, limit_tokens)
            return tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= INLINE_CHARS:
            return [ids_of(prompt) for prompt in prompts]
        return await self._workers.run(lambda: [ids_of(prompt) for prompt in prompts])

    async def plain_ids(self, text: str, *, limit_tokens: int, add_special_tokens: bool) -> Ids:
        """Token ids of a text in which no control token is read."""

        def ids() -> Ids:
            self.tokenizer.refuse_endless(text, limit_tokens)
            around = self.tokenizer.encode("", add_special_tokens=add_special_tokens)
            return (*around, *self.template.plain_ids(text))

        return await self._workers.run(ids)

    async def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return await self._workers.run(
            partial(self.tokenizer.decode, list(token_ids), skip_special_tokens=skip_special_tokens)
        )
