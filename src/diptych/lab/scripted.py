"""Scripted acceptance: a drafter that knows the answer and errs at a set rate, so that verification is measured without a
trained model. Every number made with it is labelled as such.

    race = Race(stage.engines(...), batch=4, prompt_tokens=128, new_tokens=64)
    fast = race.lane(acceptance=0.8, draft_tokens=4)        # depth 4 always; draft_tokens None: as deep as pays
    fast.token_s()                                          # seconds of decode per token of one sequence, once
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from random import Random
from typing import Any

import numpy as np
import torch

from diptych.compute.drafting.drafter import Drafter
from diptych.control.speculation import EveryGuess, NewDrafter
from diptych.engine.drafters import OpenDrafter
from diptych.ground.request import Request
from diptych.ground.step import Chunk, SequenceStart
from diptych.lab.drive import Driver, Engines

_CONFIDENCE = 2  # of every guess alike
_STRATA = 20


class Luck:
    """Random numbers in [0, 1) of which every twenty have one in each twentieth: at 0.8 sixteen of twenty drafts are right.

    Of independent ones an answer of 64 tokens takes 17 to 25 steps at four drafts a step, and a median of pairs tells the luck.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._left: list[float] = []

    def next(self) -> float:
        """The next of them."""
        if not self._left:
            self._left = [(place + self._rng.random()) / _STRATA for place in range(_STRATA)]
            self._rng.shuffle(self._left)
        return self._left.pop()


class ScriptedDrafter:
    """Knows what one sequence will say; each draft is right with `acceptance` once those before it are."""

    def __init__(self, answer: SequenceOf[int], *, start: int, acceptance: float, luck: Luck) -> None:
        self._answer = answer
        self._start = start
        self._acceptance = acceptance
        self._luck = luck
        self.confidence = _CONFIDENCE

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """See `diptych.control.drafters.Drafter`."""
        at = len(token_ids) - self._start
        return _erring(self._answer[at : at + n], self._acceptance, self._luck)


def _erring(right: SequenceOf[int], acceptance: float, luck: Luck) -> list[int]:
    """These tokens, wrong from the first error on."""
    drafts = list(right)
    for j, token_id in enumerate(drafts):
        if luck.next() >= acceptance:
            drafts[j] = token_id - 1 if token_id else 1
            break
    return drafts


class ScriptedTensors(Drafter):
    """A drafter that runs tensors, whose guesses are replaced by scripted ones: its time is real, its acceptance is not."""

    def __init__(
        self, inner: Drafter, answers: Mapping[tuple[int, ...], SequenceOf[int]], *, acceptance: float, seed: int = 1
    ) -> None:
        self.taps = inner.taps
        self._inner = inner
        self._answers = answers
        self._acceptance = acceptance
        self._luck = Luck(Random(seed))
        self._prompts: dict[int, tuple[int, ...]] = {}

    def begin(self, start: SequenceStart) -> None:
        """See Drafter."""
        self._prompts[start.seq_id] = start.prompt_token_ids
        self._inner.begin(start)

    def end(self, seq_id: int) -> None:
        """See Drafter."""
        self._prompts.pop(seq_id, None)
        self._inner.end(seq_id)

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """See Drafter."""
        self._inner.copy_blocks(pairs)

    def follow(self, chunks: SequenceOf[Chunk], token_ids: SequenceOf[SequenceOf[int]]) -> None:
        """See Drafter."""
        self._inner.follow(chunks, token_ids)

    def reads(self, chunk: Chunk) -> bool:
        """See Drafter."""
        return self._inner.reads(chunk)

    def propose(
        self,
        chunks: SequenceOf[Chunk],
        token_ids: SequenceOf[SequenceOf[int]],
        tables_CM: np.ndarray,
        states: torch.Tensor | None = None,
    ) -> dict[int, SequenceOf[int]]:
        """See Drafter."""
        found = self._inner.propose(chunks, token_ids, tables_CM, states)
        self.n_read = self._inner.n_read
        scripted: dict[int, SequenceOf[int]] = {}
        for chunk, given in zip(chunks, token_ids, strict=True):
            drafts = found.get(chunk.seq_id, ())
            if drafts:
                prompt = self._prompts[chunk.seq_id]
                at = chunk.end_pos - len(chunk.draft_token_ids) + len(given) - len(prompt)
                right = self._answers[prompt][at : at + len(drafts)]
                scripted[chunk.seq_id] = _erring(right, self._acceptance, self._luck)
        return scripted


def scripted(answers: Mapping[tuple[int, ...], SequenceOf[int]], *, acceptance: float, seed: int = 1) -> NewDrafter:
    """For an `EngineCore`: answers by prompt."""
    luck = Luck(Random(seed))

    def begin(request: Request) -> ScriptedDrafter:
        prompt = request.prompt_token_ids
        return ScriptedDrafter(answers[prompt], start=len(prompt), acceptance=acceptance, luck=luck)

    return begin


class Lane:
    """One way to decode the same answers. Its engine keeps what it has learned from one run to the next."""

    def __init__(self, driver: Driver, prompts: SequenceOf[tuple[int, ...]], new_tokens: int) -> None:
        self.driver = driver
        self._prompts = prompts
        self._new_tokens = new_tokens
        self._n_runs = 0
        self.drafted_tokens = self.accepted_tokens = self.n_steps = 0  # of the last run, decode alone
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def token_s(self) -> float:
        """Seconds of decode per token of one sequence, from the step in which the last prompt was read."""
        driver = self.driver
        names = [f"{self._n_runs}-{i}" for i in range(len(self._prompts))]
        self._n_runs += 1
        for name, prompt in zip(names, self._prompts, strict=True):
            driver.submit(name, prompt, new_tokens=self._new_tokens)
        while not all(driver.token_s[name] for name in names):
            driver.step()
        begin_s = driver.clock.now_s()
        n_before = sum(len(driver.token_s[name]) for name in names)
        self.n_steps = 0
        while driver.core.has_work:
            driver.step()
            self.n_steps += 1
        n_tokens = sum(len(driver.token_s[name]) for name in names) - n_before
        usages = [driver.book.records[name].usage() for name in names]
        self.drafted_tokens = sum(usage.drafted_tokens for usage in usages)
        self.accepted_tokens = sum(usage.accepted_tokens for usage in usages)
        self.answers = {p: driver.token_ids[name] for p, name in zip(self._prompts, names, strict=True)}
        for name in names:
            driver.forget(name)
        return (driver.clock.now_s() - begin_s) * len(names) / n_tokens


class Race:
    """`batch` random prompts and the model's answers to them, decoded by several lanes over one KV pool."""

    def __init__(self, engines: Engines, *, batch: int, prompt_tokens: int, new_tokens: int) -> None:
        self._engines = engines
        self._new_tokens = new_tokens
        self._settings: dict[str, Any] = {
            "enable_prefix_cache": False,
            "max_running_sequences": batch,
            "speculate": "off",
        }
        driver = engines.driver(**self._settings)
        self._prompts = [driver.prompt(prompt_tokens) for _ in range(batch)]
        self.plain = Lane(driver, self._prompts, new_tokens)
        self.plain.token_s()
        self._answers = self.plain.answers

    def lane(self, *, acceptance: float, draft_tokens: int | None = None) -> Lane:
        """With drafts. draft_tokens None: as many as the engine finds worth their rows."""
        drafters = {"scripted": scripted(self._answers, acceptance=acceptance)}
        settings = self._settings if draft_tokens is None else self._settings | {"max_draft_tokens": draft_tokens}
        depths = None if draft_tokens is None else EveryGuess(rows=1 << 20)
        return self._checked(self._engines.speculating(settings, drafters=drafters, depths=depths))

    def drafting_lane(self, opened: OpenDrafter, *, acceptance: float) -> Lane:
        """With a drafter that the executor runs: it takes the time that it takes, and its acceptance is scripted."""

        def wrap(drafter: Drafter) -> Drafter:
            return ScriptedTensors(drafter, self._answers, acceptance=acceptance)

        return self._checked(self._engines.drafting(self._settings, opened, wrap))

    def _checked(self, driver: Driver) -> Lane:
        lane = Lane(driver, self._prompts, self._new_tokens)
        lane.token_s()
        assert lane.answers == self._answers, "speculation changed an answer"
        return lane
