"""The event log: the one record from which every metric is derived (`diptych.metrics`).

Every event carries `at_s` of one monotonic clock. Control emits them; nothing else invents times.
Those that every step makes are named tuples, which take a quarter of a frozen dataclass's time to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from diptych.ground.errors import EngineError
from diptych.ground.phase import FinishReason
from diptych.ground.shape import StepShape
from diptych.ground.step import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalEvent:
    """A request was accepted by `submit`. `at_s` is the request's arrival_s (before any queueing)."""

    request_id: str
    at_s: float
    prompt_tokens: int
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """A prefill chunk of this request was planned. Decode chunks are in the step's StepBeginEvent.

    `cached_tokens` > 0 only where a prefix hit moved the sequence forward.

    `index` is the choice (0 .. n-1); is_recompute marks tokens whose KV existed before a preemption, cached or not.
    A chunk that goes on from a recompute into new tokens gives two events of the same step, the recompute first.
    """

    request_id: str
    index: int
    step_id: int
    at_s: float
    chunk_tokens: int
    cached_tokens: int
    context_tokens: int  # tokens before the chunk
    is_recompute: bool = False


class StepBeginEvent(NamedTuple):
    """A step starts. `shape` is the plan's; decode_request_ids names whose its decode chunks are, in the plan's order."""

    step_id: int
    at_s: float
    shape: StepShape
    decode_request_ids: tuple[str, ...] = ()
    predicted_s: float | None = None

    @property
    def prefill_tokens(self) -> int:
        """Tokens of its prefill chunks."""
        return self.shape.prefill_tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens of its decode chunks."""
        return self.shape.decode_tokens


class StepEndEvent(NamedTuple):
    """The step's results are committed."""

    step_id: int
    at_s: float
    device_s: float
    host_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptEvent:
    """The sequence lost its blocks and waits to be computed again."""

    request_id: str
    index: int
    at_s: float
    computed_tokens: int


class TokenEvent(NamedTuple):
    """One output token, handed out at `at_s`. `position` counts output tokens from 0."""

    request_id: str
    index: int  # type: ignore[assignment]  # in place of tuple.index
    at_s: float
    token_id: int
    position: int
    step_id: int
    logprobs: TokenLogprobs | None = None


class DraftEvent(NamedTuple):
    """A step verified `drafted_tokens` guesses at a sequence's next tokens; `accepted_tokens` of them were handed out."""

    request_id: str
    index: int  # type: ignore[assignment]  # in place of tuple.index
    at_s: float
    step_id: int
    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobsEvent:
    """Log-probabilities of prompt tokens [start, start + len(entries))."""

    request_id: str
    at_s: float
    start: int
    entries: tuple[TokenLogprobs | None, ...]


class StateEvent(NamedTuple):
    """A prompt of which only a state was wanted is read: [D] fp32 in native order, None from an executor without a model."""

    request_id: str
    at_s: float
    step_id: int
    state: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEvent:
    """One choice ended; after the last choice's, the request is over. Usage is final then.

    stop_token_id: the one that ended it, when one did. error: what it failed of, when it alone did.
    """

    request_id: str
    index: int
    at_s: float
    reason: FinishReason
    output_tokens: int
    stop_token_id: int | None = None
    error: EngineError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    """A prompt that another engine was to read has come, as far as it comes; what is left of it is read here.

    Tokens whose keys and values are here now: cached_tokens were before, transferred_tokens came, recomputed_tokens count in
    neither, having been accounted for on a third engine. queue_s, read_s: until the other engine began, and from then until
    it had read all of it; begin_s: when it was asked; predicted_s: what was expected of the steps it read in. None: it never
    said so.
    """

    request_id: str
    at_s: float
    cached_tokens: int
    transferred_tokens: int
    recomputed_tokens: int = 0
    begin_s: float | None = None
    queue_s: float | None = None
    read_s: float | None = None
    predicted_s: float | None = None


Event = (
    ArrivalEvent
    | ScheduledEvent
    | StepBeginEvent
    | StepEndEvent
    | PreemptEvent
    | TokenEvent
    | DraftEvent
    | PromptLogprobsEvent
    | StateEvent
    | TransferEvent
    | FinishEvent
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request by source: computed + cached + transferred + remaining = prompt, whatever happened on the way.

    transferred_tokens were read by another engine, whose keys and values came here.
    remaining_tokens are prompt tokens that a request ended too early to read; 0 as soon as it has an output token.
    The prompt of a request with n > 1 counts once, as choice 0 reads it.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    remaining_tokens: int = 0
    transferred_tokens: int = 0
    recomputed_tokens: int = 0  # had again after preemption, computed or found cached; never counted as cached
    reasoning_tokens: int = 0
    drafted_tokens: int = 0  # guessed ahead and verified; accepted ones are output tokens, the others were rejected
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations of one request, from events alone. queue + prefill + transfer = ttft; with decode they are e2e.

    transfer_s: its prompt was read by another engine, and its keys and values were still on their way.
    ttft_s is None when no token was ever handed out; tpot_s needs two tokens.
    stall_s: the part of decode spent in steps lengthened by other requests' prefill.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    e2e_s: float
    ttft_s: float | None
    tpot_s: float | None
    itl_s: tuple[float, ...]
    stall_s: float
    n_preemptions: int
    transfer_s: float = 0.0
