"""What would change: formats, tensor parallel, speculation; the chunk for a stall budget; one pool or two.

>>> round(accepted_tokens(draft_tokens=4, acceptance=0.7), 3)
2.773
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diptych.cost.memory import capacity_of
from diptych.cost.parameters import kv_bytes_stored
from diptych.cost.planner import Question, prefill_work_of
from diptych.cost.setup import Setup
from diptych.cost.tables import kv_spec, quant_spec
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape

# 400 Gb/s Ethernet or InfiniBand: how the KV of a finished prefill usually travels between machines.
NETWORK_BYTES_PER_S = 50e9
WHAT_IF_WEIGHTS = ("bf16", "fp8", "int8", "int4")
WHAT_IF_TP = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The same question under one change. `obstacle`: why it cannot be done; the numbers are then None."""

    change: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    tokens_per_s: float | None = None
    max_batch: int | None = None
    weight_bytes: float | None = None
    obstacle: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A verify step of `draft_tokens` drafted tokens plus one, at an acceptance rate."""

    draft_tokens: int
    acceptance: float
    accepted_tokens: float  # handed out per verify step, on average
    verify_s: float
    draft_s: float
    tpot_s: float
    speedup: float


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
    kv_bytes: float
    network_s: float
    link_s: float | None
    advice: str


def accepted_tokens(*, draft_tokens: int, acceptance: float) -> float:
    """Mean tokens per verify step: (1 - a^(k+1)) / (1 - a)."""
    if acceptance >= 1.0:
        return float(draft_tokens + 1)
    return float((1.0 - acceptance ** (draft_tokens + 1)) / (1.0 - acceptance))


def what_ifs(setup: Setup, question: Question) -> tuple[WhatIf, ...]:
    """The asked setup first, then one change at a time."""
    return tuple(_what_if(change, variant, question) for change, variant in _variants(setup))


def _variants(setup: Setup) -> Iterator[tuple[str, Setup | ConfigError]]:
    yield f"as asked ({setup.quant.name}, kv {setup.kv.name}, tp {setup.tp})", setup
    for name in WHAT_IF_WEIGHTS:
        if name != setup.quant.name:
            yield f"weights {name}", setup.with_weights(quant_spec(name))
    if setup.kv.bytes_per_element > 1.0:
        yield "kv int8", replace(setup, kv=kv_spec("int8", block_tokens=setup.kv.block_tokens))
    for tp in WHAT_IF_TP:
        if tp != setup.tp:
            yield f"tensor parallel {tp}", _split(setup, tp)


def _split(setup: Setup, tp: int) -> Setup | ConfigError:
    try:
        return replace(setup, tp=tp)
    except ConfigError as error:
        return error


def _what_if(change: str, setup: Setup | ConfigError, question: Question) -> WhatIf:
    if isinstance(setup, ConfigError):
        return WhatIf(change=change, obstacle=setup.message)
    context = question.decode_context_tokens
    capacity = capacity_of(setup, context_tokens=context, batch=question.batch)
    predictor = setup.model_of_time()
    ttft_s = predictor.predict(prefill_work_of(question)).total_s
    tpot_s = predictor.predict(StepShape.decode(batch=question.batch, context_tokens=context)).total_s
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


def speculation(setup: Setup, question: Question) -> Speculation:
    """Speculative decoding: one verify step checks k + 1 rows per sequence; drafting costs a share of a decode step."""
    context, batch = question.decode_context_tokens, question.batch
    predictor = setup.model_of_time()
    plain_s = predictor.predict(StepShape.decode(batch=batch, context_tokens=context)).total_s
    rows = question.draft_tokens + 1
    # A verify step has the launches of a decode step (one graph) and the arithmetic of k + 1 rows per sequence.
    verify = StepShape.decode(batch=batch * rows, context_tokens=context + 1)
    repeated_s = _shared_kv_s(setup, context, batch, rows) + batch * (rows - 1) * setup.calibration.decode.sequence_s
    verify_s = predictor.predict(verify).total_s - repeated_s
    draft_s = question.draft_tokens * question.draft_cost * plain_s
    accepted = accepted_tokens(draft_tokens=question.draft_tokens, acceptance=question.acceptance)
    tpot_s = (verify_s + draft_s) / accepted
    return Speculation(
        draft_tokens=question.draft_tokens,
        acceptance=question.acceptance,
        accepted_tokens=accepted,
        verify_s=verify_s,
        draft_s=draft_s,
        tpot_s=tpot_s,
        speedup=plain_s / tpot_s,
    )


def _shared_kv_s(setup: Setup, context: int, batch: int, rows: int) -> float:
    """The rows of one sequence read its cache once, not once each: the time to take off."""
    predictor = setup.model_of_time()

    def attention_s(count: int) -> float:
        return predictor.predict(StepShape.decode(batch=count, context_tokens=context + 1)).parts_s["attention"]

    return attention_s(batch * rows) - attention_s(batch)


def chunk_for(setup: Setup, question: Question) -> ChunkAdvice:
    """Largest chunk C such that a step of `batch` decode rows and C prompt rows ends within the stall budget.

    Judged at the last chunk of the prompt, which sees the longest cache.
    """
    predictor = setup.model_of_time()
    decode = StepShape.decode(batch=question.batch, context_tokens=question.decode_context_tokens)
    prompt = question.prompt_tokens - question.cached_tokens

    def step_s(chunk: int) -> float:
        shape = ChunkShape(
            phase=Phase.PREFILL, new_tokens=chunk, start_pos=question.prompt_tokens - chunk, samples=True
        )
        return predictor.predict(decode.plus(StepShape(shapes=(shape,)))).total_s

    chunk = bisect_right(range(1, prompt + 1), question.stall_budget_s, key=step_s)  # 0: none is short enough
    reread = kv_bytes_stored(setup.model, setup.kv, 1) * prompt * (prompt - chunk) / (2 * chunk) if chunk else 0.0
    return ChunkAdvice(
        stall_budget_s=question.stall_budget_s,
        decode_only_s=predictor.predict(decode).total_s,
        chunk_tokens=chunk,
        step_s=step_s(chunk or 1),
        ttft_s=_chunked_ttft_s(setup, question, decode, chunk) if chunk else float("inf"),
        whole_step_s=step_s(prompt),
        kv_reread_bytes=reread,
    )


def _chunked_ttft_s(setup: Setup, question: Question, decode: StepShape, chunk: int) -> float:
    predictor = setup.model_of_time()
    total_s, start = 0.0, question.cached_tokens
    while start < question.prompt_tokens:
        size = min(chunk, question.prompt_tokens - start)
        is_last = start + size == question.prompt_tokens
        shape = ChunkShape(phase=Phase.PREFILL, new_tokens=size, start_pos=start, samples=is_last)
        total_s += predictor.predict(decode.plus(StepShape(shapes=(shape,)))).total_s
        start += size
    return total_s


def pools_for(setup: Setup, question: Question) -> PoolAdvice:
    """Whether prefill and decode want separate pools at a traffic.

    One pool pays (B / OSL) t_pf per token for other requests' prefills; two pools move the prompt's KV instead.
    """
    predictor = setup.model_of_time()
    one = replace(question, batch=1)
    prefill_s = predictor.predict(prefill_work_of(one)).total_s
    context = question.decode_context_tokens
    batch = max(question.batch, 1)
    decode_s = predictor.predict(StepShape.decode(batch=batch, context_tokens=context)).total_s
    per_request_s = question.output_tokens * decode_s / batch
    tax_s = batch / question.output_tokens * prefill_s
    tax_share = tax_s / (decode_s + tax_s)
    kv_bytes = kv_bytes_stored(setup.model, setup.kv, question.prompt_tokens)
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
