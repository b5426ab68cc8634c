"""`LLM`: prompts in, completions out, on the caller's thread. (`AsyncLLM`, for many clients at once: `async_llm.py`.)

>>> llm = LLM("bundled", max_context_tokens=2048)  # doctest: +SKIP
>>> llm.generate(["Once upon a time"], SamplingParams(max_tokens=20, temperature=0.0))[0].choices[0].text  # doctest: +SKIP
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from diptych.engine.encoded import Classification, Embedding, Scores, classification, embedding, scores
from diptych.engine.encoder import NO_TOKENS, Encoder, PooledPrompt, Text
from diptych.engine.engine import Engine, OpenRequest, OutputDelta, ignore_delta
from diptych.engine.holder import EngineHolder
from diptych.engine.load import LoadedModel, Progress, make_engine, opened
from diptych.engine.prompts import Prompt, prompt_list
from diptych.engine.text.template import RenderedPrompt
from diptych.ground.bounds import counted, entries, text
from diptych.ground.config import EngineConfig
from diptych.ground.errors import CapacityError, EngineError, RequestError
from diptych.ground.events import Timings, Usage
from diptych.ground.phase import FinishReason
from diptych.ground.request import Request, SamplingParams
from diptych.ground.step import TokenLogprobs
from diptych.metrics import RequestRecord

logger = logging.getLogger("diptych.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChoice:
    """One of a request's n answers. `token_ids` includes the EOS or stop token, `text` does not."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request with its account: tokens by source and time by phase.

    error: why its choices ended with FinishReason.ERROR, when they did; other requests of the call are untouched.
    adapter: the name of the one that answered; None: the model as it is.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[CompletionChoice, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    record: RequestRecord
    error: EngineError | None = None
    adapter: str | None = None


class LLM:
    """An engine for programs: give it prompts, wait for completions. Several threads take turns, call by call.

    >>> LLM("bundled", weights="int8", max_context_tokens=8192)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "bundled",
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        engine: Engine | None = None,
        **settings: Any,
    ) -> None:
        """Load a checkpoint ('bundled', a folder, or a hub name) unless it is loaded, and allocate its KV pool.

        settings: fields of SchedulerConfig, ComputeConfig and EngineConfig by name; they stand over `config`.
        engine: one that is made already, such as one over a cluster's door.
        """
        self.loaded, self.config = opened(model, config, settings, progress)
        self._held = EngineHolder(
            self.loaded,
            make_engine(self.loaded, self.config) if engine is None else engine,
            owns_model=not isinstance(model, LoadedModel),
        )
        self._turns = threading.RLock()  # re-entrant, as on_delta may ask this engine something too
        self._calls = 0  # that run, one within the other

    @property
    def engine(self) -> Engine:
        """What runs the requests. CapacityError after `close`."""
        return self._held.engine

    def close(self) -> None:
        """Give everything back: KV memory, threads, weights, rank processes. A model given as a LoadedModel stays loaded.

        Waits for other threads' calls; a second time does nothing. What is asked afterwards raises CapacityError.
        """
        with self._turns:
            if self._calls > 0:
                raise CapacityError("close was called by on_delta of a call that still runs", hint="close after it")
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def from_pretrained(cls, model: str | Path = "bundled", *arguments: Any, **settings: Any) -> LLM:
        """The same by another name, as in `transformers`."""
        return cls(model, *arguments, **settings)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> RenderedPrompt:
        """The model's chat template over messages, with the token range of each segment."""
        return self.loaded.template.render(messages, **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        on_delta: Callable[[int, OutputDelta], None] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Run all prompts together and return their completions in order.

        prompts: one prompt or several; a prompt is text, token ids, or a RenderedPrompt.
        adapter: the name of a loaded adapter for all of them, or one name or None for each.
        on_delta(prompt index, delta) is called as text appears. is_cancelled() is asked before each step; once true, what
        is left is aborted and comes back with what it has. A refused prompt raises before anything runs.
        """
        asked = prompt_list(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(asked)
        settings = entries("sampling", sampling, RequestError, rule="SamplingParams, or a list of them for the prompts")
        if len(settings) != len(asked):
            raise RequestError(
                f"{counted(len(asked), 'prompt')} came with {len(settings)} sampling settings", param="sampling"
            )
        names = (
            [adapter] * len(asked)
            if adapter is None or isinstance(adapter, str)
            else list(entries("adapter", adapter, RequestError, rule="a name, or one name or None for each prompt"))
        )
        if len(names) != len(asked):
            raise RequestError(
                f"{counted(len(asked), 'prompt')} came with {counted(len(names), 'adapter')}", param="adapter"
            )
        arrival_s = self.engine.clock.now_s()
        with self._turns:
            requests = [
                self.engine.make_request(prompt, params, arrival_s=arrival_s, adapter=name)  # type: ignore[arg-type]
                for prompt, params, name in zip(asked, settings, names, strict=True)
            ]
            return self._run(requests, on_delta, is_cancelled)

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter from its folder or hub name, to be asked for by `name`. LoadError, ConfigError, CapacityError."""
        with self._turns:
            adapters = self.engine.adapters
            adapters.add(name, adapters.read(name, path, takes_hub_names=True))

    def unload_lora(self, name: str) -> None:
        """Give its memory back. RequestError where it is not loaded."""
        with self._turns:
            self.engine.adapters.remove(name)

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt_name: str | None = None,
        instruction: str | None = None,
        dimensions: int | None = None,
        adapter: str | None = None,
    ) -> list[Embedding]:
        """The vector of each text, in order: a prefill without a decode. A text may be given as token ids.

        prompt_name: an instruction that the model knows by name (query); instruction: one in words, put before every text.
        dimensions: cut vectors to so many numbers (Matryoshka). adapter: the name of a loaded adapter.
        Raises RequestError, PromptTooLong before anything runs.
        """
        encoder = self._encoder
        if encoder.embedding is None:
            raise RequestError(encoder.not_made_for("vectors"), hint="ask for scores, or labels")
        encoder.check_dimensions(dimensions)
        if instruction is not None and prompt_name is not None:
            raise RequestError("prompt_name and instruction exclude each other", param="instruction")
        asked = (
            encoder.instruction(prompt_name) if instruction is None else text("instruction", instruction, RequestError)
        )
        given: list[Text] = prompt_list(texts)  # type: ignore[assignment]
        prompts = [encoder.prompt(text, instruction=asked) for text in given]
        return [embedding(opened, encoder, dimensions) for opened in self._read(prompts, adapter)]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        adapter: str | None = None,
    ) -> Scores:
        """How well documents fit a query, by the model's judgement or, of a model that embeds, by cosine.

        One query with every document, or as many queries as documents, pair by pair. instruction: what is asked. adapter: the
        name of a loaded adapter.
        """
        queries, texts = _texts("query", query), _texts("documents", documents)
        if instruction is not None:
            text("instruction", instruction, RequestError)
        queries = queries * len(texts) if len(queries) == 1 else queries
        if len(queries) != len(texts):
            raise RequestError(
                f"{len(queries)} queries came with {len(texts)} documents; give one query, or as many", param="query"
            )
        ranking = self._encoder.ranking(list(zip(queries, texts, strict=True)), instruction=instruction)
        return scores(self._read(ranking.prompts, adapter), ranking)

    def classify(
        self,
        texts: Text | Sequence[Text],
        pairs: str | Sequence[str] | None = None,
        *,
        instruction: str | None = None,
        adapter: str | None = None,
    ) -> list[Classification]:
        """Which of the labels of its classification head each text has, and how likely each label is.

        pairs: second texts (hypotheses behind a premise): one text with each of them, or as many as texts. A text alone may be
        given as token ids. instruction: put before every text. adapter: the name of a loaded adapter.
        """
        encoder = self.loaded.encoder
        if encoder is None:
            raise RequestError(
                "this model was loaded to write text, and tells no labels", hint="load one ...ForSequenceClassification"
            )
        if instruction is not None:
            text("instruction", instruction, RequestError)
        first: list[Text] = prompt_list(texts)  # type: ignore[assignment]
        second: list[str] | list[None] = [None] * len(first) if pairs is None else _texts("pairs", pairs)
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second):
            raise RequestError(
                f"{counted(len(first), 'text')} came with {len(second)} pairs; give one text, or as many", param="pairs"
            )
        prompts = [encoder.to_classify(a, b, instruction=instruction) for a, b in zip(first, second, strict=True)]
        return [classification(opened, encoder) for opened in self._read(prompts, adapter)]

    @property
    def _encoder(self) -> Encoder:
        encoder = self.loaded.encoder
        if encoder is None:
            raise RequestError("this model was loaded to write text", hint="load it with task='embed' or task='score'")
        return encoder

    def _read(self, prompts: Sequence[PooledPrompt], adapter: str | None) -> list[OpenRequest]:
        arrival_s, make = self.engine.clock.now_s(), self.engine.make_request
        with self._turns:
            requests = [
                make(one.rendered, NO_TOKENS, arrival_s=arrival_s, adapter=adapter, pooling=one.pooling)
                for one in prompts
            ]
            return [opened for opened, _ in self._finished(requests, None, None)]

    def _run(
        self,
        requests: Sequence[Request],
        on_delta: Callable[[int, OutputDelta], None] | None,
        is_cancelled: Callable[[], bool] | None,
    ) -> list[Completion]:
        return [completion(one, parts) for one, parts in self._finished(requests, on_delta, is_cancelled)]

    def _finished(
        self,
        requests: Sequence[Request],
        on_delta: Callable[[int, OutputDelta], None] | None,
        is_cancelled: Callable[[], bool] | None,
    ) -> list[tuple[OpenRequest, list[OutputDelta]]]:
        deltas: list[list[OutputDelta]] = [[] for _ in requests]
        opened: list[OpenRequest] = []
        self._calls += 1
        try:
            for number, request in enumerate(requests):
                opened.append(self.engine.submit(request, _collector(number, deltas[number], on_delta)))
            while not all(one.is_finished for one in opened):
                if is_cancelled is not None and is_cancelled():
                    for request in requests:
                        self.engine.abort(request.request_id)
                else:
                    self.engine.step()
        except BaseException as error:
            # a refusal half-way, an error in on_delta, Ctrl-C at any moment: nothing of this call may stay in the engine
            for one in opened:
                one.on_delta = ignore_delta
            with ExitStack() as ends:  # each of them, whatever is raised by others who are told on the way
                for request in requests:
                    ends.callback(self.engine.abort, request.request_id)
                self.engine.stepper.abort(error)
            raise
        finally:
            self._calls -= 1
        return list(zip(opened, deltas, strict=True))


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    """One text or several, always as a list."""
    some = [given] if isinstance(given, str) else entries(name, given, RequestError, rule="a text, or a list of texts")
    return [text(name, one, RequestError) for one in some]


def _collector(
    number: int, parts: list[OutputDelta], on_delta: Callable[[int, OutputDelta], None] | None
) -> Callable[[OutputDelta], None]:
    def collect(delta: OutputDelta) -> None:
        parts.append(delta)
        if on_delta is not None:
            on_delta(number, delta)

    return collect


def completion(opened: OpenRequest, deltas: Sequence[OutputDelta]) -> Completion:
    """Put a finished request's deltas together."""
    record = opened.record
    assert record is not None, opened.request.request_id
    choices = []
    for index in range(opened.request.sampling.n):
        parts = [delta for delta in deltas if delta.index == index]
        last = parts[-1]
        assert last.finish_reason is not None, opened.request.request_id
        choices.append(
            CompletionChoice(
                index=index,
                text="".join(part.text for part in parts),
                token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
                logprobs=tuple(entry for part in parts for entry in part.logprobs),
                finish_reason=last.finish_reason,
                stop_reason=last.stop_reason,
            )
        )
    return Completion(
        request_id=opened.request.request_id,
        prompt_token_ids=opened.request.prompt_token_ids,
        choices=tuple(choices),
        usage=record.usage(),
        timings=record.timings(),
        prompt_logprobs=tuple(opened.prompt_logprobs),
        record=record,
        error=opened.error,
        adapter=None if opened.request.adapter is None else opened.request.adapter.name,
    )
