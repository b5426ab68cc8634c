"""Texts and messages of a body to token ids: the tokenizer and the chat template, on threads where it takes long."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from diptych.engine.text.template import ChatTemplate, RenderedPrompt
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.errors import TemplateError
from diptych.server.door import Workers
from diptych.server.schema import ChatBody, Message, Prompt, TemplateBody, TokenizeBody, Tool

Ids = tuple[int, ...]

INLINE_CHARS = 2048  # shorter texts are tokenised in less time than a hand-over to a thread takes


def message_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: parts joined, `developer` as `system`, absent fields left out."""
    made = []
    for message in messages:
        fields: dict[str, Any] = message.model_dump(exclude_none=True)
        if isinstance(message.content, list):
            fields["content"] = "".join(part.text for part in message.content)
        elif message.content is None:
            fields["content"] = ""
        if message.role == "developer":
            fields["role"] = "system"
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = _object_or_text(call["function"]["arguments"])
        made.append(fields)
    return made


def _object_or_text(arguments: str) -> Any:
    """Templates print arguments as JSON themselves, so they want the object; broken JSON stays text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def tool_dicts(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them."""
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


class Reader:
    """The words of one model. Used on the event loop."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, workers: Workers, *, reads_control_tokens: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._workers = workers
        self._reads_control_tokens = reads_control_tokens

    async def render(
        self,
        body: ChatBody | TokenizeBody | TemplateBody,
        *,
        limit_tokens: int,
        documents: Sequence[Mapping[str, Any]] | None = None,
        has_tools: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Run the chat template. Raises TemplateError, or PromptTooLong for far more than limit_tokens.

        What the template would drop is refused.

        kwargs: variables of the template besides the body's own.
        """
        for name, given in (("tools", body.tools if has_tools else None), ("documents", documents)):
            if given and not self.template.names(name):
                raise TemplateError(
                    f"{name} has {len(given)} entries; the chat template of this model shows none of them",
                    hint="write into a message what the model should know of them",
                    param=name,
                )
        continues = bool(body.continue_final_message)
        adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt

        def rendered() -> RenderedPrompt:
            return self.template.render(
                message_dicts(body.messages or ()),  # 40 ms for 16,384 of them
                tools=tool_dicts(body.tools) if has_tools else None,
                documents=documents,
                add_generation_prompt=adds_prompt,
                continue_final_message=continues,
                kwargs={**(kwargs or {}), **(body.chat_template_kwargs or {})},
                limit_tokens=limit_tokens,
                reads_control_tokens=self._reads_control_tokens,
            )

        return await self._workers.run(rendered)

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

    async def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return await self._workers.run(
            partial(self.tokenizer.decode, list(token_ids), skip_special_tokens=skip_special_tokens)
        )
