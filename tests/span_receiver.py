"""A collector for spans: what OTLP over HTTP sends is read by the protocol's own messages, and kept."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span. process: that told it. Ids as in a traceparent."""

    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, object]


class SpanReceiver:
    """Listens on loopback until `close`."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.spans += _read(ExportTraceServiceRequest.FromString(_unpacked(self.headers, body)))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """No lines in the tests' output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of_trace(self, trace_id: str) -> list[Received]:
        return [one for one in list(self.spans) if one.trace_id == trace_id]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _unpacked(headers: object, body: bytes) -> bytes:
    assert headers.get("content-encoding") is None, "not asked for"  # type: ignore[attr-defined]
    return body


def _read(request: ExportTraceServiceRequest) -> list[Received]:
    return [
        Received(
            process=_values(resource.resource.attributes)["service.instance.id"],  # type: ignore[arg-type]
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            begin_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            is_error=span.status.code == 2,
            attributes=_values(span.attributes),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _values(attributes: object) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}  # type: ignore[attr-defined]
