"""Reads a server's metrics, Diptych's or any with vLLM's names, and names the cause of slow first tokens or slow streams.

Pure arithmetic over two scrapes; `diptych doctor` fetches them. Every verdict carries the numbers it rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from diptych.ground.bounds import counted

# what we look for -> the names it has, first found wins
HISTOGRAMS = {
    "ttft_s": ("vllm:time_to_first_token_seconds", "diptych_ttft_seconds"),
    "itl_s": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds", "diptych_itl_seconds"),
    "tpot_s": ("vllm:request_time_per_output_token_seconds", "diptych_tpot_seconds"),
    "queue_s": ("vllm:request_queue_time_seconds", "diptych_request_phase_seconds{phase=queue}"),
    "prefill_s": ("vllm:request_prefill_time_seconds", "diptych_request_phase_seconds{phase=prefill}"),
    "decode_s": ("vllm:request_decode_time_seconds", "diptych_request_phase_seconds{phase=decode}"),
    "stall_s": ("diptych_request_phase_seconds{phase=stall}",),
    "prompt_tokens": ("vllm:request_prompt_tokens",),
    "output_tokens": ("vllm:request_generation_tokens",),
    "step_tokens": ("vllm:iteration_tokens_total", "diptych_step_tokens"),
}
NUMBERS = {
    "running": ("vllm:num_requests_running", "diptych_sequences_running"),
    "waiting": ("vllm:num_requests_waiting", "diptych_sequences_waiting"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total", "diptych_preemptions_total"),
    "prompt_tokens_total": ("vllm:prompt_tokens_total",),
    "output_tokens_total": ("vllm:generation_tokens_total", "diptych_output_tokens_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "load_s": ("diptych_model_load_seconds",),
    "weight_bytes": ("diptych_model_weight_bytes",),
    "refused": ("diptych_requests_refused_total{status=503}",),
}
# of several engines the most, where their sum would be of no engine
OF_ONE = (*NUMBERS["kv_usage"], *NUMBERS["load_s"], *NUMBERS["weight_bytes"])
COUNTED = ("refused", "preemptions", "prompt_tokens_total", "output_tokens_total", "prefix_queries", "prefix_hits")

QUEUE_SHARE = 0.5  # of TTFT, beyond which queueing is the cause
SLOW_TTFT_S, SLOW_TPOT_S = 1.0, 0.1  # what people notice: a second to begin, ten words a second
STALL_SHARE = 0.2
TAIL_RATIO = 8.0  # p99 over p50 that speaks of interference or of a cold start
TAIL_SHARE = 0.03  # of the time between tokens: a hundredth of them so slow takes 7 in 107
FEW_REQUESTS = 30
FULL_CACHE = 0.9
MANY_RUNNING = 8.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper edge, and the sum."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def n_values(self) -> float:
        """How many values were counted."""
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        """Average of the values."""
        return self.total / self.n_values if self.n_values > 0 else None

    def quantile(self, share: float) -> float | None:
        """Linear inside a bucket, as Prometheus does; the last finite edge for values beyond it. One value is its sum."""
        if self.n_values <= 0:
            return None
        if self.n_values == 1:
            return self.total
        wanted, below, low = share * self.n_values, 0.0, 0.0
        for edge, count in zip(self.edges, self.counts, strict=True):
            if count >= wanted and count > below:
                return low if edge == float("inf") else low + (edge - low) * (wanted - below) / (count - below)
            below, low = count, edge
        return low

    def minus(self, earlier: Histogram) -> Histogram:
        """What was added since; the whole when the server was restarted in between."""
        if earlier.edges != self.edges:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        if min(counts, default=0.0) < 0.0:
            return self
        return Histogram(self.edges, counts, self.total - earlier.total)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of `/metrics`, by our names."""

    histograms: dict[str, Histogram]
    numbers: dict[str, float]
    kernels: tuple[str, str] = ("", "")  # that compute, and a faster set that the server's processor has too

    def since(self, earlier: Scrape) -> Scrape:
        """Histograms and counters as differences; gauges as they are now."""
        histograms = {
            name: one.minus(earlier.histograms[name]) if name in earlier.histograms else one
            for name, one in self.histograms.items()
        }
        numbers = dict(self.numbers)
        for name in COUNTED:
            before = earlier.numbers.get(name, 0.0)
            if name in numbers and numbers[name] >= before:
                numbers[name] -= before
        return Scrape(histograms, numbers, self.kernels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, with its numbers and what to do about it. severity orders findings: 1 is the whole of the time."""

    about: str  # ttft | tokens_per_s | refusals
    cause: str
    severity: float
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The numbers looked at and what they say, worst first."""

    numbers: dict[str, float | None]
    findings: list[Finding] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"numbers": self.numbers, "findings": [asdict(one) for one in self.findings]}


def read_scrape(text: str) -> Scrape:
    """Parse the exposition text; what several engines count is added up. ValueError where it is none."""
    buckets: dict[str, dict[float, float]] = {}
    sums: dict[str, float] = {}
    values: dict[str, float] = {}
    kernels = ("", "")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("faster_kernels"):
                kernels = (sample.labels["kernels"], sample.labels["faster_kernels"])
            phase = sample.labels.get("phase")
            name = f"{family.name}{{phase={phase}}}" if phase else family.name
            if sample.name.endswith("_bucket") and "le" in sample.labels:
                edges = buckets.setdefault(name, {})
                edge = float(sample.labels["le"])
                edges[edge] = edges.get(edge, 0.0) + sample.value
            elif family.type == "histogram" and sample.name.endswith("_sum"):
                sums[name] = sums.get(name, 0.0) + sample.value
            elif family.type in ("gauge", "counter"):
                status = sample.labels.get("status")
                name = f"{sample.name}{{status={status}}}" if status else sample.name
                known = values.get(name, 0.0)
                values[name] = max(known, sample.value) if name in OF_ONE else known + sample.value
    histograms = {
        name: Histogram(tuple(sorted(edges)), tuple(edges[edge] for edge in sorted(edges)), sums.get(name, 0.0))
        for name, edges in buckets.items()
    }
    return Scrape(
        {name: found for name, names in HISTOGRAMS.items() if (found := _first(names, histograms)) is not None},
        {name: number for name, names in NUMBERS.items() if (number := _first(names, values)) is not None},
        kernels,
    )


def _first(names: Sequence[str], table: dict[str, Any]) -> Any:
    return next((table[name] for name in names if name in table), None)


def diagnose(scrape: Scrape) -> Diagnosis:
    """Every cause that the numbers support, worst first."""
    numbers = key_numbers(scrape)
    rules: Iterable[Callable[[dict[str, float | None]], Finding | None]] = (
        _queueing, _prompt_length, _prefill_batching, _cold_start, _stalls, _decode_batching, _cache_pressure, _model_size,
        _refusals,
    )  # fmt: skip
    findings = [finding for rule in rules if (finding := rule(numbers)) is not None]
    findings += [_slower_kernels(*scrape.kernels)] if any(scrape.kernels) else []
    return Diagnosis(numbers=numbers, findings=sorted(findings, key=lambda one: -one.severity))


def key_numbers(scrape: Scrape) -> dict[str, float | None]:
    """The quantities that the rules use; None where the server does not tell."""
    numbers: dict[str, float | None] = {name: scrape.numbers.get(name) for name in NUMBERS}
    for name in HISTOGRAMS:
        histogram = scrape.histograms.get(name)
        numbers[f"{name}.mean"] = histogram.mean if histogram else None
        for share in (50, 95, 99):
            numbers[f"{name}.p{share}"] = histogram.quantile(share / 100) if histogram else None
    ttft = scrape.histograms.get("ttft_s")
    numbers["requests"] = ttft.n_values if ttft else None
    steps = scrape.histograms.get("step_tokens")
    decode_tokens = scrape.numbers.get("output_tokens_total")
    if steps is not None and steps.n_values > 0 and decode_tokens is not None:
        numbers["decode_batch"] = decode_tokens / steps.n_values
    else:
        numbers["decode_batch"] = None
    queries, hits = scrape.numbers.get("prefix_queries"), scrape.numbers.get("prefix_hits")
    numbers["prefix_hit_share"] = hits / queries if queries and hits is not None else None
    return numbers


def _slower_kernels(used: str, faster: str) -> Finding:
    """True whatever the times are, so it is said without a request too."""
    return Finding(
        about="tokens_per_s",
        cause="slower kernels than there are",
        severity=0.2,
        evidence=f"kernels use {used}; this processor also has {faster}, which is faster",
        advice="leave --instruction-set at auto",
    )


def _is_slow_ttft(n: dict[str, float | None]) -> bool:
    return (n["ttft_s.p95"] or 0.0) >= SLOW_TTFT_S


def _is_slow_decode(n: dict[str, float | None]) -> bool:
    return (n["tpot_s.p50"] or n["itl_s.p50"] or 0.0) >= SLOW_TPOT_S


def _queueing(n: dict[str, float | None]) -> Finding | None:
    queue, prefill = n["queue_s.mean"], n["prefill_s.mean"]
    if queue is None or prefill is None or queue + prefill <= 0 or not _is_slow_ttft(n):
        return None
    share = queue / (queue + prefill)
    if share < QUEUE_SHARE:
        return None
    why = "all places for running sequences are taken or prompts arrive faster than they are read"
    if (n["kv_usage"] or 0.0) > FULL_CACHE:
        why = f"the KV cache is full ({n['kv_usage']:.0%})"
    elif n["preemptions"]:
        why = f"the KV cache ran full, {n['preemptions']:.0f} sequences lost their place in it"
    return Finding(
        about="ttft",
        cause="queueing",
        severity=share,
        evidence=f"requests queue {_s(queue)} of {_s(queue + prefill)} before their first token ({share:.0%}); "
        f"{n['waiting'] or 0:.0f} wait and {n['running'] or 0:.0f} run now; {why}",
        advice="add capacity or refuse earlier (--max-queue-s, --max-waiting-tokens); shorter max_tokens frees places sooner",
    )


def _prompt_length(n: dict[str, float | None]) -> Finding | None:
    queue, prefill, tokens = n["queue_s.mean"] or 0.0, n["prefill_s.mean"], n["prompt_tokens.mean"]
    if prefill is None or tokens is None or tokens <= 0 or queue + prefill <= 0 or not _is_slow_ttft(n):
        return None
    share = prefill / (queue + prefill)
    hit = n["prefix_hit_share"]
    if share < 1 - QUEUE_SHARE or (hit or 0.0) > 0.9:
        return None
    cached = "unknown" if hit is None else f"{hit:.0%}"
    return Finding(
        about="ttft",
        cause="prompt length",
        severity=share,
        evidence=f"reading the prompt takes {_s(prefill)} of {_s(queue + prefill)} to the first token ({share:.0%}): "
        f"{counted(tokens, 'token', '.0f')} on average, {prefill / tokens * 1e3:.2f} ms per token; {cached} of them "
        "came from the cache",
        advice="put what repeats (system prompt, tools, documents) first and unchanged so that it is cached; "
        "`diptych explain` shows which part costs what",
    )


def _prefill_batching(n: dict[str, float | None]) -> Finding | None:
    step, prompt, prefill = n["step_tokens.p95"], n["prompt_tokens.mean"], n["prefill_s.mean"]
    if step is None or prompt is None or prefill is None or not _is_slow_ttft(n):
        return None
    if step < 2 * prompt or step < 256:
        return None
    return Finding(
        about="ttft",
        cause="prefill batching",
        severity=0.4,
        evidence=f"steps hold up to {counted(step, 'token', '.0f')} (p95) while a prompt has {prompt:.0f}: prompts "
        "are read together, "
        f"and each waits for all of its step ({_s(prefill)} on average)",
        advice="lower --max-step-tokens, so that a short prompt does not wait for its neighbours' tokens",
    )


def _cold_start(n: dict[str, float | None]) -> Finding | None:
    p50, p99, requests = n["ttft_s.p50"], n["ttft_s.p99"], n["requests"]
    if p50 is None or p99 is None or requests is None or p50 <= 0 or _queueing(n) is not None:
        return None  # a line of requests makes slow ones too
    if requests > FEW_REQUESTS or p99 < TAIL_RATIO * p50 or p99 < 0.2:
        return None
    load = "" if n["load_s"] is None else f"; the model took {_s(n['load_s'])} to load"
    return Finding(
        about="ttft",
        cause="cold start",
        severity=0.3,
        evidence=f"only {counted(requests, 'request', '.0f')} so far, the slowest near {_s(p99)} and the usual {_s(p50)}{load}",
        advice="send one request after start before you measure; keep the process alive between bursts",
    )


def _stalls(n: dict[str, float | None]) -> Finding | None:
    stall, decode, p50, p99 = n["stall_s.mean"], n["decode_s.mean"], n["itl_s.p50"], n["itl_s.p99"]
    if p50 is None or p99 is None or p50 <= 0:
        return None
    share = stall / decode if stall is not None and decode else None
    # where the server says how much prompts cost its streams, a tail without that has another cause
    is_uneven = p99 >= TAIL_RATIO * p50 and p99 >= 0.1 and (share is None or share >= TAIL_SHARE)
    if not is_uneven and (share is None or share < STALL_SHARE):
        return None
    part = (
        ""
        if share is None
        else f"; streams spend {share:.0%} of their decode time in steps lengthened by others' prompts"
    )
    return Finding(
        about="tokens_per_s",
        cause="stalls by prefill",
        severity=share if share is not None else 0.5,
        evidence=f"between tokens {_s(p50)} is usual and {_s(p99)} the slowest percent{part}",
        advice="give --stall-budget-ms (Diptych) or a smaller chunk of prefill tokens per step (elsewhere)",
    )


def _decode_batching(n: dict[str, float | None]) -> Finding | None:
    batch, tpot = n["decode_batch"], n["tpot_s.p50"] or n["itl_s.p50"]
    if batch is None or tpot is None or batch < MANY_RUNNING or not _is_slow_decode(n):
        return None
    return Finding(
        about="tokens_per_s",
        cause="decode batching",
        severity=0.5,
        evidence=f"about {batch:.0f} tokens come out of a step on average, each stream waits {_s(tpot)} for its next: "
        f"{batch / tpot:.0f} tokens/s together, {1 / tpot:.1f} per stream",
        advice="lower --max-running-sequences for faster streams (and longer queues), or spread the load",
    )


def _cache_pressure(n: dict[str, float | None]) -> Finding | None:
    usage, preemptions, requests = n["kv_usage"] or 0.0, n["preemptions"] or 0.0, n["requests"] or 0.0
    if preemptions <= 0 and usage < FULL_CACHE:
        return None
    in_use = "" if n["kv_usage"] is None else f"KV cache {usage:.0%} in use; "
    return Finding(
        about="tokens_per_s",
        cause="cache pressure",
        severity=min(1.0, 0.3 + preemptions / max(1.0, requests)),
        evidence=f"{in_use}{counted(preemptions, 'preemption', '.0f')} for {counted(requests, 'request', '.0f')}, "
        "each of which is computed again",
        advice="raise --kv-memory-bytes, use --kv int8, shorten contexts, or run fewer sequences at one time",
    )


def _model_size(n: dict[str, float | None]) -> Finding | None:
    batch, tpot = n["decode_batch"], n["tpot_s.p50"] or n["itl_s.p50"]
    if tpot is None or not _is_slow_decode(n) or (batch is not None and batch >= MANY_RUNNING):
        return None
    reads = ""
    if n["weight_bytes"]:
        reads = f"; {n['weight_bytes'] / 1e9:.2f} GB of weights per step are read at {n['weight_bytes'] / tpot / 1e9:.1f} GB/s"
    few = "" if batch is None else f" with about {batch:.1f} tokens per step"
    return Finding(
        about="tokens_per_s",
        cause="model size or hardware",
        severity=0.6,
        evidence=f"a token takes {_s(tpot)}{few}, so it is not the batch{reads}",
        advice="a smaller or more quantised model (--weights int8, int4), or faster memory; `diptych plan` tells the limit",
    )


def _refusals(n: dict[str, float | None]) -> Finding | None:
    refused, answered = n["refused"] or 0.0, n["requests"] or 0.0
    if refused <= 0:
        return None
    return Finding(
        about="refusals",
        cause="overload",
        severity=refused / (refused + answered),
        evidence=f"{refused:.0f} requests were refused (503) while {answered:.0f} had a first token: the line was longer than "
        "the server lets it grow",
        advice="add capacity, shorten prompts and answers, or let requests wait longer (--max-queue-s, --max-waiting-tokens); "
        "clients should wait as long as Retry-After says",
    )


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1.0 else f"{seconds:.2f} s"
