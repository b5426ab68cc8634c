"""What comes of texts that were read for their states: `Embedding` and `Scores`, with their accounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diptych.engine.encoder import Encoder, Ranking
from diptych.engine.engine import OpenRequest
from diptych.ground.errors import ExecutorError
from diptych.ground.events import Timings, Usage
from diptych.metrics import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """A prompt that was read and not answered: tokens by source, and its time, of which prefill is all but the queue."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    usage: Usage
    timings: Timings
    record: RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding(ReadPrompt):
    """A text as a vector. vector: [D] fp32, or as many dimensions as were asked for."""

    vector: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How well documents fit queries, one number per pair, and the prompts that were read for it."""

    scores: tuple[float, ...]
    prompts: tuple[ReadPrompt, ...]


def state_of(opened: OpenRequest) -> bytes:
    """What a finished request was for. Raises the error that it ended with."""
    if opened.state is None:
        raise opened.error or ExecutorError("the prompt was not read to its end")
    return opened.state


def embedding(opened: OpenRequest, encoder: Encoder, dimensions: int | None) -> Embedding:
    """The vector of a finished request, with its account."""
    vector = encoder.vector(state_of(opened), dimensions)
    read = read_prompt(opened)
    return Embedding(
        request_id=read.request_id,
        prompt_token_ids=read.prompt_token_ids,
        usage=read.usage,
        timings=read.timings,
        record=read.record,
        vector=vector,
    )


def scores(opened: Sequence[OpenRequest], ranking: Ranking) -> Scores:
    """The scores of a ranking whose requests are finished."""
    found = ranking.scores([state_of(one) for one in opened])
    return Scores(scores=tuple(found), prompts=tuple(read_prompt(one) for one in opened))


def read_prompt(opened: OpenRequest) -> ReadPrompt:
    """The account of a finished request."""
    record = opened.record
    assert record is not None, opened.request.request_id
    return ReadPrompt(
        request_id=opened.request.request_id,
        prompt_token_ids=opened.request.prompt_token_ids,
        usage=record.usage(),
        timings=record.timings(),
        record=record,
    )
