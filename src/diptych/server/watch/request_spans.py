"""A request's spans, from its record: the request as the client sees it, and in it the phases that add up to it."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.spans import OpenSpan, Spans
from diptych.ground.phase import FinishReason
from diptych.ground.request import Request
from diptych.metrics import RequestRecord

NAME = "llm_request"  # as vLLM calls it, with its names of attributes


def end_request_span(spans: Spans, span: OpenSpan, request: Request, record: RequestRecord) -> None:
    """Everything that is known of a request that is over. Phases that took no time are left out."""
    usage, timings = record.usage(), record.timings()
    sampling, end_s = request.sampling, record.arrival_s + timings.e2e_s
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens or 0,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.output_tokens,
        "gen_ai.latency.time_in_queue": timings.queue_s,
        "gen_ai.latency.time_in_model_prefill": timings.prefill_s,
        "gen_ai.latency.time_in_model_decode": timings.decode_s,
        "gen_ai.latency.e2e": timings.e2e_s,
        "diptych.prompt_tokens.computed": usage.computed_tokens,
        "diptych.prompt_tokens.cached": usage.cached_tokens,
        "diptych.prompt_tokens.transferred": usage.transferred_tokens,
        "diptych.recomputed_tokens": usage.recomputed_tokens,
        "diptych.preemptions": timings.n_preemptions,
    }
    if timings.ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = timings.ttft_s
    at_s = record.arrival_s
    phases = (
        ("queue", timings.queue_s),
        ("prefill", timings.prefill_s),
        ("transfer", timings.transfer_s),
        ("decode", timings.decode_s),
    )
    for name, duration_s in phases:
        if duration_s > 0.0:
            spans.note(name, parent=span.trace, begin_s=at_s, end_s=at_s + duration_s, attributes={})
        at_s += duration_s
    span.end(end_s, attributes, error=_error(record.reasons))


def _error(reasons: Sequence[FinishReason | None]) -> str | None:
    if FinishReason.ERROR in reasons:
        return "the engine failed"
    return "the client left" if FinishReason.ABORT in reasons else None
