"""Sequences stepped through a Model by hand: scattered blocks, any mix of chunks, no scheduler.

stepper = Stepper(model)
logits = stepper.step({"a": [5, 6, 7], "b": [9]})      # logits of every row, per sequence
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch, StatePlaces
from diptych.compute.model import Model


class Stepper:
    """Owns a KV pool and block tables. Blocks are handed out in a scrambled order, so that a wrong table shows."""

    def __init__(self, model: Model, *, n_blocks: int = 64, block_tokens: int = 16, n_places: int = 64) -> None:
        self.model = model
        self.kv = model.make_kv(n_blocks, block_tokens, n_places)
        self.free_places = np.random.default_rng(1).permutation(n_places).tolist()
        self.places: dict[str, int] = {}  # of the sequences' states, where the model has some
        self.begins: dict[str, int] = {}  # the places that sequences begin with, whose blocks they share
        self.saves: dict[str, list[tuple[int, int]]] = {}  # (rows, place): what the next chunk is to leave on its way
        self._free = np.random.default_rng(0).permutation(n_blocks).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.adapters: dict[str, int] = {}  # of the sequences that have one

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """One forward over all chunks; [tokens, V] fp32 on the CPU for each."""
        batch = self.batch(chunks)
        logits = self.model.forward(batch, self.kv).cpu().clone()  # the next step takes the room
        starts = batch.query_start_S1
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(chunks)}

    def batch(self, chunks: Mapping[str, Sequence[int]], *, logits_rows: Sequence[int] | None = None) -> ForwardBatch:
        """The batch of these chunks, blocks taken; logits of every row unless told."""
        size = self.kv.block_tokens
        ends, starts = [], [0]
        for name, tokens in chunks.items():
            end = self.lengths.get(name, 0) + len(tokens)
            table = self.tables.setdefault(name, [])
            while len(table) * size < end:
                table.append(self._free.pop())
            ends.append(end)
            starts.append(starts[-1] + len(tokens))
            self.lengths[name] = end
        width = max(len(self.tables[name]) for name in chunks)
        tables = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in chunks]
        rows = range(starts[-1]) if logits_rows is None else logits_rows
        return ForwardBatch(
            token_ids_T=np.array([t for tokens in chunks.values() for t in tokens], dtype=np.int32),
            query_start_S1=np.array(starts, dtype=np.int32),
            context_tokens_S=np.array(ends, dtype=np.int32),
            block_table_SM=np.array(tables, dtype=np.int32),
            logits_rows_R=np.array(list(rows), dtype=np.int32),
            adapters_S=self._adapters_of(chunks),
            states=self._states_of(chunks) if self.kv.n_places else None,
        )

    def _states_of(self, chunks: Mapping[str, Sequence[int]]) -> StatePlaces:
        for name in chunks:
            if name not in self.places:
                self.places[name] = self.free_places.pop()
        places = [self.places[name] for name in chunks]
        is_new = [self.lengths[name] == len(tokens) for name, tokens in chunks.items()]
        reads = [
            self.begins.pop(name, -1 if new else place) for name, new, place in zip(chunks, is_new, places, strict=True)
        ]
        saves = [(s, *save) for s, name in enumerate(chunks) for save in self.saves.pop(name, ())]
        return StatePlaces(
            reads_S=np.array(reads, dtype=np.int32),
            writes_S=np.array(places, dtype=np.int32),
            saves_N3=np.array(saves, dtype=np.int32).reshape(-1, 3),
        )

    def share_state(self, parent: str, child: str, rows: int) -> None:
        """The child begins with the state that the parent's next chunk has behind so many rows."""
        if self.kv.n_places:
            self.begins[child] = self.free_places.pop()
            self.saves[parent] = [(rows, self.begins[child])]

    def _adapters_of(self, chunks: Mapping[str, Sequence[int]]) -> np.ndarray | None:
        if not self.adapters:
            return None
        return np.array([self.adapters.get(name, -1) for name in chunks], dtype=np.int32)

    def prefill(self, name: str, tokens: Sequence[int], *, chunk: int | None = None) -> torch.Tensor:
        """All of a prompt in chunks (None: whole); logits at every position."""
        size = chunk or len(tokens)
        parts = [self.step({name: tokens[i : i + size]})[name] for i in range(0, len(tokens), size)]
        return torch.cat(parts)

    def greedy(self, name: str, logits: torch.Tensor, n_tokens: int) -> tuple[list[int], torch.Tensor]:
        """n_tokens likeliest tokens after the last row of logits, and the logits row after each but the last."""
        token = int(logits[-1].argmax())
        chosen, rows = [token], []
        while len(chosen) < n_tokens:
            rows.append(self.step({name: [chosen[-1]]})[name])
            chosen.append(int(rows[-1][-1].argmax()))
        return chosen, torch.cat(rows) if rows else logits[:0]
