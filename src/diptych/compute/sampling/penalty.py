"""Repetition, presence and frequency penalties, as in vLLM: prompt and output for the first, output for the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.ground.request import SamplingParams


def has_penalty(params: SamplingParams) -> bool:
    """Whether any of the three is asked for."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class Penalty:
    """Repetition, presence and frequency penalty of one sequence: sparse, O(distinct tokens) per draw."""

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._params = params
        prompt = dict.fromkeys(prompt_ids) if params.repetition_penalty != 1.0 else {}
        self._slots: dict[int, int] = {token_id: slot for slot, token_id in enumerate(prompt)}
        capacity = max(64, 2 * len(self._slots))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(prompt)] = list(prompt)
        self._counts = np.zeros(capacity, dtype=np.float32)  # in the output
        self._n_prompt_slots = len(prompt)

    def add(self, token_id: int) -> None:
        """Count one output token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1.0

    def forget(self, token_ids: Sequence[int]) -> None:
        """Take output tokens back."""
        for token_id in token_ids:
            self._counts[self._slots[token_id]] -= 1.0

    def apply(self, row_V: np.ndarray) -> None:
        """Change `row_V` (fp32) in place."""
        n = len(self._slots)
        if not n:
            return
        params = self._params
        counts, ids = self._counts[:n], self._ids[:n]
        values = row_V[ids]
        if params.repetition_penalty != 1.0:
            seen = counts > 0
            seen[: self._n_prompt_slots] = True  # a prompt token stays seen whatever was rolled back
            factor = np.float32(params.repetition_penalty)
            values = np.where(seen, np.where(values < 0, values * factor, values / factor), values)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        row_V[ids] = values
