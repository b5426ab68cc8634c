"""What a frame of the live page's feed says of a step and of a request, be it a server's or a film's."""

from __future__ import annotations

from typing import Any

from diptych.metrics import RequestRecord, StepRecord


def step_row(step: StepRecord) -> dict[str, Any]:
    """A step that ended, as the page draws it: times in seconds, tokens of each phase, drafts as [proposed, accepted]."""
    return {
        "t": step.begin_s,
        "s": step.time_s,
        "p": step.shape.prefill_tokens,
        "d": step.decode_tokens,
        "g": [step.drafted_tokens, step.accepted_tokens],
        "chunks": step.prefills,
        "seqs": step.decode_request_ids,
    }


def request_row(record: RequestRecord) -> dict[str, Any]:
    """A request that is open."""
    return {"id": record.request_id, "arrival_s": record.arrival_s, "preemptions": record.n_preemptions} | token_counts(
        record
    )


def token_counts(record: RequestRecord) -> dict[str, int]:
    """Tokens of a request, open or over."""
    return {
        "prompt_tokens": record.prompt_tokens,
        "computed_to": record.chunks[-1].end if record.chunks else 0,
        "output_tokens": record.output_tokens,
    }
