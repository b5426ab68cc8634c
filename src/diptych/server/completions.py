"""`POST /v1/completions`: text or token ids in, text out.

Owns the shape of the answer and of its stream; what a request goes through is in `generation`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diptych.ground.clock import wall_time_s
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams
from diptych.ground.step import TokenLogprobs
from diptych.server.accounting import running_usage
from diptych.server.generation import (
    Generation,
    OpenedRequest,
    StepDelta,
    asked,
    close_all,
    sampling_params,
)
from diptych.server.http.answers import Fragments
from diptych.server.http.errors import ApiError, of_stream
from diptych.server.http.sse import DONE, error_event, event
from diptych.server.logprobs import TextOffsets, finite
from diptych.server.progress import WatchedSteps, open_watched
from diptych.server.schema import CompletionBody
from diptych.server.structured import constraint_field, structured_spec
from diptych.server.values import MAX_PROMPTS

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(slots=True)
class _Choice:
    """What has been made of one choice so far."""

    prompt: int
    offsets: TextOffsets
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: Fragments = field(default_factory=Fragments)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    is_begun: bool = False  # in a stream


class CompletionAnswer:
    """One body on its way to an answer. `opened` is set by `start`; `close` must follow in every case."""

    def __init__(self, generation: Generation, body: CompletionBody, *, arrival_s: float) -> None:
        self._generation = generation
        self._body = body
        self._asked = asked(generation, body, prefix="cmpl-", arrival_s=arrival_s, constraint=constraint_field(body))
        self._created = int(wall_time_s())
        self._echoes: list[str] = []
        self.opened: list[OpenedRequest] = []
        self._steps: WatchedSteps | None = None

    async def start(self) -> None:
        """Tokenise, admit and submit. Raises ApiError or EngineError; then nothing is left open."""
        body, generation = self._body, self._generation
        if body.asked_tokens[0] == 0 and not body.echo:  # lm-eval asks for the prompt's log-probabilities alone
            raise ApiError(400, "max_tokens is 0; it must be at least 1 (0 only with echo)", param="max_tokens")
        n_choices = len(body.prompt) * (body.n or 1)
        if n_choices > MAX_PROMPTS * 4:
            raise ApiError(400, f"{n_choices} choices are asked for; at most {MAX_PROMPTS * 4} are made", param="n")
        prompts = await generation.reader.ids(
            body.prompt,
            limit_tokens=generation.context_tokens,
            add_special_tokens=body.add_special_tokens is not False,
        )
        if body.echo:
            self._echoes = [
                sent if isinstance(sent, str) else await generation.reader.text(ids)
                for sent, ids in zip(body.prompt, prompts, strict=True)
            ]
        structured = structured_spec(body)
        max_tokens, limit_param = body.asked_tokens
        sampling: list[SamplingParams] = [
            sampling_params(
                body,
                max_tokens=generation.output_limit(
                    max_tokens, default=DEFAULT_MAX_TOKENS, prompt_tokens=len(ids), param=limit_param
                ),
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
                structured=structured,
            )
            for ids in prompts
        ]
        self.opened, self._steps = await open_watched(
            generation.desk, prompts, sampling, self._asked, wants_progress=bool(body.return_progress)
        )

    def close(self) -> None:
        """Abort what still runs."""
        if self._steps is not None:
            self._steps.close()
        close_all(self.opened)

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        choices = self._new_choices()
        async for steps in self._started:
            for step in steps:
                self._add(choices[step.prompt * self._n + step.index], step)

        def whole() -> list[dict[str, Any]]:
            return [self._whole(number, choice) for number, choice in enumerate(choices)]

        made = await self._generation.workers.run(whole) if self._body.is_answered_at_length else whole()
        return self._frame(made) | self._accounts()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events: one per step and choice, usage and timings on the last, then [DONE]."""
        choices = self._new_choices()
        n_open, n_made = len(choices), 0
        n_prompt = sum(len(one.handle.request.prompt_token_ids) for one in self.opened)
        options = self._body.stream_options
        includes_usage = options is not None and bool(options.include_usage)
        counts_usage = options is not None and bool(options.continuous_usage_stats)
        try:
            async for told in self._started.progress():
                yield event(self._frame([]) | {"prompt_progress": told.json()})
            async for steps in self._started:
                for step in steps:
                    number = step.prompt * self._n + step.index
                    n_open -= step.finish_reason is not None
                    part = partial(self._part, number, choices[number], step)
                    # with echo the first one holds the whole prompt
                    is_long = bool(self._body.echo) and self._body.is_answered_at_length
                    data = self._frame([await self._generation.workers.run(part) if is_long else part()])
                    n_made += len(step.token_ids)
                    if counts_usage:
                        data |= running_usage(n_prompt, n_made)
                    if n_open == 0 and not includes_usage:
                        self.close()
                        data |= self._accounts()
                    yield await self._generation.workers.run(event, data) if is_long else event(data)
            if includes_usage:
                yield event(self._frame([]) | self._accounts())
            yield DONE
        except Exception as error:
            yield error_event(of_stream(error))
        finally:
            self.close()

    @property
    def _started(self) -> WatchedSteps:
        assert self._steps is not None, "not started"
        return self._steps

    @property
    def _n(self) -> int:
        return self._body.n or 1

    def _new_choices(self) -> list[_Choice]:
        tokenizer, n_choices = self._generation.reader.tokenizer, len(self.opened) * self._n
        return [_Choice(number // self._n, TextOffsets(tokenizer)) for number in range(n_choices)]

    def _add(self, choice: _Choice, step: StepDelta) -> None:
        choice.text.append(step.text)
        choice.token_ids += step.token_ids
        if self._body.logprobs is not None:
            token_logprobs, top_logprobs = self._weighed(step.logprobs)
            choice.token_logprobs += token_logprobs
            choice.top_logprobs.add(top_logprobs)
        if step.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = step.finish_reason, step.stop_reason

    def _whole(self, number: int, choice: _Choice) -> dict[str, Any]:
        text, ids = "".join(choice.text), choice.token_ids
        token_logprobs, top_logprobs = choice.token_logprobs, choice.top_logprobs
        handle = self.opened[choice.prompt].handle
        prompt_ids = list(handle.request.prompt_token_ids)
        if self._body.echo:
            text = self._echoes[choice.prompt] + text
            of_prompt, top_of_prompt = self._weighed(handle.prompt_logprobs)
            token_logprobs, top_logprobs = of_prompt + token_logprobs, Fragments()
            top_logprobs.add(top_of_prompt)
            top_logprobs.parts += choice.top_logprobs.parts
            ids = prompt_ids + ids
        shown = self._shape(number, text, choice)
        if self._body.logprobs is not None:
            shown["logprobs"] = self._logprobs(choice, ids, token_logprobs, top_logprobs)
        if self._body.return_token_ids:
            shown["prompt_token_ids"], shown["token_ids"] = prompt_ids, choice.token_ids
        return shown

    def _part(self, number: int, choice: _Choice, step: StepDelta) -> dict[str, Any]:
        is_first, choice.is_begun = not choice.is_begun, True
        text, ids = step.text, step.token_ids
        entries: list[TokenLogprobs | None] = list(step.logprobs)
        handle = self.opened[choice.prompt].handle
        if self._body.echo and is_first:
            text = self._echoes[choice.prompt] + text
            entries = [*handle.prompt_logprobs, *entries]
            ids = [*handle.request.prompt_token_ids, *ids]
        if step.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = step.finish_reason, step.stop_reason
        choice.token_ids += step.token_ids
        shown = self._shape(number, text, choice)
        if self._body.logprobs is not None:
            shown["logprobs"] = self._logprobs(choice, ids, *self._weighed(entries))
        if self._body.return_token_ids:
            shown["token_ids"] = step.token_ids
            if is_first:
                shown["prompt_token_ids"] = list(handle.request.prompt_token_ids)
        return shown

    def _shape(self, number: int, text: str, choice: _Choice) -> dict[str, Any]:
        return {
            "index": number,
            "text": text,
            "logprobs": None,
            "finish_reason": None if choice.finish_reason is None else choice.finish_reason.value,
            "stop_reason": choice.stop_reason,
        }

    def _weighed(
        self, entries: Sequence[TokenLogprobs | None]
    ) -> tuple[list[float | None], list[dict[str, float] | None]]:
        """The log-probability of each token, and its alternatives by their text."""
        name = self._name
        return (
            [None if entry is None else finite(entry.logprob) for entry in entries],
            [
                None
                if entry is None
                else {name(one): finite(logprob) for one, logprob in (*entry.top, (entry.token_id, entry.logprob))}
                for entry in entries
            ],
        )

    def _logprobs(
        self,
        choice: _Choice,
        ids: Sequence[int],
        token_logprobs: Sequence[float | None],
        top_logprobs: Sequence[dict[str, float] | None] | Fragments,
    ) -> dict[str, Any]:
        """OpenAI's four parallel lists. A token's text may be half a character; it shows as U+FFFD then."""
        return {
            "tokens": [self._name(token_id) for token_id in ids],
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": choice.offsets.push(ids),
        }

    def _name(self, token_id: int) -> str:
        return self._generation.reader.tokenizer.token_bytes(token_id).decode(errors="replace")

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._asked.response_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._asked.served.name,
            "system_fingerprint": self._asked.served.fingerprint,
            "choices": choices,
        }

    def _accounts(self) -> dict[str, Any]:
        accountant = self._generation.accountant
        accounts = [accountant.account(one.handle) for one in self.opened]
        return {"usage": accountant.usage(accounts), "timings": accountant.timings(accounts)}
