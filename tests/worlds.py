"""Worlds for phase equality: one prompt's logits and cache under every way of cutting the work.

An answer is (logits of every prompt position [T, V], keys and values of every layer). Two answers are equal when every bit is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import VOCAB
from diptych.compute.kv_store import KVPayload
from diptych.compute.model import Model
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from stepping import Stepper

EVERY_KERNEL_SET = (
    "amx", "amx_twin", "avx512", "avx512_fma", "avx2_vnni", "avx2_vnni_twin", "avx2",  # x86-64
    "neon_mmla", "neon_dot", "neon",  # ARM64
    "scalar",
)  # fmt: skip
# Of these what this processor runs: others have no tests here (test_cpus.py says which they are).
KERNEL_SETS = tuple(name for name in EVERY_KERNEL_SET if name in instruction_sets())


def on_sets(formats: Sequence[str]) -> list[Any]:
    """(kernel set, format): this processor's best set has all of them, each other one by turns; `-m slow` has the rest.

    For models of published sizes. What sets have of their own, operations and what chooses, is held for every format elsewhere.
    """
    return [
        pytest.param(name, one, marks=() if turn == 0 or place == turn % len(formats) else pytest.mark.slow)
        for turn, name in enumerate(KERNEL_SETS)
        for place, one in enumerate(formats)
    ]


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    cache: tuple[torch.Tensor, ...]

    def differs_from(self, other: Answer) -> str:
        """What differs, or the empty string."""
        if not torch.equal(self.logits, other.logits):
            rows = (self.logits != other.logits).any(1).nonzero().flatten().tolist()
            return f"logits of rows {rows[:8]}"
        for layer, (mine, theirs) in enumerate(zip(self.cache, other.cache, strict=True)):
            if not torch.equal(mine, theirs):
                return f"cache of layer {layer // 2}"
        return ""


def prompt(n_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n_tokens).tolist()


def read_cache(model: Model, stepper: Stepper, name: str) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for layer in range(len(model.spec.caches)):
        found += stepper.kv.read(layer, stepper.tables[name], stepper.lengths[name])
    return tuple(found)


def alone(model: Model, tokens: Sequence[int], chunk: int | None, *, n_blocks: int = 64) -> Answer:
    """The prompt by itself, in chunks of `chunk` (None: whole)."""
    stepper = Stepper(model, n_blocks=n_blocks)
    logits = stepper.prefill("it", tokens, chunk=chunk)
    return Answer(logits, read_cache(model, stepper, "it"))


def beside(model: Model, tokens: Sequence[int], n_neighbours: int, seed: int) -> Answer:
    """The prompt in chunks of random size, beside neighbours that prefill and decode in the same steps."""
    random = np.random.default_rng(seed)
    stepper = Stepper(model, n_blocks=64 + 8 * n_neighbours)
    rows, at = [], 0
    while at < len(tokens):
        take = int(random.integers(1, 24))
        chunks = {
            f"other {i}": random.integers(3, VOCAB, random.choice([1, 1, 1, 5])).tolist() for i in range(n_neighbours)
        }
        names = list(chunks)[: int(random.integers(0, n_neighbours + 1))]
        step = {name: chunks[name] for name in names} | {"it": list(tokens[at : at + take])}
        step |= {name: more for name, more in chunks.items() if name not in step}
        rows.append(stepper.step(step)["it"])
        at += take
    return Answer(torch.cat(rows), read_cache(model, stepper, "it"))


def after_prefix_hit(model: Model, tokens: Sequence[int], hit_blocks: int) -> Answer:
    """Another sequence computed the first blocks; this one shares them and computes the rest."""
    stepper = Stepper(model)
    shared = hit_blocks * stepper.kv.block_tokens
    stepper.share_state("first", "it", shared)
    first = stepper.prefill("first", tokens[: shared + 3])
    stepper.tables["it"] = stepper.tables["first"][:hit_blocks]
    stepper.lengths["it"] = shared
    rest = stepper.prefill("it", tokens[shared:])
    return Answer(torch.cat([first[:shared], rest]), read_cache(model, stepper, "it"))


def after_fork(model: Model, tokens: Sequence[int], at: int) -> Answer:
    """The sequence forks inside a block: the partial block is copied, and the parent writes on in its own."""
    stepper = Stepper(model)
    stepper.share_state("parent", "it", at)
    first = stepper.prefill("parent", tokens[:at])
    full = at // stepper.kv.block_tokens
    own = stepper._free.pop()
    stepper.kv.copy_blocks([(stepper.tables["parent"][full], own)])
    stepper.tables["it"] = [*stepper.tables["parent"][:full], own]
    stepper.lengths["it"] = at
    stepper.prefill("parent", prompt(20, seed=9))
    rest = stepper.prefill("it", tokens[at:])
    return Answer(torch.cat([first, rest]), read_cache(model, stepper, "it"))


def in_dirty_blocks(model: Model, tokens: Sequence[int]) -> Answer:
    """Every block of the pool has held other tokens, some of them not a number, before the prompt comes."""
    stepper = Stepper(model)
    dirt = torch.nan if model.kv_format == "bf16" else 100.0
    for layer, cache in enumerate(model.spec.caches):
        n_tokens, widths = (
            stepper.kv.n_blocks * stepper.kv.block_tokens,
            (cache.head_dim, cache.value_dim or cache.head_dim),
        )
        both = (torch.full((cache.n_heads, n_tokens, width), dirt) for width in widths)
        stepper.kv.write(layer, list(range(stepper.kv.n_blocks)), *both)
    return Answer(stepper.prefill("it", tokens, chunk=5), read_cache(model, stepper, "it"))


def in_blocks_of_ones(model: Model, tokens: Sequence[int], *, n_blocks: int = 4) -> torch.Tensor:
    """The prompt's logits where every bit of the pool was set: a scale that is no number survives a weight of zero."""
    stepper = Stepper(model, n_blocks=n_blocks)
    ids = range(stepper.kv.n_blocks)
    ones = np.full_like(stepper.kv.export_blocks(ids).data_NB, 0xFF)
    stepper.kv.import_blocks(ids, KVPayload.of(stepper.kv.header, ones))
    return stepper.prefill("it", tokens)


def check_blocks_travel(one: Model, other: Model, tokens: Sequence[int]) -> None:
    """Between two that compute the same, of which one has ranks: out, in, read and written, a block's bytes are the same."""
    ids, copies, written = [3, 0, 5], [6, 7, 8], [9, 10, 11]
    theirs, ours = Stepper(one), Stepper(other)
    for stepper in (ours, theirs):
        stepper.prefill("it", tokens)
    sent = theirs.kv.export_blocks(ids)
    assert np.array_equal(ours.kv.export_blocks(ids).data_NB, sent.data_NB)
    ours.kv.import_blocks(copies, sent)
    assert np.array_equal(ours.kv.export_blocks(copies).data_NB, sent.data_NB)
    for layer in range(len(one.spec.caches)):
        both = theirs.kv.read(layer, ids, len(tokens))
        ours.kv.write(layer, written, *both)
        assert all(map(torch.equal, ours.kv.read(layer, written, len(tokens)), both))


def differing_past_tiles(one: Model, two: Model, tokens: Sequence[int], whole: Answer) -> dict[str, str]:
    """As `differing`, of a prompt past a tile of keys; `two` is the same model on two threads."""
    assert len(tokens) % 69 == 1, "the last token comes alone: its tiles are dealt to both threads"
    answers = {
        "chunks of 69": alone(two, tokens, 69),
        "prefix hit": after_prefix_hit(one, tokens, hit_blocks=19),
        "fork": after_fork(two, tokens, at=331),
        "neighbours": beside(one, tokens, 2, seed=1),
    }
    return {name: what for name, answer in answers.items() if (what := answer.differs_from(whole))}


def differing(model: Model, tokens: Sequence[int], whole: Answer) -> dict[str, str]:
    """What differs from the prompt computed whole, by the way in which its work was cut."""
    answers = {f"chunks of {chunk}": alone(model, tokens, chunk) for chunk in (1, 7, 16, 64)}
    answers |= {f"{n} neighbours": beside(model, tokens, n, seed=n) for n in (1, 6)}
    answers["prefix hit"] = after_prefix_hit(model, tokens, hit_blocks=2)
    answers["fork"] = after_fork(model, tokens, at=41)
    answers["dirty blocks"] = in_dirty_blocks(model, tokens)
    return {name: what for name, answer in answers.items() if (what := answer.differs_from(whole))}


def check_cuts(path: Path, config: ComputeConfig, others: Sequence[tuple[int, int]] = ((2, 1), (3, 1), (9, 3))) -> None:
    """No bit depends on how a prompt is cut, and all parameters are counted. others: models of so many threads, by chunks."""
    model, tokens = load_model(path, config), prompt(75)
    whole = alone(model, tokens, None)
    assert whole.logits.std() > 0.3
    found = differing(model, tokens, whole)
    assert not found, found
    for chunk, threads in others:
        other = model if threads == config.threads else load_model(path, replace(config, threads=threads))
        assert not alone(other, tokens, chunk).differs_from(whole), chunk
    assert model.n_parameters == parameter_count(model.spec)


def check_past_a_tile(path: Path, expected: torch.Tensor, instruction_set: str, kv: str, *, chunk: int) -> None:
    """A prompt of as many tokens as `expected` has rows: near its logits, the same bits whole, beside others, and in chunks, of
    which the last is one token, whose tiles are dealt to both threads.
    """
    assert len(expected) % chunk == 1
    config = ComputeConfig(backend="cpu", instruction_set=instruction_set, kv=kv)
    one, two = (load_model(path, replace(config, threads=n)) for n in (1, 2))
    tokens = prompt(len(expected))
    whole = alone(one, tokens, None)
    assert ((whole.logits - expected).norm() / expected.norm()).item() < (0.5 if kv == "fp8" else 0.25)
    assert not alone(two, tokens, chunk).differs_from(whole)
    assert not beside(one, tokens[:40], 2, seed=1).differs_from(alone(one, tokens[:40], 7))
