"""The account in every answer: `usage` and `timings`, exactly as the contract names them.

Times come from `diptych.metrics` (queue + prefill = TTFT, queue + prefill + decode = end to end); segments share the
measured prefill; predictions and the roofline stand beside. Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.compute.ceilings import Ceilings
from diptych.engine.async_llm import RequestHandle
from diptych.engine.cost_view import CostView
from diptych.ground.events import Timings, Usage
from diptych.ground.request import Request
from diptych.ground.shape import StepShape
from diptych.insight.segments import ChunkTime, TokenWork, segment_costs
from diptych.metrics import RequestRecord


@dataclass(slots=True)
class Thinking:
    """Where the reasoning of one choice ended. at_s values are the engine's."""

    tokens: int = 0
    end_s: float | None = None  # last token that was still reasoning
    visible_s: float | None = None  # first token that was not


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one finished request says about itself."""

    request: Request
    usage: Usage
    timings: Timings
    record: RequestRecord
    thinking: Sequence[Thinking] = field(default_factory=tuple)

    @property
    def reasoning_tokens(self) -> int:
        """Over all choices."""
        return sum(one.tokens for one in self.thinking)


class Accountant:
    """Turns accounts into JSON, with what is fixed per server: work per token, ceilings, the cost model."""

    def __init__(
        self,
        *,
        work: TokenWork,
        view: CostView | None,
        ceilings: Ceilings | None,
        cold_start_s: float,
        cache_block_tokens: int | None,
        unpredicted: Callable[[], str | None],
    ) -> None:
        """unpredicted: why no profile predicts steps; None where one does."""
        self._unpredicted = unpredicted
        self._work = work
        self._view = view
        self._ceilings = ceilings
        self._cold_start_s = cold_start_s
        self._cache_block_tokens = cache_block_tokens  # None: no prefix is kept
        self._is_cold = True

    def account(self, handle: RequestHandle, thinking: Sequence[Thinking] = ()) -> Account:
        """The account of a request whose last delta has arrived."""
        record = handle.record()
        return Account(
            request=handle.request,
            usage=record.usage(),
            timings=record.timings(),
            record=record,
            thinking=tuple(thinking),
        )

    def usage(self, accounts: Sequence[Account]) -> dict[str, Any]:
        """OpenAI's usage, summed over the prompts of one body."""
        prompt = sum(one.usage.prompt_tokens for one in accounts)
        accepted = sum(one.usage.accepted_tokens for one in accounts)
        output = sum(one.usage.output_tokens for one in accounts)
        read = {"cached_tokens": sum(one.usage.cached_tokens for one in accounts)}
        if all(one.request.pooling is None for one in accounts):
            read["cache_write_tokens"] = sum(self.cache_written_tokens(one.usage) for one in accounts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": read,
            "completion_tokens_details": {
                "reasoning_tokens": sum(one.reasoning_tokens for one in accounts),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(one.usage.drafted_tokens for one in accounts) - accepted,
            },
        }

    def cache_written_tokens(self, usage: Usage) -> int:
        """Prompt tokens that were computed and are kept for later prompts: those of full blocks."""
        block = self._cache_block_tokens
        if block is None:
            return 0
        return max(0, (usage.prompt_tokens - usage.remaining_tokens) // block * block - usage.cached_tokens)

    def timings(self, accounts: Sequence[Account]) -> dict[str, Any]:
        """llama.cpp's keys and ours. Several prompts: counts and times of all together, each under `diptych.prompts`."""
        cold_s, self._is_cold = (self._cold_start_s if self._is_cold else 0.0), False
        each = [self._one(account, cold_s) for account in accounts]
        return each[0] if len(each) == 1 else _together(accounts, each)

    def _one(self, account: Account, cold_s: float) -> dict[str, Any]:
        usage, timings = account.usage, account.timings
        return {
            "cache_n": usage.cached_tokens,
            "transfer_n": usage.transferred_tokens,
            **_rates("prompt", usage.computed_tokens, timings.prefill_s),
            **_rates("predicted", usage.output_tokens, timings.decode_s),
            **_drafts([usage]),
            "diptych": {
                "queue_ms": _ms(timings.queue_s),
                "prefill_ms": _ms(timings.prefill_s),
                "transfer_ms": _ms(timings.transfer_s),
                "decode_ms": _ms(timings.decode_s),
                "e2e_ms": _ms(timings.e2e_s),
                "stall_ms": _ms(timings.stall_s),
                "ttft_ms": _ms(timings.ttft_s),
                "tpot_ms": _ms(timings.tpot_s),
                "cold_start_ms": _ms(cold_s),
                "preemptions": timings.n_preemptions,
                "recomputed_tokens": usage.recomputed_tokens,
                **_thinking(account),
                "predicted": self._predicted(account),
                "roofline": self._roofline(account),
                "segments": self._segments(account),
            },
        }

    def _predicted(self, account: Account) -> dict[str, float | str | None]:
        """What the machine's profile says of the steps this request took part in, here and where its prompt was read, others'
        work included. Without a profile engines guess for their budgets, too long rather than too short: that is no prediction.
        """
        record, first_s, reason = account.record, account.record.first_token_s, self._unpredicted()
        expected = [one.predicted_s for one in record.transfers]
        expected += [
            chunk.step.predicted_s for chunk in record.chunks if first_s is None or chunk.step.begin_s < first_s
        ]
        known = [value for value in expected if value is not None]
        is_known = reason is None and bool(known) and len(known) == len(expected)
        return {
            "prefill_ms": _ms(sum(known)) if is_known else None,
            "decode_ms": _ms(record.decode_predicted_s) if is_known else None,
            "reason": reason,
        }

    def _roofline(self, account: Account) -> dict[str, Any]:
        """The least time the machine's ceilings allow for this request if it were alone."""
        if self._view is None or self._ceilings is None:
            return {"prefill_ms": None, "decode_ms": None, "bound": None}
        usage = account.usage
        prefill_s = decode_s = memory_s = compute_s = 0.0
        if usage.computed_tokens > 0:
            prompt = StepShape.prefill(batch=1, new_tokens=usage.computed_tokens, cached_tokens=usage.cached_tokens)
            prefill_s = self._view.bound_s(prompt, self._ceilings)
        n_steps = max((len(one.token_times_s) - 1 for one in account.record.choices.values()), default=0)
        if n_steps > 0:
            middle = usage.prompt_tokens + n_steps // 2 + 1
            work = StepShape.decode(batch=account.request.sampling.n, context_tokens=middle)
            memory_s, compute_s = (n_steps * part_s for part_s in self._view.parts_s(work, self._ceilings))
            decode_s = max(memory_s, compute_s)
        is_memory = decode_s > prefill_s and memory_s >= compute_s
        return {
            "prefill_ms": _ms(prefill_s),
            "decode_ms": _ms(decode_s),
            "bound": self._ceilings.roof if is_memory else "compute",
        }

    def _segments(self, account: Account) -> list[dict[str, Any]]:
        request = account.request
        costs = segment_costs(
            request.segments,
            chunk_times(account.record, account.timings),
            n_tokens=len(request.prompt_token_ids),
            cached_tokens=account.usage.cached_tokens,
            work=self._work,
        )
        return [
            {
                "name": cost.name,
                "tokens": cost.end - cost.start,
                "cached_tokens": cost.cached_tokens,
                "prefill_ms": _ms(cost.prefill_s),
            }
            for cost in costs
        ]


def _together(accounts: Sequence[Account], each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several prompts of one body, which arrive together, as one: queue until the first of them is begun, prefill (transfers
    in it) until the last has its first token, decode until the last has ended. Queue + prefill + decode = end to end here too.
    """
    inner = [one["diptych"] for one in each]
    queue_s = min(one.timings.queue_s for one in accounts)
    first_s = max(one.timings.queue_s + one.timings.prefill_s + one.timings.transfer_s for one in accounts)
    end_s = max(first_s, *(one.timings.e2e_s for one in accounts))
    tpots = [one.timings.tpot_s for one in accounts if one.timings.tpot_s is not None]
    return {
        "cache_n": sum(one.usage.cached_tokens for one in accounts),
        "transfer_n": sum(one.usage.transferred_tokens for one in accounts),
        **_rates("prompt", sum(one.usage.computed_tokens for one in accounts), first_s - queue_s),
        **_rates("predicted", sum(one.usage.output_tokens for one in accounts), end_s - first_s),
        **_drafts([one.usage for one in accounts]),
        "diptych": {
            "queue_ms": _ms(queue_s),
            "prefill_ms": _ms(first_s - queue_s),
            "decode_ms": _ms(end_s - first_s),
            "e2e_ms": _ms(end_s),
            "stall_ms": max(one["stall_ms"] for one in inner),
            "ttft_ms": _ms(first_s),
            "tpot_ms": _ms(sum(tpots) / len(tpots)) if tpots else None,
            "cold_start_ms": inner[0]["cold_start_ms"],
            "preemptions": sum(one["preemptions"] for one in inner),
            "recomputed_tokens": sum(one["recomputed_tokens"] for one in inner),
            "segments": [segment for one in inner for segment in one["segments"]],
            "prompts": list(each),
        },
    }


def running_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """vLLM's `continuous_usage_stats`: the usage so far, for every event of a stream."""
    total = prompt_tokens + completion_tokens
    return {"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}}


def chunk_times(record: RequestRecord, timings: Timings) -> list[ChunkTime]:
    """Measured prefill time by chunk: from the moment a chunk was planned to the next one's, the last to the first token.

    The intervals lie end to end, so they add up to `prefill_s`; what a chunk waited for is charged to the chunk.
    """
    begin_s = record.arrival_s + timings.queue_s
    end_s = begin_s + timings.prefill_s + timings.transfer_s
    came = [one for one in record.transfers if one.start < one.end]
    elsewhere = [ChunkTime(start=one.start, end=one.end, seconds=one.read_s) for one in came]
    if record.transfers:  # what was read for nothing is charged to what is read in its place
        begin_s = record.transfers[-1].at_s - sum(one.read_s for one in record.transfers if one.start == one.end)
    chunks = [chunk for chunk in record.chunks if chunk.step.begin_s < end_s]
    starts = [begin_s, *(chunk.step.begin_s for chunk in chunks[1:])]
    ends = [*starts[1:], end_s]
    return elsewhere + [
        ChunkTime(start=chunk.start, end=chunk.end, seconds=max(0.0, until_s - from_s))
        for chunk, from_s, until_s in zip(chunks, starts, ends, strict=False)
    ]


def _thinking(account: Account) -> dict[str, Any]:
    """Reasoning apart from the answer; both parts of decode add up to it."""
    timings = account.timings
    first_s = None if timings.ttft_s is None else account.record.arrival_s + timings.ttft_s
    ends = [one.end_s for one in account.thinking if one.end_s is not None]
    thinking_s = max(0.0, max(ends) - first_s) if ends and first_s is not None else 0.0
    visible = [one.visible_s for one in account.thinking if one.visible_s is not None]
    visible_s = min(visible) - account.record.arrival_s if visible else timings.ttft_s if not account.thinking else None
    return {
        "thinking_n": account.reasoning_tokens,
        "thinking_ms": _ms(thinking_s),
        "answer_n": account.usage.output_tokens - account.reasoning_tokens,
        "answer_ms": _ms(timings.decode_s - thinking_s),
        "ttft_visible_ms": _ms(visible_s),
    }


def _drafts(usages: Sequence[Usage]) -> dict[str, int]:
    """llama.cpp's counts of speculation, where there was any."""
    drafted = sum(usage.drafted_tokens for usage in usages)
    return {"draft_n": drafted, "draft_n_accepted": sum(one.accepted_tokens for one in usages)} if drafted else {}


def _rates(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": _ms(seconds),
        f"{name}_per_token_ms": _ms(seconds / tokens) if tokens else None,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds > 0 else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 6)
