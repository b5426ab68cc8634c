"""Steps of a model, of any shape, without a scheduler: the lab's instrument.

A step is a list of `ChunkShape`s, as the cost model describes it, so that what is measured and what is predicted are the
same object. KV of positions before a chunk is whatever the pool holds: times do not depend on the values.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch, StatePlaces
from diptych.compute.ops.cpu.model import CpuModel
from diptych.compute.runner import Model
from diptych.ground.errors import CapacityError, ConfigError
from diptych.ground.shape import ChunkShape, StepShape
from diptych.lab.rounds import Sampler, burst

MOST_SEQUENCES = 64  # of one step: more than any experiment runs
CHUNK_TOKENS = 2048  # a prompt is read in chunks of at most this many tokens, as the engine does


def prompt_works(n_tokens: int) -> list[StepShape]:
    """The steps in which the engine reads a prompt."""
    works = []
    for start in range(0, n_tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, n_tokens - start)
        is_last = start + size == n_tokens
        works.append(StepShape.prefill(batch=1, new_tokens=size, cached_tokens=start, samples=is_last))
    return works


class StepProbe:
    """A model with a KV pool of `max_tokens` positions, of which steps of any shape are timed."""

    def __init__(self, model: Model, *, max_tokens: int, block_tokens: int = 32) -> None:
        self.model = model
        self.block_tokens = block_tokens
        # each sequence may waste part of a block
        self._kv = model.make_kv(-(-max_tokens // block_tokens) + 64, block_tokens, MOST_SEQUENCES)

    def step(self, work: StepShape, *, adapters: Sequence[int] = ()) -> Callable[[], torch.Tensor]:
        """A function that runs this step once. Raises CapacityError when the pool is too small for its contexts.

        adapters: numbers of the model's, which the sequences have in turn; none: no sequence has one.
        """
        batch = self._batch([shape for shape in work.shapes for _ in range(shape.count)])
        if adapters:
            batch = replace(batch, adapters_S=np.resize(np.array(adapters, dtype=np.int32), batch.n_sequences))
        return lambda: self.model.forward(batch, self._kv)

    def sampler(self, work: StepShape, *, adapters: Sequence[int] = ()) -> Sampler:
        """Seconds of one forward step, logits included: the quickest of several, where it is short."""
        return burst(self._synced(self.step(work, adapters=adapters)))

    def usual(self, work: StepShape, *, adapters: Sequence[int] = (), behind: StepShape | None = None) -> Sampler:
        """The same, the median of several: what an engine's step takes, which nobody runs again for a better time.

        behind: a step that runs before each of several, as decode does before a prompt. Short prompts behind their like were
        measured shorter than an engine's, by 0.3 ms or a tenth.
        """
        between = None if behind is None else self._synced(self.step(behind))
        return burst(self._synced(self.step(work, adapters=adapters)), choose=statistics.median, between=between)

    def prompt_sampler(self, n_tokens: int) -> Sampler:
        """Seconds of a whole prompt, read in chunks as the engine does."""
        steps = [self._synced(self.step(work)) for work in prompt_works(n_tokens)]
        return burst(lambda: [step() for step in steps])

    def _synced(self, step: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            logits = step()
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)

        return run

    def _batch(self, shapes: Sequence[ChunkShape]) -> ForwardBatch:
        n_blocks_S = [-(-(shape.start_pos + shape.new_tokens) // self.block_tokens) for shape in shapes]
        if sum(n_blocks_S) > self._kv.n_blocks:
            raise CapacityError(f"the step needs {sum(n_blocks_S)} KV blocks; the probe has {self._kv.n_blocks}")
        table_SM = np.zeros((len(shapes), max(n_blocks_S)), dtype=np.int32)
        first = 0
        for row, n_blocks in zip(table_SM, n_blocks_S, strict=True):
            row[:n_blocks] = np.arange(first, first + n_blocks)
            first += n_blocks
        lens_S = np.array([shape.new_tokens for shape in shapes], dtype=np.int32)
        query_start_S1 = np.concatenate([[0], np.cumsum(lens_S)]).astype(np.int32)
        seq_T = np.repeat(np.arange(len(shapes), dtype=np.int32), lens_S)
        starts_S = np.array([shape.start_pos for shape in shapes], dtype=np.int32)
        positions_T = np.arange(len(seq_T), dtype=np.int32) - query_start_S1[seq_T] + starts_S[seq_T]
        return ForwardBatch(
            token_ids_T=(positions_T * 7919 + seq_T * 104729) % self.model.spec.vocab_size,
            query_start_S1=query_start_S1,
            context_tokens_S=starts_S + lens_S,
            block_table_SM=table_SM,
            logits_rows_R=np.array(
                [end - 1 for end, shape in zip(query_start_S1[1:], shapes, strict=True) if shape.samples],
                dtype=np.int32,
            ),
            states=self._states(starts_S),
        )

    def _states(self, starts_S: np.ndarray) -> StatePlaces | None:
        """A place for each sequence, of models with states; what lies there is whatever was left."""
        if not self._kv.n_places:
            return None
        if len(starts_S) > self._kv.n_places:
            raise CapacityError(f"the step has {len(starts_S)} sequences; the probe has {self._kv.n_places} states")
        places_S = np.arange(len(starts_S))
        return StatePlaces.of(np.where(starts_S > 0, places_S, -1), places_S)


class StepParts:
    """The time of one step split by kind of operation, from the counters of the cpu backend.

    Sample the whole step with `total`; right after it, `part(...)` gives the share of the kinds named.
    """

    def __init__(self, probe: StepProbe, work: StepShape) -> None:
        if not isinstance(probe.model, CpuModel):
            raise ConfigError("the time of a step's parts is counted by the cpu backend only")
        self._program = probe.model.program
        self._step = probe.step(work)
        self._seen: list[dict[str, int]] = []
        self._sampler = burst(self._run)

    def _run(self) -> None:
        self._step()
        self._seen.append(self._program.nanoseconds())

    def total(self) -> float:
        """Seconds of the whole step."""
        self._seen.clear()
        return self._sampler()

    def part(self, kinds: Sequence[str]) -> float:
        """Seconds of these kinds of operations in the quickest of the runs of the last `total`."""
        counted = self._seen[1:] or self._seen  # the first run of several was dropped there too
        quickest = min(counted, key=lambda one: sum(one.values()))
        return 1e-9 * sum(quickest.get(kind, 0) for kind in kinds)
