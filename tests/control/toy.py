"""A deterministic stand-in for the model: the next token is a hash of all KV it can see through its block table.

Any block mix-up, wrong copy, stale cache entry or skipped position changes the text.
Where plans name places for states, the state behind a token is what its slot holds, so one of other tokens is seen at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from diptych.ground.phase import Phase
from diptych.ground.request import Request, SamplingParams
from diptych.ground.step import ChunkResult, SequenceStart, StepPlan, StepResult

VOCAB = 97


def mix(*values: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=7).digest(), "little")


def toy_kv(previous: int, token_id: int, position: int) -> int:
    return mix(previous, token_id, position)


def toy_next(contents: list[int]) -> int:
    return mix(*contents) % VOCAB


def greedy(prompt: tuple[int, ...], n: int) -> list[int]:
    """The one-by-one answer: `n` tokens with nobody else around."""
    contents: list[int] = []
    tokens = list(prompt)
    for position, token_id in enumerate(prompt):
        contents.append(toy_kv(contents[-1] if contents else 0, token_id, position))
    while len(tokens) < len(prompt) + n:
        tokens.append(toy_next(contents))
        contents.append(toy_kv(contents[-1], tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


class ToyExecutor:
    """Owns fake KV bytes and the block tables that plans describe; knows nothing else of control."""

    def __init__(self, n_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.kv: list[list[int | None]] = [[None] * block_tokens for _ in range(n_blocks)]
        self.tables: dict[int, list[int]] = {}
        self.starts: dict[int, SequenceStart] = {}
        self.states: dict[int, int] = {}  # by place
        self.seconds: Callable[[StepPlan], float] = lambda plan: 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.ended_seq_ids:
            self.tables.pop(seq_id, None)  # a step that was given up may have been the first to name it
            self.starts.pop(seq_id, None)
        for start in plan.starts:
            assert start.seq_id not in self.starts, "started twice"
            self.starts[start.seq_id] = start
        targets = {copy.target_block_id for copy in plan.copies}
        assert not targets & {copy.source_block_id for copy in plan.copies}, "copies depend on their order"
        for copy in plan.copies:
            self.kv[copy.target_block_id] = list(self.kv[copy.source_block_id])
        self._check_places(plan)
        results = tuple(self._run(chunk) for chunk in plan.chunks)
        return StepResult(step_id=plan.step_id, results=results, device_s=self.seconds(plan), host_s=0.0)

    def _check_places(self, plan: StepPlan) -> None:
        uses = [chunk.state for chunk in plan.chunks if chunk.state is not None]
        written = [place for use in uses for place in (use.writes, *(place for _, place in use.saves))]
        assert len(written) == len(set(written)), "two states in one place"
        for use in uses:
            assert use.reads == use.writes or use.reads not in written, "a state is read that another writes"

    def _move(self, chunk, table: list[int]) -> None:
        """The sequence's state, which must be that of the tokens before the chunk."""
        use = chunk.state
        assert (use.reads == -1) == (chunk.start_pos == 0)
        if chunk.start_pos:
            assert self.states[use.reads] == self._read(table, chunk.start_pos - 1), "a state of other tokens"
        for rows, place in (*use.saves, (len(chunk.token_ids), use.writes)):
            assert 1 <= rows <= len(chunk.token_ids)
            self.states[place] = self._read(table, chunk.start_pos + rows - 1)

    def _run(self, chunk) -> ChunkResult:
        table = self.tables.setdefault(chunk.seq_id, [])
        assert chunk.first_new_block <= len(table)
        table[chunk.first_new_block :] = chunk.new_block_ids
        for k, token_id in enumerate(chunk.token_ids):
            position = chunk.start_pos + k
            previous = self._read(table, position - 1) if position else 0
            block_id = table[position // self.block_tokens]
            self.kv[block_id][position % self.block_tokens] = toy_kv(previous, token_id, position)
        if chunk.state is not None:
            self._move(chunk, table)
        if not chunk.samples:
            return ChunkResult(seq_id=chunk.seq_id)
        drafts = chunk.draft_token_ids
        contents = [self._read(table, position) for position in range(chunk.end_pos)]
        drawn = [toy_next(contents[: chunk.end_pos - len(drafts)])]
        for k, draft in enumerate(drafts):
            if drawn[-1] != draft:
                break
            drawn.append(toy_next(contents[: chunk.end_pos - len(drafts) + k + 1]))
        return ChunkResult(seq_id=chunk.seq_id, token_ids=tuple(drawn))

    def _read(self, table: list[int], position: int) -> int:
        value = self.kv[table[position // self.block_tokens]][position % self.block_tokens]
        assert value is not None, "read of a slot that was never written"
        return value


def request(
    prompt=12, max_tokens=3, *, request_id="r", arrival_s=0.0, priority=0, salt=None, eos=(), pooling=None, **sampling
) -> Request:
    token_ids = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else tuple(prompt)
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),
        arrival_s=arrival_s,
        eos_token_ids=eos,
        priority=priority,
        cache_salt=salt,
        pooling=pooling,
    )


def prefill_tokens(plan: StepPlan) -> int:
    return sum(len(chunk.token_ids) for chunk in plan.chunks if chunk.phase is Phase.PREFILL)
