"""Traces by OpenTelemetry: what there are spans of, to which trace they belong, and what they do not have."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.service.http.serving import WAIT_SECONDS, serving

import tidelog
from tidelog import tracing
from tidelog.errors import ConfigError

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """What was traced."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.start_tracing(provider)
    try:
        yield exporter
    finally:
        tracing.stop_tracing()
        provider.shutdown()


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [one for one in spans.get_finished_spans() if one.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_requests_syncs_shipping_and_cold_reads_are_traced(spans: InMemorySpanExporter, tmp_path: Path) -> None:
    """A request continues the trace of its client, and what it did belongs to it."""
    store = (tmp_path / "store").as_uri()
    path = "/v1/topics/shop/orders"
    with serving(tmp_path / "data", store=store) as served:
        body = {"messages": [{"value": "a"}, {"value": "b"}]}
        served.ok("POST", f"{path}/messages", body, {"traceparent": PARENT})
        served.ok("POST", f"{path}/ship?wait={WAIT_SECONDS}")
        served.call("GET", "/nothing/here?token=SECRET", None, {"authorization": "Bearer SECRET"})
        with socket.create_connection(served.node._broker.address, WAIT_SECONDS) as client:
            client.sendall(struct.pack(">ihhih", 10, 18, 0, 1, -1))  # ApiVersions
            assert client.recv(4)
        served.ok("POST", f"{path}/seal?wait={WAIT_SECONDS}")
    with tidelog.open(tmp_path / "other", store=store, metadata="bucket") as log:
        assert [one.value for one in log.topic("shop/orders").read()] == [b"a", b"b"]
    (produced,) = named(spans, "POST /v1/topics/{namespace}/{name}/messages")
    assert produced.context is not None
    assert produced.parent is not None
    assert f"{produced.context.trace_id:032x}" == TRACE
    assert attributes(produced)["http.response.status_code"] == 200
    (append,) = named(spans, "tidelog.append")
    assert append.parent is not None
    assert append.parent.span_id == produced.context.span_id
    assert attributes(append) == {"tidelog.topic": "shop/orders", "tidelog.messages": 2, "tidelog.sync": "true"}
    assert any(attributes(one).get("tidelog.topic") == "shop/orders" for one in named(spans, "tidelog.sync"))
    assert any(attributes(one).get("tidelog.shipped_offset") == 2 for one in named(spans, "tidelog.ship"))
    assert named(spans, "tidelog.cold_read")
    assert len(named(spans, "kafka ApiVersions")) == 1
    (lost,) = named(spans, "GET other")
    assert attributes(lost)["http.response.status_code"] == 404
    assert "SECRET" not in "".join(one.to_json() for one in spans.get_finished_spans())


def test_traces_that_are_off_import_nothing_and_make_nothing(tmp_path: Path) -> None:
    """The default: OpenTelemetry is not even looked for."""
    assert not tracing.TRACING.is_on
    tracing.record_span("nothing", 1.0)
    with tracing.request_span("nothing", {}) as span:
        assert span is None
    code = "import sys, tidelog.service.node, tidelog.tracing; print([n for n in sys.modules if 'opentelemetry' in n])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_traces_without_opentelemetry_are_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever switches them on is told what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        tracing.start_tracing()
    assert "tidelog[otel]" in str(caught.value.hint)
