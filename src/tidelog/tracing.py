"""Traces by OpenTelemetry, where it is installed and switched on.

Invariants
- Off, which is the default, a call costs one comparison, and nothing of OpenTelemetry is imported.
- Only its API is used here: what becomes of spans (sampling, exporting) is the business of the process that installs an
  SDK, as `opentelemetry-instrument` does by the `OTEL_*` variables.
- A span has names, numbers and states: topics, routes, APIs, counts. It has no value, key or header of a message, no
  path or query of a request, no credential and no text of an error.
- Work that is timed anyway is recorded when it has ended; only a request is a span while it runs, so that what it does
  belongs to it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tidelog.errors import ConfigError

_MISSING = "traces need the package opentelemetry-api, which is not installed"


class Tracing:
    """What this process does about traces. `is_on` is looked at wherever a span could be made, without a call."""

    is_on = False
    tracer: Any = None
    api: Any = None


TRACING = Tracing()


def start_tracing(provider: Any = None) -> None:
    """Switches traces on, for this process; ConfigError where OpenTelemetry is not installed.

    Spans go to `provider`, by default to the one that the process has set for all.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        raise ConfigError(_MISSING, hint="Install it: pip install 'tidelog[otel]'") from None
    TRACING.api = trace, TraceContextTextMapPropagator()
    TRACING.tracer = (provider or trace.get_tracer_provider()).get_tracer("tidelog")
    TRACING.is_on = True


def stop_tracing() -> None:
    """Switches them off."""
    TRACING.is_on = False


def record_span(name: str, seconds: float, attributes: Mapping[str, Any] | None = None) -> None:
    """A span of work that has just ended, and took so long. It belongs to the request that runs here, if any."""
    if not TRACING.is_on:
        return
    now_ns = time.time_ns()
    span = TRACING.tracer.start_span(name, start_time=now_ns - int(seconds * 1e9), attributes=dict(attributes or {}))
    span.end(now_ns)


@contextlib.contextmanager
def request_span(name: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """A span of a request while it is handled, part of the trace that its W3C `traceparent` names.

    Gives the span, whose `set_attributes` takes what is known at the end; None while traces are off.
    """
    if not TRACING.is_on:
        yield None
        return
    trace, propagator = TRACING.api
    parent = propagator.extract(headers)
    with TRACING.tracer.start_as_current_span(
        name,
        context=parent,
        kind=trace.SpanKind.SERVER,
        record_exception=False,  # its text may have what must not leave the process
        set_status_on_exception=False,
    ) as span:
        yield span
