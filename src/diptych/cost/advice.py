"""What would change: formats, tensor parallel, speculation; the chunk for a stall budget; one pool or two."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from diptych.cost.drafts.acceptance import MOST_DEPTH, chances_at, expected_tokens, speedup
from diptych.cost.drafts.depths import choose_depths
from diptych.cost.kv_bytes import kv_bytes_read, state_bytes
from diptych.cost.memory import capacity_of
from diptych.cost.parameters import kv_bytes_stored
from diptych.cost.planner import Question, decode_work_of, prefill_work_of
from diptych.cost.setup import Setup
from diptych.cost.tables import kv_spec
from diptych.ground.config import MOST_DRAFT_ROWS
from diptych.ground.errors import ConfigError
from diptych.ground.formats import ENGINE_WEIGHTS, KV_IN_BYTES
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape

# 400 Gb/s Ethernet or InfiniBand: how the KV of a finished prefill usually travels between machines.
NETWORK_BYTES_PER_S = 50e9
WHAT_IF_WEIGHTS = ("bf16", "fp8", "int8", "int4")
WHAT_IF_TP = (2, 4, 8)
SHOWN_BATCHES = (1, 4, 16, 64)
MOST_BATCH = 4096
MOST_CHUNKS = 2048  # of a prompt that are priced one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The same question under one change. `obstacle`: why it cannot be done; where no memory is lacking, without numbers."""

    change: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    tokens_per_s: float | None = None
    max_batch: int | None = None
    weight_bytes: float | None = None
    obstacle: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Drafts at an acceptance rate and a batch: `draft_tokens` verified for every sequence, and as many as the engine would.

    depth: drafts per sequence that the engine would choose, on average; best_speedup: what those give.
    """

    batch: int
    draft_tokens: int
    acceptance: float
    accepted_tokens: float  # handed out per sequence and verify step, on average, the sequence's own included
    verify_s: float
    draft_s: float
    tpot_s: float
    speedup: float
    depth: float
    best_speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationAdvice:
    """asked: at the question's batch; table: at other batches. most_batch: up to which `draft_tokens` gain.

    0 where they gain at none, None where they still do at MOST_BATCH (long contexts: what decode reads is caches then, and
    rows stay cheap).
    """

    asked: Speculation
    table: tuple[Speculation, ...]
    most_batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAdvice:
    """The largest prefill chunk whose mixed step stays inside the stall budget. chunk_tokens 0: none does."""

    stall_budget_s: float
    decode_only_s: float
    chunk_tokens: int
    step_s: float
    ttft_s: float
    whole_step_s: float  # the stall when the prompt is prefilled in one piece
    kv_reread_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAdvice:
    """One pool or two at a traffic. prefill_devices / decode_devices may be fractions of an instance."""

    requests_per_s: float
    prefill_s: float
    decode_batch: int
    decode_step_s: float
    tax_share: float  # share of a token's time that other requests' prefills take in one pool
    prefill_instances: float
    decode_instances: float
    ratio: float  # prefill instances per decode instance
    kv_bytes: float  # that a prompt leaves behind, states among them
    network_s: float
    link_s: float | None
    advice: str


def what_ifs(setup: Setup, question: Question) -> tuple[WhatIf, ...]:
    """The asked setup first, then one change at a time."""
    return tuple(_what_if(change, variant, question) for change, variant in _variants(setup))


def _variants(setup: Setup) -> Iterator[tuple[str, Callable[[], Setup]]]:
    yield f"as asked ({setup.quant.name}, kv {setup.kv.name}, tp {setup.tp})", lambda: setup
    for name in WHAT_IF_WEIGHTS:
        if name != setup.quant.name and (not setup.calibration.is_local or name in ENGINE_WEIGHTS):
            yield f"weights {name}", partial(setup.with_weights, name)
    if setup.kv.bytes_per_element > 1.0:
        yield "kv int8", partial(replace, setup, kv=kv_spec("int8", block_tokens=setup.kv.block_tokens))
    if setup.kv.name != KV_IN_BYTES and KV_IN_BYTES in setup.calibration.prefill.attention_ef_of:
        yield f"kv {KV_IN_BYTES}", partial(replace, setup, kv=kv_spec(KV_IN_BYTES, block_tokens=setup.kv.block_tokens))
    for tp in WHAT_IF_TP:
        if tp != setup.tp:
            yield f"tensor parallel {tp}", partial(replace, setup, tp=tp)


def _what_if(change: str, variant: Callable[[], Setup], question: Question) -> WhatIf:
    try:
        setup = variant()
        predictor = setup.model_of_time()
    except ConfigError as error:  # a split that cannot be, a format that nobody measured
        return WhatIf(change=change, obstacle=error.message)
    context = question.decode_context_tokens
    capacity = capacity_of(setup, context_tokens=context, batch=question.batch)
    ttft_s = predictor.predict(prefill_work_of(setup, question)).total_s
    tpot_s = predictor.predict(decode_work_of(setup, question)).total_s
    obstacle = None
    if not capacity.is_fitting:
        need = "the weights alone do not fit" if not capacity.free_kv_bytes else f"only {capacity.max_batch} fit"
        obstacle = f"does not fit: {need}"
    return WhatIf(
        change=change,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        tokens_per_s=question.batch / tpot_s,
        max_batch=capacity.max_batch,
        weight_bytes=capacity.weight_bytes,
        obstacle=obstacle,
    )


def speculation_advice(setup: Setup, question: Question) -> SpeculationAdvice:
    """Speculative decoding at the question's batch and others, and the batch at which it stops paying."""
    asked = speculation(setup, question, question.batch)
    batches = sorted({*SHOWN_BATCHES, question.batch})
    table = tuple(asked if batch == question.batch else speculation(setup, question, batch) for batch in batches)
    return SpeculationAdvice(asked=asked, table=table, most_batch=_most_batch(setup, question))


def speculation(setup: Setup, question: Question, batch: int) -> Speculation:
    """The engine's own arithmetic (`cost.drafts.prices`); drafting a token for all sequences costs a share of a decode step."""
    predict_s = setup.model_of_time().predict_s
    plain = setup.asked(StepShape((_plain_decode(question, 1),) * batch))
    plain_s = predict_s(plain)

    def draft_s(depths: Sequence[int]) -> float:
        return max(depths) * question.draft_cost * plain_s

    def step_s(depths: Sequence[int]) -> float:
        return predict_s(plain.with_drafts(depths)) + draft_s(depths)

    fixed = [question.draft_tokens] * batch
    chances = chances_at(question.acceptance, question.draft_tokens)
    any_depth = chances_at(question.acceptance, MOST_DEPTH)
    chosen = choose_depths([any_depth] * batch, n_sure=batch, most_rows=MOST_DRAFT_ROWS, price_s=step_s)
    tokens = sum(expected_tokens(any_depth[:depth]) for depth in chosen)
    verify_s = predict_s(plain.with_drafts(fixed))
    spent_s = verify_s + draft_s(fixed)
    return Speculation(
        batch=batch,
        draft_tokens=question.draft_tokens,
        acceptance=question.acceptance,
        accepted_tokens=expected_tokens(chances),
        verify_s=verify_s,
        draft_s=draft_s(fixed),
        tpot_s=spent_s / expected_tokens(chances),
        speedup=speedup(chances, plain_s=plain_s, verify_s=spent_s),
        depth=sum(chosen) / batch,
        best_speedup=tokens / batch * plain_s / step_s(chosen) if any(chosen) else 1.0,
    )


def _most_batch(setup: Setup, question: Question) -> int | None:
    """The last batch before drafts first stop paying: doubled to there, then bisected.

    At batches far beyond it they may pay again where contexts are long, as reading many caches leaves rows empty once more.
    """
    chances = chances_at(question.acceptance, question.draft_tokens)
    predict_s = setup.model_of_time().predict_s

    def gains(batch: int) -> bool:
        plain = _plain_decode(question, batch)
        plain_s = predict_s(setup.asked(StepShape((plain,))))
        verify_s = predict_s(setup.asked(StepShape((plain._replace(new_tokens=1 + question.draft_tokens),))))
        verify_s += question.draft_tokens * question.draft_cost * plain_s
        return speedup(chances, plain_s=plain_s, verify_s=verify_s) > 1.0

    low, high = 0, 1
    while gains(high):
        if high == MOST_BATCH:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gains(middle) else (low, middle)
    return low


def _plain_decode(question: Question, batch: int) -> ChunkShape:
    return ChunkShape(Phase.DECODE, 1, question.decode_context_tokens - 1, True, batch)


def chunk_for(setup: Setup, question: Question) -> ChunkAdvice:
    """Largest chunk C such that a step of `batch` decode rows and C prompt rows ends within the stall budget.

    Judged at the last chunk of the prompt, which sees the longest cache.
    """
    predictor = setup.model_of_time()
    decode = decode_work_of(setup, question)
    prompt = question.prompt_tokens - question.cached_tokens

    def step_s(chunk: int) -> float:
        shape = ChunkShape(
            phase=Phase.PREFILL, new_tokens=chunk, start_pos=question.prompt_tokens - chunk, samples=True
        )
        return predictor.predict(decode.plus(setup.asked(StepShape((shape,))))).total_s

    chunk = bisect_right(range(1, prompt + 1), question.stall_budget_s, key=step_s)  # 0: none is short enough
    starts = range(question.cached_tokens, question.prompt_tokens, chunk or prompt)
    return ChunkAdvice(
        stall_budget_s=question.stall_budget_s,
        decode_only_s=predictor.predict(decode).total_s,
        chunk_tokens=chunk,
        step_s=step_s(chunk or 1),
        ttft_s=_chunked_ttft_s(setup, question, decode, starts) if chunk else float("inf"),
        whole_step_s=step_s(prompt),
        kv_reread_bytes=_reread_bytes(setup, question, starts),
    )


def _chunk_at(question: Question, starts: range, start: int) -> ChunkShape:
    end = min(start + starts.step, question.prompt_tokens)
    is_last = end == question.prompt_tokens
    return ChunkShape(phase=Phase.PREFILL, new_tokens=end - start, start_pos=start, samples=is_last)


def _chunked_ttft_s(setup: Setup, question: Question, decode: StepShape, starts: range) -> float:
    predictor = setup.model_of_time()

    def step_s(start: int) -> float:
        shape = _chunk_at(question, starts, start)
        return predictor.predict(decode.plus(setup.asked(StepShape((shape,))))).total_s

    return _over(starts, step_s)


def _reread_bytes(setup: Setup, question: Question, starts: range) -> float:
    """Keys and values that chunks read and the prompt in one piece would not."""

    def read_bytes(shape: ChunkShape) -> float:
        return sum(n * kv_bytes_read(layer.attention, shape, setup.kv, 1) for layer, n in setup.model.layer_groups)

    new_tokens = question.prompt_tokens - question.cached_tokens
    whole = ChunkShape(Phase.PREFILL, new_tokens, question.cached_tokens, samples=True)
    return _over(starts, lambda start: read_bytes(_chunk_at(question, starts, start))) - read_bytes(whole)


def _over(starts: range, value: Callable[[int], float]) -> float:
    """The sum over all chunks; of very many by some that are evenly spread, as those behind one another differ little."""
    n = len(starts)
    if n <= MOST_CHUNKS:
        return sum(map(value, starts))
    spread = (starts[round(i * (n - 1) / (MOST_CHUNKS - 1))] for i in range(MOST_CHUNKS))
    return sum(map(value, spread)) * n / MOST_CHUNKS


def pools_for(setup: Setup, question: Question) -> PoolAdvice:
    """Whether prefill and decode want separate pools at a traffic.

    One pool pays (B / OSL) t_pf per token for other requests' prefills; two pools move the prompt's KV instead.
    """
    predictor = setup.model_of_time()
    prefill_s = predictor.predict(prefill_work_of(setup, replace(question, batch=1))).total_s
    batch = question.batch
    decode_s = predictor.predict(decode_work_of(setup, question)).total_s
    per_request_s = question.output_tokens * decode_s / batch
    tax_s = batch / question.output_tokens * prefill_s
    tax_share = tax_s / (decode_s + tax_s)
    kv_bytes = kv_bytes_stored(setup.model, setup.kv, question.prompt_tokens, is_ours=setup.calibration.is_local)
    kv_bytes += state_bytes(setup.model)
    link = setup.hardware.link_bytes_per_s
    network_s = kv_bytes / NETWORK_BYTES_PER_S
    return PoolAdvice(
        requests_per_s=question.requests_per_s,
        prefill_s=prefill_s,
        decode_batch=batch,
        decode_step_s=decode_s,
        tax_share=tax_share,
        prefill_instances=question.requests_per_s * prefill_s,
        decode_instances=question.requests_per_s * per_request_s,
        ratio=prefill_s / per_request_s,
        kv_bytes=kv_bytes,
        network_s=network_s,
        link_s=kv_bytes / link if link else None,
        advice=_pool_words(
            tax_share, load=question.requests_per_s * (prefill_s + per_request_s), transfer=network_s / prefill_s
        ),
    )


def _pool_words(tax_share: float, *, load: float, transfer: float) -> str:
    """Thresholds: below two busy instances a second pool would idle; a tax under a quarter is not worth a transfer."""
    if load < 2.0:
        return f"one pool: the traffic keeps {load:.2f} instances busy, too few to split"
    if tax_share < 0.25:
        return (
            f"one pool: prefills take {tax_share:.0%} of a token's time, less than a split would cost in idle devices"
        )
    if transfer > 1.0:
        return "one pool: moving the cache over 400 Gb/s takes longer than computing it"
    return f"two pools: prefills take {tax_share:.0%} of a token's time; worth it when the TPOT limit is tight"
