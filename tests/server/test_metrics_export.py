from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from diptych.control.stats import CoreStats, WorkerStats
from diptych.engine.adapters import AdapterCounts
from diptych.engine.async_llm import AsyncLLM
from diptych.ground.events import (
    ArrivalEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    ScheduledEvent,
    StepBeginEvent,
    StepEndEvent,
    Timings,
    TokenEvent,
)
from diptych.ground.phase import FinishReason
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.metrics import EventBook, RequestRecord
from diptych.server.admission import Outlook
from diptych.server.app import create_app
from diptych.server.config import ServerConfig
from diptych.server.state import ServerState
from diptych.server.watch.metrics_export import MetricsCollector, ServedModel, exposition
from diptych.server.watch.telemetry import LiveHistogram, Telemetry

GOLDEN = Path(__file__).with_name("metrics.golden.txt")
MODEL = ServedModel(
    fingerprint=None,
    name="tiny",
    backend="cpu",
    kernels="avx2",
    faster_kernels="avx512",
    weights="int8",
    kv="bf16",
    version="1.2.3",
    block_tokens=32,
    n_blocks=100,
    max_context_tokens=512,
    load_s=0.25,
    n_parameters=1000,
    weight_bytes=2000,
)
COUNTS = CoreStats(
    running=2,
    waiting=1,
    waiting_tokens=300,
    blocks_in_use=25,
    blocks_cached=5,
    blocks_free=70,
    prefix_queries_tokens=96,
    prefix_hits_tokens=32,
    preemptions=1,
)
OUTLOOK = Outlook(wait_s=0.02, bound_s=0.05, is_overloaded=False)


def told() -> Telemetry:
    """One request of 40 tokens, 32 of them cached: prefilled in step 0, one token more in step 1, then finished."""
    book = EventBook()
    telemetry = Telemetry(book)

    def tell(*events: Event) -> None:
        book.fold(events)
        telemetry.on_events(list(events))

    def scheduled(step_id: int, at_s: float, tokens: int, cached: int, context: int) -> ScheduledEvent:
        return ScheduledEvent(
            request_id="a",
            index=0,
            step_id=step_id,
            at_s=at_s,
            chunk_tokens=tokens,
            cached_tokens=cached,
            context_tokens=context,
        )

    def token(step_id: int, at_s: float, position: int) -> TokenEvent:
        return TokenEvent(request_id="a", index=0, at_s=at_s, token_id=7, position=position, step_id=step_id)

    tell(ArrivalEvent(request_id="a", at_s=10.0, prompt_tokens=40, n=1))
    prompt = StepShape.prefill(batch=1, new_tokens=8, cached_tokens=32)
    tell(StepBeginEvent(step_id=0, at_s=10.5, shape=prompt, predicted_s=0.2))
    tell(scheduled(0, 10.5, 8, 32, 32), token(0, 10.75, 0))
    tell(StepEndEvent(step_id=0, at_s=10.75, device_s=0.2, host_s=0.05))
    tell(PreemptEvent(request_id="a", index=0, at_s=10.8, computed_tokens=40))
    mixed = StepShape.prefill(batch=1, new_tokens=4).plus(StepShape.decode(batch=1, context_tokens=41))
    tell(StepBeginEvent(step_id=1, at_s=11.0, shape=mixed))
    tell(token(1, 11.25, 1))
    finish = FinishEvent(request_id="a", index=0, at_s=11.25, reason=FinishReason.STOP, output_tokens=2)
    tell(finish, StepEndEvent(step_id=1, at_s=11.25, device_s=0.2, host_s=0.05))
    timings = Timings(
        queue_s=0.5,
        prefill_s=0.25,
        decode_s=0.5,
        e2e_s=1.25,
        ttft_s=0.75,
        tpot_s=0.5,
        itl_s=(0.5,),
        stall_s=0.1,
        n_preemptions=1,
    )
    sampling = SamplingParams(max_tokens=16)
    telemetry.on_taken(Request(request_id="a", prompt_token_ids=(5,) * 40, sampling=sampling, arrival_s=10.0))
    telemetry.on_finished(timings, [FinishReason.STOP], reasoning_tokens=1)
    telemetry.on_refused(503)
    telemetry.loop_lag_s.add(0.004)
    return telemetry


def test_the_exposition_is_the_golden_text() -> None:
    """Dashboards and gateways read these names, types and labels; a change here breaks them."""
    text = exposition(MetricsCollector(told(), MODEL, is_vllm_compatible=True), COUNTS, OUTLOOK).decode()
    assert text == GOLDEN.read_text()


def test_names_that_vllm_dashboards_read_are_there_with_their_types() -> None:
    text = exposition(MetricsCollector(told(), MODEL, is_vllm_compatible=True), COUNTS, OUTLOOK).decode()
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    gauges = "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info"
    counters = (
        "prompt_tokens generation_tokens prompt_tokens_cached prefix_cache_queries prefix_cache_hits request_success "
        "num_preemptions spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
        "spec_decode_num_accepted_tokens_per_pos"
    )
    histograms = (
        "iteration_tokens_total request_prompt_tokens request_generation_tokens request_params_max_tokens "
        "request_max_num_generation_tokens "
        "time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds "
        "request_time_per_output_token_seconds "
        "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
        "request_inference_time_seconds"
    )
    for names, kind in ((gauges, "gauge"), (counters, "counter"), (histograms, "histogram")):
        for name in names.split():
            assert types[f"vllm:{name}"] == kind
    bare = exposition(MetricsCollector(told(), MODEL, is_vllm_compatible=False), COUNTS, OUTLOOK).decode()
    assert "vllm:" not in bare


def test_prefix_hits_of_a_cluster_are_those_of_its_requests() -> None:
    """Workers' own counts have a prompt twice that one reads for another, and what was sent as found."""
    worker = WorkerStats(
        name="d0", pool="decode", node="n", pid=1, is_up=True, is_draining=False, deaths=0, open=0, counts=None
    )
    telemetry = told()
    telemetry.transferred_tokens = 8
    read = telemetry.cached_tokens + telemetry.computed_tokens + 8
    for workers, expected in (
        ((), (COUNTS.prefix_hits_tokens, COUNTS.prefix_queries_tokens)),
        ((worker,), (telemetry.cached_tokens, read)),
    ):
        collector = MetricsCollector(telemetry, MODEL, is_vllm_compatible=True)
        text = exposition(collector, COUNTS, OUTLOOK, workers=workers).decode()
        samples = {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}
        assert (samples["vllm:prefix_cache_hits_total"], samples["vllm:prefix_cache_queries_total"]) == expected


def test_an_adapter_that_is_leaving_is_told_while_it_answers() -> None:
    """Also where it is the last."""
    for running, is_told in (((), False), (("poet",), True)):
        adapters = AdapterCounts(loaded=0, most=8, n_bytes=1, running=running, waiting=())
        collector = MetricsCollector(told(), MODEL, is_vllm_compatible=True)
        text = exposition(collector, COUNTS, OUTLOOK, adapters).decode()
        assert ('running_lora_adapters="poet"' in text, "vllm:lora_requests_info" in text) == (is_told, is_told)


def test_time_to_first_token_starts_at_arrival() -> None:
    telemetry = told()
    assert telemetry.ttft_s.total == 0.75
    assert telemetry.itl_s.total == 0.5


def test_a_finished_record_is_handed_over_and_not_kept() -> None:
    """The telemetry of a server that runs for months must not grow with every request."""
    book = EventBook()
    telemetry = Telemetry(book)

    def tell(*events: Event) -> None:
        book.fold(events)
        telemetry.on_events(list(events))

    records: list[RequestRecord] = []
    telemetry.on_record.append(records.append)
    tell(ArrivalEvent(request_id="a", at_s=0.0, prompt_tokens=4, n=2))
    for index in (0, 1):
        assert set(telemetry.records) == {"a"}
        finish = FinishEvent(request_id="a", index=index, at_s=1.0, reason=FinishReason.ABORT, output_tokens=0)
        tell(finish)
    assert telemetry.records == {}
    assert [record.end_s for record in records] == [1.0]


def test_a_value_on_an_edge_counts_below_it() -> None:
    distribution = LiveHistogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        distribution.add(value)
    assert distribution.counts == [2, 2, 1]
    assert distribution.n_values == 5


def test_every_refusal_is_counted_once_and_no_probe_is() -> None:
    """Wrong keys and hosts were not; a probe of a draining server was, as a request refused for overload."""

    async def ask() -> str:
        async with AsyncLLM("bundled", threads=1, kv_memory_bytes=33554432) as engine:
            app = create_app(ServerState(engine, ServerConfig(api_key="a-key"), ceilings=None))
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
            key = {"x-api-key": "a-key"}
            async with app.router.lifespan_context(app), http:
                await http.get("/v1/models")
                await http.get("/health", headers={"host": "evil.example.com"})
                await http.get("/v1/models", headers={"host": "evil.example.com"})
                await http.post("/v1/completions", headers=key, json={"prompt": 5})
                await http.get("/nothing", headers=key)
                engine.drain()
                for _ in range(3):
                    assert (await http.get("/ready")).status_code == 503
                await http.post("/v1/completions", headers=key, json={"prompt": "a"})
                return (await http.get("/metrics", headers=key)).text

    told = re.findall(r'^diptych_requests_refused_total{status="(\d+)"} (\S+)$', asyncio.run(ask()), re.MULTILINE)
    assert told == [(status, "1.0") for status in ("400", "401", "403", "404", "503")]
