"""Spans of requests for OpenTelemetry, as far as anybody asks for them. The only module that imports opentelemetry, an extra.

    spans = spans_to("http://localhost:4318/v1/traces", clock=clock, process="decode-0")
    spans.note("receive", parent=request.trace, begin_s=..., end_s=..., attributes={...})

Times are known before a span is: the engine's events have them, on its clock, and spans are made of them when they end. So
nothing is kept in a step. What joins spans of several processes is the W3C `traceparent` in `Request.trace`.
No prompt, no text and no key is in a span.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from diptych.ground.clock import Clock, wall_time_s
from diptych.ground.errors import ConfigError
from diptych.ground.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

Attributes = Mapping[str, str | int | float | bool]
PARENT_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context
SEND_EVERY_S = 1.0  # what a process that is killed has not sent is lost
FLUSH_S = 3.0  # at the end, for what is not sent yet: a collector that is gone must not hold it up


@dataclass(slots=True)
class OpenSpan:
    """A span that others may already have as their parent."""

    _spans: Spans
    _span: Any
    trace: str = field(init=False)  # its traceparent

    def __post_init__(self) -> None:
        context = self._span.get_span_context()
        self.trace = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def end(self, at_s: float, attributes: Attributes, *, error: str | None = None) -> None:
        """It ended at that instant of the engine's clock."""
        self._span.set_attributes(attributes)
        self._spans.finish(self._span, at_s, error)


class Spans:
    """Of one process. Any thread may use it."""

    def __init__(self, processor: SpanProcessor, *, clock: Clock, process: str) -> None:
        """processor: of the SDK, which gets every span that has ended. process: the name of this one, on each of them."""
        sdk = _opentelemetry("sdk.trace")
        resource = _opentelemetry("sdk.resources").Resource.create({"service.instance.id": process})
        if resource.attributes["service.name"].startswith("unknown_service"):  # OTEL_SERVICE_NAME says something else
            resource = resource.merge(_opentelemetry("sdk.resources").Resource({"service.name": "diptych"}))
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("diptych", VERSION)
        self._propagator = _opentelemetry("trace.propagation.tracecontext").TraceContextTextMapPropagator()
        self._kinds, self._status = _opentelemetry("trace").SpanKind, _opentelemetry("trace.status")
        self._epoch_s = wall_time_s() - clock.now_s()

    def begin(self, name: str, *, parent: Mapping[str, str], begin_s: float) -> OpenSpan:
        """A span of what a client asked for. parent: the client's headers; what is no `traceparent` begins a trace."""
        return OpenSpan(self, self._start(name, parent, begin_s, self._kinds.SERVER))

    def note(
        self,
        name: str,
        *,
        parent: str | None,
        begin_s: float,
        end_s: float,
        attributes: Attributes,
        error: str | None = None,
    ) -> None:
        """A span that is over, as a part of `parent`; of what nobody follows there is none."""
        if parent is not None:
            span = self._start(name, {"traceparent": parent}, begin_s, self._kinds.INTERNAL)
            span.set_attributes(attributes)
            self.finish(span, max(begin_s, end_s), error)

    def finish(self, span: Any, at_s: float, error: str | None) -> None:
        """End a span at an instant of the engine's clock."""
        if error is not None:
            span.set_status(self._status.Status(self._status.StatusCode.ERROR, error))
        span.end(self._epoch_ns(at_s))

    def close(self) -> None:
        """Send what is not sent yet."""
        self._provider.force_flush(int(FLUSH_S * 1e3))
        self._provider.shutdown()

    def _start(self, name: str, carrier: Mapping[str, str], begin_s: float, kind: Any) -> Any:
        # an empty context of our own: what another library holds as current is no parent
        context = self._propagator.extract(carrier, context=_opentelemetry("context").Context())
        return self._tracer.start_span(name, context=context, kind=kind, start_time=self._epoch_ns(begin_s))

    def _epoch_ns(self, at_s: float) -> int:
        return int((at_s + self._epoch_s) * 1e9)


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for what is no address, and without the library."""
    try:
        address = urlsplit(endpoint)
        is_address = address.scheme in ("http", "https") and bool(address.hostname)
    except ValueError:  # half a bracket
        is_address = False
    if not is_address:
        raise ConfigError(
            f"otlp-traces-endpoint is {endpoint!r}; it must be an address such as http://localhost:4318/v1/traces"
        )
    _opentelemetry("exporter.otlp.proto.http.trace_exporter")


def spans_to(endpoint: str, *, clock: Clock, process: str) -> Spans:
    """Spans that go to a collector by OTLP over HTTP, in batches, on a thread. ConfigError where that cannot be."""
    check_endpoint(endpoint)
    exporter = _opentelemetry("exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter(endpoint=endpoint)
    processor = _opentelemetry("sdk.trace.export").BatchSpanProcessor(
        exporter, schedule_delay_millis=SEND_EVERY_S * 1e3
    )
    return Spans(processor, clock=clock, process=process)


def _opentelemetry(module: str) -> Any:
    """Only who asks for spans needs it."""
    try:
        return import_module(f"opentelemetry.{module}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("opentelemetry"):
            raise
        raise ConfigError(
            f"spans need {error.name}, which is not installed", hint='pip install "diptych[tracing]"'
        ) from error
