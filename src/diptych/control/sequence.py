"""Control's ledger of one sequence (one choice of one request).

A sequence has *known* tokens (prompt and output so far) and *computed* tokens (those whose KV is in its blocks); a
chunk moves computed forward. The newest known token never has KV, so computed_tokens <= known_tokens - 1 between steps.

    # [0, computed_tokens)             KV is in block_ids
    # [computed_tokens, known_tokens)  to be computed: one token in decode, more in prefill
    # [0, peak_computed_tokens)        had KV at some time: computing it again is a recompute, never a cache hit
"""

from __future__ import annotations

from diptych.control.speculation import Speculation
from diptych.ground.errors import IllegalMove
from diptych.ground.phase import MOVES, FinishReason, Status
from diptych.ground.request import Pool, Request


class Sequence:
    """Mutable; owned by `EngineCore` and changed only by it, its books and its scheduler."""

    __slots__ = (
        "adapter",
        "block_ids",
        "branch_tokens",
        "coming",
        "computed_tokens",
        "digests",
        "drafted",
        "finish_reason",
        "hands_off",
        "has_forked",
        "has_started",
        "index",
        "is_in_flight",
        "is_unborn",
        "key",
        "logprobs_tokens",
        "max_output_tokens",
        "parked_at_drops",
        "peak_computed_tokens",
        "place",
        "promised_blocks",
        "prompt_tokens",
        "request",
        "rolling",
        "seed",
        "seq_id",
        "serials",
        "speculation",
        "status",
        "stop_ids",
        "table_sent",
        "token_ids",
    )

    def __init__(
        self, *, seq_id: int, index: int, request: Request, rank: float, seed: int, max_output_tokens: int
    ) -> None:
        self.seq_id = seq_id
        self.index = index
        self.request = request
        self.adapter = None if request.adapter is None else request.adapter.shape  # asked for with every chunk
        self.key = (rank, seq_id)
        self.seed = seed
        self.max_output_tokens = max_output_tokens
        self.prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        sampling = request.sampling
        eos = () if sampling.ignore_eos else request.eos_token_ids
        self.stop_ids = frozenset(eos) | frozenset(sampling.stop_token_ids)
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.computed_tokens = 0
        self.peak_computed_tokens = 0
        self.logprobs_tokens = 0  # prompt log-probabilities already handed out
        self.block_ids: list[int] = []
        self.table_sent = 0  # leading entries of block_ids that the executor knows
        self.promised_blocks = 0  # blocks its remaining prefill will still take
        self.digests: list[bytes] = []  # chain of the full blocks of token_ids, as far as needed until now
        self.serials: list[int | None] = []  # prefix-index entry of each computed full block
        self.place: int | None = None  # of its state while it runs, where the model has states (`StatePool`)
        self.coming: list[tuple[int, int]] = []  # (tokens, place): states that the step in flight leaves behind so many
        self.drafted: list[tuple[int, int]] = []  # (rows, place): those that it leaves behind each guess
        self.rolling: int | None = None  # serial of the block behind which its answer's latest state is kept
        self.branch_tokens = 0  # so many of its tokens were cached when it came, beyond those that have a state
        self.speculation: Speculation | None = None  # from its first decode step on, where the engine speculates
        self.has_started = False  # its SequenceStart was sent
        self.has_forked = False
        self.hands_off = False  # only its prompt is read here; another engine answers
        self.is_in_flight = False
        self.is_unborn = False  # waits for choice 0 of its request to read the prompt
        self.parked_at_drops: int | None = None  # pool.n_drops when admission last failed for want of blocks

    @property
    def known_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens handed out so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def waiting_tokens(self) -> int:
        """What this sequence weighs in the waiting line: the prompt counts once per request, for choice 0."""
        return self.max_output_tokens + (self.prompt_tokens if self.index == 0 else 0)

    @property
    def is_whole(self) -> bool:
        """Whether its prompt is read in one chunk or not at all: keys and values of each token depend on all of it."""
        pooling = self.request.pooling
        return pooling is not None and pooling.both_ways

    @property
    def findable_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache: never the last, and none of which more than KV is wanted."""
        request = self.request
        if self.is_whole:
            return 0
        if self.index == 0 and request.sampling.prompt_logprobs is not None:
            return 0
        pooling = request.pooling
        if pooling is not None and pooling.pool is Pool.MEAN:
            return min(self.known_tokens - 1, pooling.first)
        return self.known_tokens - 1

    def samples_at(self, end: int) -> bool:
        """Whether a prefill chunk that ends there draws a token."""
        return end == len(self.token_ids) and not self.request.only_reads

    def stop_after(self, token_id: int, *, is_complete: bool) -> tuple[FinishReason | None, int | None]:
        """Why it ends with this token, if it does, and the stop token that says so. is_complete: its grammar takes no more."""
        if token_id in self.stop_ids and self.output_tokens >= self.request.sampling.min_tokens:
            return FinishReason.STOP, token_id
        if is_complete:
            return FinishReason.STOP, None
        if self.output_tokens >= self.max_output_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def move(self, status: Status) -> None:
        """Change status; IllegalMove when MOVES does not allow it."""
        if status not in MOVES[self.status]:
            raise IllegalMove(f"sequence {self.seq_id} cannot go from {self.status.value} to {status.value}")
        self.status = status

    def advance(self, computed_tokens: int) -> None:
        """Set how far KV reaches, and remember the peak."""
        self.computed_tokens = computed_tokens
        if computed_tokens > self.peak_computed_tokens:
            self.peak_computed_tokens = computed_tokens
