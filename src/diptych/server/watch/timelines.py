"""The records of open and recent requests, found by the id in the answer or the client's own, and their JSON."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from diptych.metrics import RequestRecord
from diptych.server.watch.telemetry import Telemetry

# open answers still need their logs when others finish, so a few more than asked for are kept
SPARE_LOGS = 1024
# the ids of the prompts of one body: how many of its answers are remembered
KEPT_GROUPS = 1024
# what each protocol puts before the client's own id
ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "embd-", "rerank-", "score-", "classify-")


class Timelines:
    """The records of the last requests. `keep` runs on the engine's thread, the rest on the event loop."""

    def __init__(self, telemetry: Telemetry, *, kept: int) -> None:
        self._telemetry = telemetry
        self._kept = kept
        self._finished: OrderedDict[str, RequestRecord] = OrderedDict()
        self._groups: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self.given: set[str] = set()  # clients' own ids, of requests on their way to the engine
        telemetry.on_record.append(self.keep)

    def keep(self, record: RequestRecord) -> None:
        """Add the record of a request that is over and forget the oldest."""
        self._finished[record.request_id] = record
        while len(self._finished) > self._kept + SPARE_LOGS:
            self._finished.popitem(last=False)

    def group(self, response_id: str, request_ids: Sequence[str]) -> None:
        """Remember which requests one answer holds: several where a body has several prompts."""
        self._groups.pop(response_id, None)
        if len(request_ids) > 1:
            self._groups[response_id] = tuple(request_ids)
        while len(self._groups) > KEPT_GROUPS:
            self._groups.popitem(last=False)

    def is_open(self, name: str) -> bool:
        """Whether a request of that name is open, or on its way to be."""
        return name in self.given or any(one.end_s is None for one in self.find(name))

    def find(self, name: str) -> list[RequestRecord]:
        """The records behind an answer's id or the client's own: one per prompt, none for an unknown id."""
        for known in (name, *(f"{prefix}{name}" for prefix in ID_PREFIXES)):
            records = [found for one in self._groups.get(known, (known,)) if (found := self._of(one)) is not None]
            if records:
                return records
        return []

    def _of(self, request_id: str) -> RequestRecord | None:
        return self._telemetry.records.get(request_id) or self._finished.get(request_id)


def timelines_json(name: str, records: Sequence[RequestRecord], *, now_s: float) -> dict[str, Any]:
    """The timeline of an answer: of its one request, or of each of its prompts under `prompts`."""
    each = [timeline_json(record, now_s=now_s) for record in records]
    if len(each) == 1:
        return each[0]
    return {
        "id": name,
        "object": "request.timelines",
        "is_finished": all(one["is_finished"] for one in each),
        "prompt_tokens": sum(one["prompt_tokens"] for one in each),
        "prompts": each,
    }


def timeline_json(record: RequestRecord, *, now_s: float) -> dict[str, Any]:
    """A request's life in the order it happened; times in milliseconds since it arrived."""

    def ms(at_s: float) -> float:
        return round((at_s - record.arrival_s) * 1e3, 3)

    choices = sorted(record.choices.items(), key=lambda item: item[0])
    tokens = {str(index): [ms(at_s) for at_s in one.token_times_s] for index, one in choices if one.token_times_s}
    end_s = record.end_s
    return {
        "id": record.request_id,
        "object": "request.timeline",
        "is_finished": end_s is not None,
        "prompt_tokens": record.prompt_tokens,
        "age_ms": ms(now_s),
        "end_ms": None if end_s is None else ms(end_s),
        "prefill_chunks": [
            {
                "step": chunk.step.step_id,
                "at_ms": ms(chunk.step.begin_s),
                "start": chunk.start,
                "end": chunk.end,
                "is_recompute": chunk.is_recompute,
                "step_prefill_tokens": chunk.step.prefill_tokens,
                "step_decode_tokens": chunk.step.decode_tokens,
            }
            for chunk in record.chunks
        ],
        "tokens_ms": tokens,
        "drafts": [
            {
                "step": one.step_id,
                "index": one.index,
                "at_ms": ms(one.at_s),
                "drafted": one.drafted_tokens,
                "kept": one.accepted_tokens,
            }
            for one in list(record.drafts)
        ],
        "preempted_ms": [ms(at_s) for at_s in record.preempted_s],
        "shared_steps": [
            {
                "step": step.step_id,
                "at_ms": ms(step.begin_s),
                "duration_ms": round((end_s - step.begin_s) * 1e3, 3),
                "prefill_tokens": step.prefill_tokens,
                "caused_by": [name for name, *_ in step.prefills if name != record.request_id],
            }
            for step, end_s, _ in record.shared_steps
        ],
    }
