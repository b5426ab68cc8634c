"""One turn of a conversation: rendered, constrained, submitted, and read as a stream of typed parts.

Every chat protocol is a shape around this: it makes a `TurnRequest` of its body and JSON of the `TurnDelta`s.

    turn = Turn(generation, request, asked)
    await turn.start()                                   # admitted and submitted, or nothing is left open
    async for deltas in turn.deltas(): ...               # TextPart, ThinkingPart, ToolCallDelta; the finish at the end
    turn.account()                                       # tokens by source, time by phase
    turn.close()                                         # in every case
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diptych.engine.text.forced_calls import calls_or_json_spec, strict_calls_spec, tool_call_spec
from diptych.engine.text.reasoning import Opening, opening_of_prompt
from diptych.engine.text.template import RenderedPrompt
from diptych.ground.events import Usage
from diptych.ground.request import FreeReasoning, SamplingParams, StructuredSpec
from diptych.server.accounting import Account
from diptych.server.generation import Asked, Generation, OpenedRequest, close_all
from diptych.server.http.errors import ApiError
from diptych.server.progress import PromptProgress, WatchedSteps, open_watched
from diptych.server.turn_parts import ChoiceParts, TurnDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that a turn offers, as templates expect them, and whether one must be called.

    must_call: the output is held to calls by grammar; of the tool `name`, where there is one. Where it need not call and a
    tool is `strict`, the calls that it makes are held to their schemas.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    name: str | None = None
    is_parallel: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether calls must fit, as soon as the model makes one."""
        return any(tool["function"].get("strict") is True for tool in self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What a protocol asks of a turn.

    render: the prompt for at most so many tokens, by the chat template. continues: the prompt ends within an answer.
    sampling(max_tokens, constraint): how tokens are chosen. max_tokens: None for all the room that the context leaves;
    limit_param: the name that the protocol gives it; is_limit_cut_to_room: more than the room is taken for all of it.
    """

    render: Callable[[int], Any]
    continues: bool
    tool_use: ToolUse
    structured: StructuredSpec | None
    n: int
    max_tokens: int | None
    limit_param: str
    sampling: Callable[[int, StructuredSpec | None], SamplingParams]
    is_limit_cut_to_room: bool = False
    wants_progress: bool = False


class Turn:
    """One turn on its way to its end. `close` must follow `start` in every case."""

    def __init__(self, generation: Generation, request: TurnRequest, asked: Asked) -> None:
        self._generation = generation
        self._request = request
        self._asked = asked
        self._dialect = generation.reader.template.dialect
        self._tags = self._dialect.tags
        self._opened: list[OpenedRequest] = []
        self._steps: WatchedSteps | None = None
        self.choices: list[ChoiceParts] = []

    async def start(self) -> None:
        """Render, admit and submit. Raises ApiError or EngineError; then nothing is left open."""
        generation, request = self._generation, self._request
        rendered: RenderedPrompt = await request.render(generation.context_tokens)
        opening = self._opening_of(rendered.text)
        asked_tokens, room = request.max_tokens, generation.context_tokens - len(rendered.token_ids)
        if request.is_limit_cut_to_room and asked_tokens is not None and asked_tokens > room:
            asked_tokens = None
        max_tokens = generation.output_limit(
            asked_tokens, default=None, prompt_tokens=len(rendered.token_ids), param=request.limit_param
        )
        sampling = request.sampling(max_tokens, self._behind_reasoning(self._constraint(), opening))
        tools = request.tool_use.tools
        self.choices = [
            ChoiceParts(
                dialect=self._dialect,
                opening=opening,
                tools={tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools},
            )
            for _ in range(request.n)
        ]
        self._opened, self._steps = await open_watched(
            generation.desk, [rendered], [sampling], self._asked, wants_progress=request.wants_progress
        )

    async def progress(self) -> AsyncIterator[PromptProgress]:
        """How far the prompt is, until the first delta can be read; nothing unless it was asked for."""
        assert self._steps is not None, "not started"
        async for told in self._steps.progress():
            yield told

    async def deltas(self) -> AsyncIterator[list[TurnDelta]]:
        """What each step adds, by choice. Raises ApiError when the engine failed."""
        assert self._steps is not None, "not started"
        async for steps in self._steps:
            yield [self.choices[step.index].push(step) for step in steps]
        self._note_reasoning()

    def close(self) -> None:
        """Abort what still runs."""
        self._note_reasoning()
        if self._steps is not None:
            self._steps.close()
        close_all(self._opened)

    def account(self) -> Account:
        """The account of the turn, once the last delta has come."""
        self._note_reasoning()
        thinking = [choice.thinking for choice in self.choices]
        return self._generation.accountant.account(self._opened[0].handle, thinking)

    def usage(self) -> Usage:
        """Tokens by source, so far."""
        return self._opened[0].handle.record().usage()

    @property
    def max_tokens(self) -> int:
        """How long the answer may be."""
        return self._opened[0].handle.request.sampling.max_tokens

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """What the template made, as the engine got it."""
        return self._opened[0].handle.request.prompt_token_ids

    def _note_reasoning(self) -> None:
        for one in self._opened:
            one.reasoning_tokens = sum(choice.thinking.tokens for choice in self.choices)

    def _opening_of(self, prompt: str) -> Opening:
        if self._tags is None:
            return Opening.BEHIND
        opening = opening_of_prompt(prompt, self._tags)
        return Opening.BEHIND if self._request.continues and opening is Opening.FREE else opening

    def _constraint(self) -> StructuredSpec | None:
        """The one constraint on the output: asked for as such, a forced call, or calls that must fit.

        JSON is asked of the answer; a model that may call a tool before it still may, and one that must writes no answer.
        """
        spec, use = self._request.structured, self._request.tool_use
        is_json = spec is not None and spec.kind in ("json_schema", "json_object")
        may_call = bool(use.tools) and (is_json or (spec is None and use.is_strict)) and not self._request.continues
        if not use.must_call and not may_call:
            return spec
        if use.must_call and spec is not None and not is_json:
            raise ApiError(
                400,
                f"a forced tool_choice and a {spec.kind} exclude each other: it would hold for the calls, too",
                param="tool_choice",
                code="invalid_value",
            )
        tokenizer, form = self._generation.reader.tokenizer, self._dialect.form
        stops = frozenset(tokenizer.token(token_id) or "" for token_id in tokenizer.eos_token_ids) - {""}
        how: dict[str, Any] = {
            "is_parallel": use.is_parallel,
            "tag_ids": tokenizer.tags_in(form.literals),
            "stops": stops,
        }
        if not use.must_call and spec is not None:
            return calls_or_json_spec(use.tools, form, spec, **how)
        if not use.must_call:
            return strict_calls_spec(use.tools, form, **how)
        return tool_call_spec(use.tools, form, name=use.name, **how)

    def _behind_reasoning(self, spec: StructuredSpec | None, opening: Opening) -> StructuredSpec | None:
        """Let a model that thinks do so before the constraint holds; a grammar that names the tags rules over both."""
        tags = self._tags
        if spec is None or tags is None or opening is Opening.BEHIND:
            return spec
        if spec.kind == "grammar" and (tags[0] in spec.source or tags[1] in spec.source):
            return spec
        begin = None if opening is Opening.INSIDE else tags[0]
        return replace(spec, reasoning=FreeReasoning(begin=begin, end=tags[1]))


class TurnShape:
    """What the shapes around a turn share: it is started once, and closed in every case."""

    def __init__(self, generation: Generation, asked: Asked) -> None:
        self._generation = generation
        self._asked = asked
        self._turn: Turn | None = None

    async def _begin(self, request: TurnRequest) -> None:
        turn = Turn(self._generation, request, self._asked)
        await turn.start()
        self._turn = turn

    def close(self) -> None:
        """Abort what still runs."""
        if self._turn is not None:
            self._turn.close()

    @property
    def _started(self) -> Turn:
        assert self._turn is not None, "not started"
        return self._turn
