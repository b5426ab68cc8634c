"""What goes down to the executor (`StepPlan`) and what comes up (`StepResult`): the only two things that do.

Work per step is O(chunks + chunk tokens + new blocks): a chunk names only the blocks that are new to its sequence, and a
sequence's whole prompt travels once, by reference, in its `SequenceStart`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple, Protocol

from diptych.ground.errors import EngineError
from diptych.ground.phase import Phase
from diptych.ground.request import Pooling, SamplingParams
from diptych.ground.shape import ChunkShape, StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """A sequence the executor has not seen: its prompt (for penalties and grammars) and how to sample it.

    `seed` is already drawn; noise depends on (seed, position) and on nothing else. adapter: its number in the model.
    output_token_ids: what another executor drew of it, so that penalties and grammars stand where they stood there.
    Sent exactly once per sequence, before or in the plan of its first chunk; a preempted sequence is not sent again.
    pooling: no token is ever drawn; the pooled state of the prompt comes up with its last chunk.
    """

    seq_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    adapter: int | None = None
    pooling: Pooling | None = None
    output_token_ids: tuple[int, ...] = ()


class StateUse(NamedTuple):
    """Where a sequence's state lies for a chunk, of models that have states: read from a place (-1: it begins with nothing),
    left in another or the same, and behind so many of the chunk's rows left in places of their own, too (rows, place).
    """

    reads: int
    writes: int
    saves: tuple[tuple[int, int], ...] = ()


class Chunk(NamedTuple):
    """Compute the KV of `token_ids`, which stand at positions [start_pos, start_pos + len(token_ids)).

    new_block_ids replace the sequence's block table from index `first_new_block` on: usually an append; index 0 starts
    the table anew (first chunk, or after preemption); a copied-on-write block is written over its old entry.
    samples: whether the last token's logits are wanted and a token drawn from them. False for all chunks of a prompt but
    the last. A decode chunk is the newest known token and drafts behind it, guesses at what comes next: every row gets
    logits, and row i draws what draft i has to equal.
    wanted_drafts: how many tokens the executor's drafter of this number (`drafter`) is to guess behind what this chunk gives.
    0: none, but it reads the chunk, as it will be asked behind a later one; None: none of them does anything, and each may be
    asked again all the same.
    state: where the sequence's state is; None: the model has none.
    A named tuple, as a step makes one per sequence: a quarter of a frozen dataclass's time.
    """

    seq_id: int
    phase: Phase
    start_pos: int
    token_ids: tuple[int, ...]
    first_new_block: int
    new_block_ids: tuple[int, ...]
    samples: bool
    wanted_drafts: int | None = None
    drafter: int = 0
    state: StateUse | None = None

    @property
    def end_pos(self) -> int:
        """One past the last position; also the context length after this chunk."""
        return self.start_pos + len(self.token_ids)

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        """Guesses to verify; none in a prefill chunk."""
        return self.token_ids[1:] if self.phase is Phase.DECODE else ()

    @property
    def shape(self) -> ChunkShape:
        """What it costs depends on this alone."""
        return ChunkShape(self.phase, len(self.token_ids), self.start_pos, self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy a whole KV block before the step's chunks run (copy on write)."""

    source_block_id: int
    target_block_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: decode chunks first, then prefill chunks. `ended_seq_ids` may be forgotten before the step runs; after a
    step without a result they may name sequences twice, or ones that the executor never saw.

    shape: what predictors, accounting and budgets see of it. It follows from the chunks; the scheduler, which builds it
    on the way, hands it over as `known_shape`.
    """

    step_id: int
    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    starts: tuple[SequenceStart, ...] = ()
    ended_seq_ids: tuple[int, ...] = ()
    known_shape: InitVar[StepShape | None] = None
    shape: StepShape = field(init=False, repr=False, compare=False)

    def __post_init__(self, known_shape: StepShape | None) -> None:
        """Set the shape."""
        object.__setattr__(self, "shape", known_shape or shape_of(self.chunks))

    @property
    def n_tokens(self) -> int:
        """Rows of the step's one GEMM."""
        return self.shape.n_tokens


def shape_of(chunks: Iterable[Chunk]) -> StepShape:
    """The shape of a step of these chunks."""
    return StepShape([chunk.shape for chunk in chunks])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probability of one token and of the top alternatives at its position, best first."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """What one chunk gave. `token_ids` is empty for a chunk that does not sample; behind k drafts it has 1 to k + 1: the
    drafts that hold, and the token drawn behind them.

    `is_complete`: the sequence's grammar can accept nothing more, so it must stop after these tokens.
    `prompt_logprobs` has one entry per prompt token that this chunk's rows judge, as often as they are computed: positions
    [start_pos + 1, end_pos], the last prompt token at most. A chunk from position 0 also has None for token 0, before which
    nothing stands. Control hands each position out once.
    `draft_token_ids`: guesses at what follows `token_ids`, at most as many as the chunk wanted, for the next chunk to verify.
    `forced_token_ids`: what must follow them by the sequence's grammar, MOST_DRAFTS tokens of it at most.
    `state`: [D] fp32 in native order, the pooled state of a prompt that asked for it, with its last chunk.
    `error`: why this sequence cannot go on; the others of the step are untouched, and nothing else here counts.
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    is_complete: bool = False
    draft_token_ids: tuple[int, ...] = ()
    forced_token_ids: tuple[int, ...] = ()
    state: bytes | None = None
    error: EngineError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results in the order of the plan's chunks. device_s: inside the model's kernels; draft_s: of the drafter, all of it;
    host_s: the rest of execute().
    """

    step_id: int
    results: tuple[ChunkResult, ...]
    device_s: float
    host_s: float
    draft_s: float = 0.0


class Executor(Protocol):
    """Runs a step: real kernels in the engine, a cost model in the simulator."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run every chunk of the plan. Raises ExecutorError when the device fails, which is the end of every request."""
        ...
