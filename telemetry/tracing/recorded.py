"""Spans that are recorded, and the choice of requests for which there are any."""

import random
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan

from telemetry.tracing.span import NO_ATTRIBUTES, Attributes, Kind, Span, TraceParent, Tracing, parse_traceparent
from telemetry.tracing.timed import untimed

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_NO_CONTEXT = Context()


class RecordingTracing(Tracing):
    """Traces a share of the requests, and those whose caller traces them."""

    is_on = True

    def __init__(self, tracer: Tracer, share: float) -> None:
        self._tracer = tracer
        self._share = share

    def begin(
        self, headers: Mapping[str, str], name: str, attributes: Attributes = NO_ATTRIBUTES, kind: Kind = "server"
    ) -> Span:
        """See `Tracing.begin`. For a request that is not traced no object of OpenTelemetry is made."""
        given = headers.get("traceparent")
        parent = None if given is None else parse_traceparent(given)
        if parent is None:
            if random.random() >= self._share:  # noqa: S311  # which request is traced is no secret
                return UNSAMPLED
            context = _NO_CONTEXT
        elif parent.is_sampled:
            context = _remote(parent, headers.get("tracestate", ""))
        else:
            return PassedSpan(parent.trace_id)
        span = self._tracer.start_span(name, context, _KINDS[kind], attributes)
        return RecordedSpan(self._tracer, span, drops_state=parent is None and "tracestate" in headers)


def _remote(parent: TraceParent, state: str) -> Context:
    context = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([state]) if state else None,
    )
    return set_span_in_context(NonRecordingSpan(context), _NO_CONTEXT)


class UnsampledSpan(Span):
    """A request without a trace; other servers are told that it was not chosen."""

    __slots__ = ()

    def headers(self) -> dict[str, str]:
        trace_id, span_id = random.getrandbits(128) or 1, random.getrandbits(64) or 1  # no secrets
        return {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-00"}


UNSAMPLED = UnsampledSpan()


class PassedSpan(Span):
    """A request whose caller does not trace it: its own headers go on to other servers."""

    __slots__ = ("_trace_id",)

    def __init__(self, trace_id: str) -> None:
        self._trace_id = trace_id

    @property
    def trace_id(self) -> str:
        return self._trace_id


class RecordedSpan(Span):
    """A span of OpenTelemetry, with parents given explicitly: flights are tasks that no single request owns."""

    __slots__ = ("_drops_state", "_span", "_tracer")

    is_recorded = True

    def __init__(self, tracer: Tracer, span: OtelSpan, *, drops_state: bool = False) -> None:
        """With `drops_state` the caller's `tracestate` belongs to no trace (W3C Trace Context, section 4.3)."""
        self._tracer = tracer
        self._span = span
        self._drops_state = drops_state

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def span(self, name: str, attributes: Attributes = NO_ATTRIBUTES, kind: Kind = "internal") -> Span:
        span = self._tracer.start_span(name, self._context(), _KINDS[kind], attributes)
        return RecordedSpan(self._tracer, span, drops_state=self._drops_state)

    def record(self, name: str, began: float, ended: float, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self._tracer.start_span(name, self._context(), attributes=attributes, start_time=_unix(began)).end(
            _unix(max(began, ended))
        )

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self._span.add_event(name, attributes)

    def link(self, other: Span) -> None:
        other = untimed(other)
        if isinstance(other, RecordedSpan):
            self._span.add_link(other._span.get_span_context())

    def fail(self, reason: str) -> None:
        self._span.set_attribute("error.type", reason)
        self._span.set_status(StatusCode.ERROR)

    def headers(self) -> dict[str, str]:
        context = self._span.get_span_context()
        headers = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-01"}
        return {**headers, "tracestate": ""} if self._drops_state else headers

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()

    def _context(self) -> Context:
        return set_span_in_context(self._span, _NO_CONTEXT)


def _unix(monotonic: float) -> int:
    """Nanoseconds since 1970 at a time of `time.monotonic()`."""
    return time.time_ns() - round((time.monotonic() - monotonic) * 1e9)
