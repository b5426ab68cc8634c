"""The part of `/metrics` that a cluster has: every worker apart, by its name and its pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diptych.control.stats import WorkerCounts, WorkerStats

_LABELS = ["worker", "pool"]
_GAUGES: Mapping[str, tuple[str, Callable[[WorkerCounts], float]]] = {
    "sequences_running": ("sequences in prefill or decode", lambda one: one.core.running),
    "sequences_waiting": ("sequences waiting to be scheduled", lambda one: one.core.waiting),
    "requests_receiving": ("requests whose keys and values come from another worker", lambda one: one.receiving),
    "requests_reading": ("prompts that are read for other workers", lambda one: one.reading),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[WorkerCounts], float]]] = {
    "sent_tokens": ("tokens whose keys and values were sent to other workers", lambda one: one.sent_tokens),
    "sent_bytes": ("bytes of keys and values sent", lambda one: one.sent_bytes),
    "received_tokens": ("tokens whose keys and values came and were taken in", lambda one: one.received_tokens),
    "received_bytes": ("bytes of keys and values taken in", lambda one: one.received_bytes),
    "export_seconds": ("time to copy blocks out of the pool and to hand them to the link", lambda one: one.export_s),
    "import_seconds": ("time to check blocks and copy them into the pool", lambda one: one.import_s),
    "lost_ends": ("prompts of which all came but the reader's word that it was all", lambda one: one.lost_ends),
    "recomputed_tokens": ("tokens read again because they did not come", lambda one: one.recomputed_tokens),
}


def worker_metrics(workers: Sequence[WorkerStats]) -> Iterator[Metric]:
    """Families of all workers; those with vLLM's names stand beside the server's own, told apart by `engine`."""
    up = GaugeMetricFamily("diptych_worker_up", "1 while a worker is there", labels=[*_LABELS, "node", "pid"])
    deaths = CounterMetricFamily("diptych_worker_deaths", "how often a worker was lost", labels=_LABELS)
    for one in workers:
        up.add_metric([one.name, one.pool, one.node, str(one.pid)], one.is_up)
        deaths.add_metric([one.name, one.pool], one.deaths)
    yield up
    yield deaths
    known = [(one, one.counts) for one in workers if one.counts is not None]
    for kind, families in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (text, read) in families.items():
            family = kind(f"diptych_worker_{name}", text, labels=_LABELS)
            for one, counts in known:
                family.add_metric([one.name, one.pool], read(counts))
            yield family
    blocks = GaugeMetricFamily("diptych_worker_kv_blocks", "KV blocks by state", labels=[*_LABELS, "state"])
    recomputes = CounterMetricFamily(
        "diptych_worker_recomputes", "requests of which not everything came, by why", labels=[*_LABELS, "reason"]
    )
    refused = CounterMetricFamily(
        "diptych_worker_parcels_refused", "pieces of keys and values not taken in, by why", labels=[*_LABELS, "reason"]
    )
    for one, counts in known:
        states = {
            "in_use": counts.core.blocks_in_use,
            "cached": counts.core.blocks_cached,
            "free": counts.core.blocks_free,
        }
        for state, number in states.items():
            blocks.add_metric([one.name, one.pool, state], number)
        for family, numbers in ((recomputes, counts.recomputes), (refused, counts.refused)):
            for reason, number in sorted(numbers.items()):
                family.add_metric([one.name, one.pool, reason], number)
    yield from (blocks, recomputes, refused)
