"""Spans cross the hand-off: one trace tells what every worker did for a request, also where one of them was lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.cluster.local import LocalCluster
from tests.cluster.test_hand_off import GREEDY, kill_when, prompts
from tests.engine.conftest import tiny_config

from diptych.cluster.messages import Parcel
from diptych.engine.load import LoadedModel, load
from diptych.engine.spans import Spans

pytestmark = pytest.mark.native
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def loaded(tiny_dir: Path) -> LoadedModel:
    return load(str(tiny_dir), tiny_config("cpu"))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def cluster_with(loaded: LoadedModel, exporter: InMemorySpanExporter, **options: object) -> LocalCluster:
    def spans(name: str) -> Spans:
        return Spans(SimpleSpanProcessor(exporter), clock=loaded.clock, process=name)

    return LocalCluster(loaded, tiny_config("cpu"), spans=spans, **options)


def answer(cluster: LocalCluster, n_tokens: int, trace: str | None = CLIENT) -> None:
    engine = cluster.engine
    request = engine.make_request(prompts((n_tokens,))[0], GREEDY, arrival_s=engine.clock.now_s(), trace=trace)
    opened = engine.submit(request, lambda delta: None)
    while not opened.is_finished:
        engine.step()
    cluster.check()


def told(exporter: InMemorySpanExporter) -> dict[tuple[str, str], ReadableSpan]:
    return {(str(span.attributes["diptych.worker"]), span.name): span for span in exporter.get_finished_spans()}


def test_one_trace_tells_what_every_worker_did(loaded: LoadedModel, exporter: InMemorySpanExporter) -> None:
    """Without the trace on the hand-off, who looks for the slow worker finds half of a request."""
    answer(cluster_with(loaded, exporter), 100)
    spans = told(exporter)
    assert set(spans) == {("prefill-0", "read"), ("decode-0", "receive"), ("decode-0", "answer")}
    for span in spans.values():
        assert span.context.trace_id == int("0af7651916cd43dd8448eb211c80319c", 16)
        assert span.parent.span_id == int("b7ad6b7169203331", 16)
    read, receive, whole = (
        spans[key] for key in sorted(spans, key=lambda key: ("read", "receive", "answer").index(key[1]))
    )
    assert receive.start_time <= read.start_time <= read.end_time <= receive.end_time
    assert whole.start_time <= receive.start_time
    assert receive.end_time <= whole.end_time
    assert read.attributes["diptych.blocks.sent"] == receive.attributes["diptych.blocks.received"] == 6
    assert whole.status.is_ok


def test_what_nobody_follows_makes_no_span(loaded: LoadedModel, exporter: InMemorySpanExporter) -> None:
    """Off is off, also where a collector is named."""
    answer(cluster_with(loaded, exporter), 100, trace=None)
    assert not exporter.get_finished_spans()


def test_a_fault_of_a_link_is_seen_in_the_trace(loaded: LoadedModel, exporter: InMemorySpanExporter) -> None:
    """The counter says that it happens, the span to whom."""
    cluster = cluster_with(
        loaded, exporter, fault=lambda message: [] if isinstance(message, Parcel) else [(0, message)]
    )
    answer(cluster, 100)
    receive = told(exporter)["decode-0", "receive"]
    assert not receive.status.is_ok
    assert receive.status.description == "missing"
    assert receive.attributes["diptych.blocks.received"] == 0


def test_a_request_that_moves_is_in_one_trace(loaded: LoadedModel, exporter: InMemorySpanExporter) -> None:
    """The worker that died says nothing more; the one that went on says from which token."""
    cluster = cluster_with(loaded, exporter, decode=2)
    kill_when(cluster, "decode-0", "decoding")
    answer(cluster, 100)
    spans = told(exporter)
    assert ("decode-0", "answer") not in spans
    assert spans["decode-1", "answer"].attributes["diptych.tokens_before"] >= 4
    assert {span.context.trace_id for span in spans.values()} == {int("0af7651916cd43dd8448eb211c80319c", 16)}


def test_a_parcel_is_no_larger_than_it_may_be(loaded: LoadedModel) -> None:
    """A step of thousands of tokens made a parcel of hundreds of MiB: new pages for every one, at a fifth of the speed."""
    block_bytes = loaded.model.kv_bytes_per_block(16)
    for parcel_bytes, most in ((1, 1), (2 * block_bytes, 2), (2**20, 3)):
        cluster = LocalCluster(loaded, tiny_config("cpu"), parcel_bytes=parcel_bytes)
        sizes: list[int] = []
        cluster.on_message = lambda name, message, sizes=sizes: (
            sizes.append(len(message.digests)) if isinstance(message, Parcel) else None
        )
        answer(cluster, 100)
        assert (max(sizes), sum(sizes)) == (most, 6)
