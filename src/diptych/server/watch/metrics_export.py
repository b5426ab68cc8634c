"""`/metrics`: Diptych's own names, and beside them the names that dashboards made for vLLM read.

Owns names, types, labels and help texts. The numbers come from `Telemetry` and from the engine's counts at scrape time.
Time to first token starts at arrival in both families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych.control.stats import CoreStats, WorkerStats
from diptych.engine.adapters import AdapterCounts
from diptych.ground.clock import wall_time_s
from diptych.server.admission import Outlook
from diptych.server.watch.telemetry import LiveHistogram, Telemetry
from diptych.server.watch.worker_metrics import worker_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the info metrics and the page say about the model."""

    name: str
    fingerprint: str | None
    backend: str
    kernels: str
    faster_kernels: str  # that the processor has too; "" where none is
    weights: str
    kv: str
    version: str
    block_tokens: int
    n_blocks: int
    max_context_tokens: int
    load_s: float
    n_parameters: int
    weight_bytes: int


def _use(counts: CoreStats) -> float:
    return counts.blocks_in_use / max(1, sum(_blocks(counts).values()))


_VLLM_GAUGES: tuple[tuple[str, str, Callable[[CoreStats], float]], ...] = (
    ("num_requests_running", "sequences in prefill or decode", lambda counts: counts.running),
    ("num_requests_waiting", "sequences waiting to be scheduled", lambda counts: counts.waiting),
    ("kv_cache_usage_perc", "KV blocks in use, 1 is all", _use),
)


class MetricsCollector(Collector):
    """Makes all metric families anew at each scrape; costs nothing in between."""

    def __init__(self, telemetry: Telemetry, model: ServedModel, *, is_vllm_compatible: bool) -> None:
        self._telemetry = telemetry
        self._model = model
        self._is_vllm_compatible = is_vllm_compatible
        self.counts: CoreStats | None = None
        self.outlook: Outlook | None = None
        self.adapters: AdapterCounts | None = None
        self.workers: Sequence[WorkerStats] = ()

    def collect(self) -> Iterator[Metric]:
        """Every family, in a fixed order."""
        yield from self._own_gauges()
        yield from self._own_counters()
        yield from self._own_distributions()
        if self._is_vllm_compatible:
            yield from self._vllm_gauges()
            yield from self._vllm_counters()
            yield from self._vllm_distributions()
        if self.workers:
            yield from worker_metrics(self.workers)

    def _own_gauges(self) -> Iterator[Metric]:
        model, counts = self._model, self.counts
        labels = ["model", "backend", "weights", "kv", "version", "kernels", "faster_kernels"]
        info = GaugeMetricFamily("diptych_build_info", "what is served, with which kernels and formats", labels=labels)
        made_of = [model.weights, model.kv, model.version, model.kernels, model.faster_kernels]
        info.add_metric([model.name, model.backend, *made_of], 1)
        yield info
        yield _gauge(
            "diptych_model_load_seconds", "time from process start of loading to ready (cold start)", model.load_s
        )
        yield _gauge("diptych_model_parameters", "parameters of the model", model.n_parameters)
        yield _gauge(
            "diptych_model_weight_bytes",
            "bytes of all weights that steps read more of than single rows",
            model.weight_bytes,
        )
        if counts is None:
            return
        yield _gauge("diptych_sequences_running", "sequences in prefill or decode", counts.running)
        yield _gauge("diptych_sequences_waiting", "sequences waiting to be scheduled", counts.waiting)
        yield _gauge("diptych_waiting_tokens", "prompt and max_tokens of all waiting requests", counts.waiting_tokens)
        blocks = GaugeMetricFamily("diptych_kv_blocks", "KV blocks by state", labels=["state"])
        for state, number in _blocks(counts).items():
            blocks.add_metric([state], number)
        yield blocks
        if self.adapters is not None:
            yield _gauge("diptych_adapters", "LoRA adapters that can be asked for", self.adapters.loaded)
            yield _gauge("diptych_adapter_bytes", "memory of all adapters, leaving ones too", self.adapters.n_bytes)
        outlook = self.outlook
        if outlook is None:
            return
        yield _gauge(
            "diptych_admission_wait_seconds", "predicted wait of a new request for its first step", outlook.wait_s
        )
        yield _gauge("diptych_admission_bound_seconds", "longest wait at which overload admits", outlook.bound_s)
        yield _gauge(
            "diptych_admission_overloaded", "1 while requests are refused for their wait", outlook.is_overloaded
        )

    def _own_counters(self) -> Iterator[Metric]:
        telemetry = self._telemetry
        tokens = CounterMetricFamily(
            "diptych_prompt_tokens",
            "prompt tokens by source; dropped ones were not read before their request ended, recomputed ones had again",
            labels=["source"],
        )
        tokens.add_metric(["computed"], telemetry.computed_tokens)
        tokens.add_metric(["cached"], telemetry.cached_tokens)
        tokens.add_metric(["transferred"], telemetry.transferred_tokens)
        tokens.add_metric(["dropped"], telemetry.dropped_tokens)
        tokens.add_metric(["recomputed"], telemetry.recomputed_tokens)
        yield tokens
        yield _counter("diptych_output_tokens", "tokens handed out", telemetry.output_tokens)
        yield _counter("diptych_states", "prompts read for an embedding or a score, and not answered", telemetry.states)
        yield _counter("diptych_reasoning_tokens", "output tokens between thinking tags", telemetry.reasoning_tokens)
        yield _counter("diptych_preemptions", "sequences that lost their blocks", telemetry.preemptions)
        faults = 0 if self.counts is None else self.counts.drafter_faults
        yield _counter("diptych_drafter_faults", "drafters switched off because they misbehaved", faults)
        yield _counter("diptych_steps", "steps run", telemetry.steps)
        yield _counter("diptych_step_device_seconds", "time inside the kernels", telemetry.step_device_s)
        yield _counter("diptych_step_host_seconds", "time of steps outside the kernels", telemetry.step_host_s)
        yield _counter("diptych_requests_taken", "requests that the engine took", telemetry.requests_taken)
        outcomes = CounterMetricFamily("diptych_requests", "requests that are over, by outcome", labels=["outcome"])
        for outcome, number in telemetry.outcomes.items():
            outcomes.add_metric([outcome], number)
        yield outcomes
        finished = CounterMetricFamily("diptych_choices_finished", "finished choices by reason", labels=["reason"])
        for reason, number in telemetry.finished.items():
            finished.add_metric([reason], number)
        yield finished
        refused = CounterMetricFamily("diptych_requests_refused", "requests answered with an error", labels=["status"])
        for status, number in sorted(telemetry.refused.items()):
            refused.add_metric([status], number)
        yield refused

    def _own_distributions(self) -> Iterator[Metric]:
        telemetry = self._telemetry
        steps = HistogramMetricFamily("diptych_step_seconds", "duration of steps by what they held", labels=["kind"])
        for kind, distribution in telemetry.step_s.items():
            steps.add_metric([kind], *_buckets(distribution))
        yield steps
        lag = "how late a timer of the event loop fires, 20 of them a second; every stream waits as long"
        yield _histogram("diptych_event_loop_lag_seconds", lag, telemetry.loop_lag_s)
        yield _histogram("diptych_step_tokens", "tokens per step, both phases", telemetry.step_tokens)
        yield _histogram("diptych_ttft_seconds", "arrival to first token handed out", telemetry.ttft_s)
        yield _histogram("diptych_itl_seconds", "time between neighbouring tokens of one choice", telemetry.itl_s)
        phases = HistogramMetricFamily(
            "diptych_request_phase_seconds",
            "time of finished requests by phase; stall is the part of decode lengthened by others' prefill",
            labels=["phase"],
        )
        for name in ("queue", "prefill", "transfer", "decode", "stall"):
            if name != "transfer" or telemetry.requests[name].n_values:
                phases.add_metric([name], *_buckets(telemetry.requests[name]))
        yield phases
        yield _histogram("diptych_tpot_seconds", "decode time per token after the first", telemetry.requests["tpot"])
        yield _histogram("diptych_e2e_seconds", "arrival to last token", telemetry.requests["e2e"])

    def _labels(self) -> dict[str, str]:
        return {"model_name": self._model.name, "engine": "0"}

    def _vllm_gauges(self) -> Iterator[Metric]:
        counts, model, labels = self.counts, self._model, self._labels()
        if counts is None:
            return
        # vLLM tells the engines of one server apart by a number
        engines = [one.counts.core for one in self.workers if one.counts is not None] or [counts]
        for name, text, read in _VLLM_GAUGES:
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
            for number, core in enumerate(engines):
                family.add_metric([model.name, str(number)], read(core))
            yield family
        n_blocks = sum(_blocks(counts).values())  # of a cluster's workers, which come and go
        config = {"block_size": str(model.block_tokens), "num_gpu_blocks": str(n_blocks), "cache_dtype": model.kv}
        yield _gauge("vllm:cache_config_info", "how the KV cache is laid out", 1, {**labels, **config})
        adapters = self.adapters
        if adapters is not None and (
            adapters.loaded or adapters.running or adapters.waiting
        ):  # the last may be leaving
            names = {
                "max_lora": str(adapters.most),
                "running_lora_adapters": ",".join(adapters.running),
                "waiting_lora_adapters": ",".join(adapters.waiting),
            }
            yield _gauge("vllm:lora_requests_info", "adapters with requests, and when", wall_time_s(), names)

    def _vllm_counters(self) -> Iterator[Metric]:
        counts, telemetry, labels = self.counts, self._telemetry, self._labels()
        yield _counter("vllm:prompt_tokens", "prompt tokens of all requests", telemetry.prompt_tokens, labels)
        yield _counter("vllm:generation_tokens", "tokens handed out", telemetry.output_tokens, labels)
        yield _counter(
            "vllm:prompt_tokens_cached", "prompt tokens taken from the cache", telemetry.cached_tokens, labels
        )
        queries = 0 if counts is None else counts.prefix_queries_tokens
        hits = 0 if counts is None else counts.prefix_hits_tokens
        if self.workers and queries:
            # each that a prompt comes by looks for it, one finds what another has sent it, and who dies forgets its counts
            hits = telemetry.cached_tokens
            queries = hits + telemetry.computed_tokens + telemetry.transferred_tokens
        yield _counter("vllm:prefix_cache_queries", "tokens looked up in the prefix cache", queries, labels)
        yield _counter("vllm:prefix_cache_hits", "tokens found in the prefix cache", hits, labels)
        success = CounterMetricFamily(
            "vllm:request_success", "finished choices by reason", labels=[*labels, "finished_reason"]
        )
        for reason, number in telemetry.finished.items():
            success.add_metric([*labels.values(), reason], number)
        yield success
        yield _counter("vllm:num_preemptions", "sequences that lost their blocks", telemetry.preemptions, labels)
        for name, text, number in (
            ("num_drafts", "chunks that carried drafts", telemetry.drafts),
            ("num_draft_tokens", "tokens guessed ahead and verified", telemetry.drafted_tokens),
            ("num_accepted_tokens", "guessed tokens that held", sum(telemetry.accepted_by_depth)),
        ):
            yield _counter(f"vllm:spec_decode_{name}", text, number, labels)
        by_depth = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "that held, by depth", labels=[*labels, "position"]
        )
        for depth, number in enumerate(telemetry.accepted_by_depth):
            by_depth.add_metric([*labels.values(), str(depth)], number)
        yield by_depth

    def _vllm_distributions(self) -> Iterator[Metric]:
        telemetry, requests, labels = self._telemetry, self._telemetry.requests, self._labels()
        for name, text, distribution in (
            ("iteration_tokens_total", "tokens per step", telemetry.step_tokens),
            ("request_prompt_tokens", "prompt tokens per request", telemetry.request_prompt_tokens),
            ("request_generation_tokens", "output tokens per request", telemetry.request_output_tokens),
            ("request_params_max_tokens", "max_tokens per request", telemetry.request_max_tokens),
            (
                "request_max_num_generation_tokens",
                "output tokens of the longest choice",
                telemetry.request_longest_tokens,
            ),
            ("time_to_first_token_seconds", "arrival to first token", telemetry.ttft_s),
            ("inter_token_latency_seconds", "time between neighbouring tokens", telemetry.itl_s),
            # the same under its older name, which dashboards still read
            ("time_per_output_token_seconds", "time between neighbouring tokens", telemetry.itl_s),
            ("request_time_per_output_token_seconds", "decode time per token after the first", requests["tpot"]),
            ("e2e_request_latency_seconds", "arrival to last token", requests["e2e"]),
            ("request_queue_time_seconds", "arrival to first scheduled", requests["queue"]),
            ("request_prefill_time_seconds", "first scheduled to first token", requests["prefill"]),
            ("request_decode_time_seconds", "first token to last token", requests["decode"]),
            ("request_inference_time_seconds", "first scheduled to last token", requests["inference"]),
        ):
            yield _histogram(f"vllm:{name}", text, distribution, labels)


def exposition(
    collector: MetricsCollector,
    counts: CoreStats,
    outlook: Outlook,
    adapters: AdapterCounts | None = None,
    workers: Sequence[WorkerStats] = (),
) -> bytes:
    """The text of one scrape."""
    collector.counts, collector.outlook, collector.adapters, collector.workers = counts, outlook, adapters, workers
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def _blocks(counts: CoreStats) -> dict[str, int]:
    return {"in_use": counts.blocks_in_use, "cached": counts.blocks_cached, "free": counts.blocks_free}


def _gauge(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _histogram(name: str, text: str, distribution: LiveHistogram, labels: dict[str, str] | None = None) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), *_buckets(distribution))
    return family


def _buckets(distribution: LiveHistogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts by upper edge, and the sum, as prometheus-client wants them."""
    edges = [*(str(edge) for edge in distribution.edges), "+Inf"]
    return list(zip(edges, accumulate(distribution.counts), strict=True)), distribution.total
