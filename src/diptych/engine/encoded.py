"""What comes of texts that were read for their states: `Embedding`, `Scores` and `Classification`, with their accounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
class Classification(ReadPrompt):
    """Which label a text has, and how likely each is. label: the likeliest, of equals the first; odds: of `labels`, in order:
    probabilities, or where the model was trained for numbers (`regression`) these.
    """

    label: str
    labels: tuple[str, ...]
    odds: tuple[float, ...]


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
    return Embedding(**_account(opened), vector=vector)


def classification(opened: OpenRequest, encoder: Encoder) -> Classification:
    """The label of a finished request, with its account."""
    odds = encoder.odds(state_of(opened))
    assert encoder.labels is not None
    names = encoder.labels.names
    return Classification(**_account(opened), label=names[int(odds.argmax())], labels=names, odds=tuple(odds.tolist()))


def scores(opened: Sequence[OpenRequest], ranking: Ranking) -> Scores:
    """The scores of a ranking whose requests are finished."""
    found = ranking.scores([state_of(one) for one in opened])
    return Scores(scores=tuple(found), prompts=tuple(read_prompt(one) for one in opened))


def read_prompt(opened: OpenRequest) -> ReadPrompt:
    """The account of a finished request."""
    return ReadPrompt(**_account(opened))


def _account(opened: OpenRequest) -> dict[str, Any]:
    record = opened.record
    assert record is not None, opened.request.request_id
    return {
        "request_id": opened.request.request_id,
        "prompt_token_ids": opened.request.prompt_token_ids,
        "usage": record.usage(),
        "timings": record.timings(),
        "record": record,
    }
