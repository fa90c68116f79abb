"""Traces: whose request is traced, what other servers are told, and where spans go."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.tracing.opening import open_tracing
from telemetry.tracing.span import NO_SPAN, TraceParent, TracingUnavailable, parse_traceparent
from tests.telemetry.tracing.collector import Collector, attributes_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector().serving() as collector:
        yield collector


async def test_a_trace_is_continued_and_sent_on(collector: Collector) -> None:
    """The first span is a child of the caller's, and a call to another server is a child of that."""
    async with open_tracing("gateway", endpoint=collector.url) as tracing:
        headers = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
        with tracing.begin(headers, "POST /v1", {"http.request.method": "POST"}) as root:
            assert root.trace_id == TRACE
            with root.span("chat gpt", {"gen_ai.usage.input_tokens": 3}, "client") as call:
                sent = parse_traceparent(call.headers()["traceparent"])
                assert "tracestate" not in call.headers()  # the client's own goes on
    server, client = await collector.named("POST /v1", "chat gpt")
    assert (server.trace_id.hex(), server.parent_span_id.hex(), server.trace_state) == (TRACE, PARENT, "vendor=1")
    assert client.parent_span_id == server.span_id
    assert sent == TraceParent(TRACE, client.span_id.hex(), True)
    assert (server.kind, client.kind) == (server.SPAN_KIND_SERVER, client.SPAN_KIND_CLIENT)
    assert attributes_of(client) == {"gen_ai.usage.input_tokens": 3}
    assert collector.services == {"gateway"}


async def test_spans_made_afterwards_have_their_own_times(collector: Collector) -> None:
    """A span of work that is over begins and ends when the work did."""
    async with open_tracing("engine", endpoint=collector.url) as tracing:
        with tracing.begin({}, "request") as root:
            now, unix = time.monotonic(), time.time()
            root.record("queue", now - 2.0, now - 0.5, {"tokens": 7})
    (queue,) = await collector.named("queue")
    assert queue.start_time_unix_nano / 1e9 == pytest.approx(unix - 2.0, abs=0.1)
    assert queue.end_time_unix_nano / 1e9 == pytest.approx(unix - 0.5, abs=0.1)


async def test_a_joined_request_links_to_the_flight(collector: Collector) -> None:
    """A request that waits for another one's call names its span, though it is of another trace."""
    async with open_tracing("gateway", endpoint=collector.url) as tracing:
        with tracing.begin({}, "first") as first, first.span("flight") as flight, tracing.begin({}, "second") as second:
            second.link(flight)
            second.link(NO_SPAN)
    flown, joined = await collector.named("flight", "second")
    assert [(link.trace_id, link.span_id) for link in joined.links] == [(flown.trace_id, flown.span_id)]
    assert joined.trace_id != flown.trace_id


async def test_a_failure_is_told_by_its_class(collector: Collector) -> None:
    """The message of an exception may quote a tenant, and is nowhere in the span."""
    async with open_tracing("gateway", endpoint=collector.url) as tracing:
        with pytest.raises(ValueError, match="psst"), tracing.begin({}, "fails"):
            raise ValueError("psst")
    (span,) = await collector.named("fails")
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert attributes_of(span) == {"error.type": "ValueError"}
    assert b"psst" not in span.SerializeToString()


@pytest.mark.parametrize(("share", "traced"), [(0.0, 0), (1.0, 200), (0.5, 100)])
async def test_a_share_of_the_requests_is_traced(share: float, traced: int) -> None:
    """The caller's flag decides for its own requests, the share for all others; their servers are told."""
    async with open_tracing("gateway", endpoint="http://127.0.0.1:9", share=share) as tracing:
        spans = [tracing.begin({}, "request") for _ in range(200)]
        assert sum(span.is_recorded for span in spans) == pytest.approx(traced, abs=45)
        for span in spans:
            sent = parse_traceparent(span.headers()["traceparent"])
            assert sent is not None
            assert sent.is_sampled == span.is_recorded
        assert tracing.begin({"traceparent": SAMPLED}, "request").is_recorded
        refused = tracing.begin({"traceparent": NOT_SAMPLED}, "request")
        assert not refused.is_recorded
        assert (refused.trace_id, refused.span("within").headers()) == (TRACE, {})


async def test_a_header_that_is_none_begins_a_new_trace() -> None:
    """And the state of the other trace is not sent on (W3C Trace Context, section 4.3)."""
    async with open_tracing("gateway", endpoint="http://127.0.0.1:9") as tracing:
        span = tracing.begin({"traceparent": SAMPLED.upper(), "tracestate": "vendor=1"}, "request")
        assert span.trace_id not in (TRACE, "")
        assert span.span("call").headers()["tracestate"] == ""


async def test_without_an_exporter_nothing_is_recorded() -> None:
    """Nor is a header added: the client's own goes on as it is."""
    async with open_tracing("gateway") as tracing:
        span = tracing.begin({"traceparent": SAMPLED}, "request")
        assert span is NO_SPAN
        with span.span("within") as within:
            assert within.headers() == {}


@given(st.text(alphabet="0123456789abcdef-ABg", max_size=60))
def test_what_is_read_is_what_w3c_specifies(text: str) -> None:
    """Whatever a header holds, it is nothing or two ids that are not zero."""
    parent = parse_traceparent(text)
    assert parent is None or (int(parent.trace_id, 16) and int(parent.span_id, 16))


def test_versions_and_flags() -> None:
    """A later version may say more; version 00 may not, ff is none, and zeros are no ids."""
    assert parse_traceparent(f"01-{TRACE}-{PARENT}-01-more") == TraceParent(TRACE, PARENT, True)
    assert parse_traceparent(f"00-{TRACE}-{PARENT}-03") == TraceParent(TRACE, PARENT, True)
    assert parse_traceparent(f"00-{TRACE}-{PARENT}-02") == TraceParent(TRACE, PARENT, False)
    for wrong in (
        f"00-{TRACE}-{PARENT}-01-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"{SAMPLED}\n",
    ):
        assert parse_traceparent(wrong) is None, wrong


async def test_a_file_has_a_line_for_each_batch(tmp_path: Path) -> None:
    """Ids are hexadecimal and times are text, as OTLP's JSON has them; the file is the user's alone."""
    file = tmp_path / "traces.jsonl"
    async with open_tracing("gateway", file=str(file)) as tracing:
        root = tracing.begin({"traceparent": SAMPLED}, "request")
        with root, root.span("flight") as flight, tracing.begin({}, "other") as other:
            other.link(flight)
    spans = {span["name"]: span for span in spans_in(file)}
    assert spans["request"]["traceId"] == TRACE
    assert spans["request"]["parentSpanId"] == PARENT
    assert spans["flight"]["parentSpanId"] == spans["request"]["spanId"]
    assert spans["other"]["links"][0]["spanId"] == spans["flight"]["spanId"]
    assert int(spans["request"]["startTimeUnixNano"]) == pytest.approx(time.time_ns(), abs=60e9)
    assert file.stat().st_mode & 0o777 == 0o600


def spans_in(file: Path) -> list[dict[str, Any]]:
    """All spans of a file of traces."""
    batches = [json.loads(line)["resourceSpans"] for line in file.read_text().splitlines()]
    resources = itertools.chain.from_iterable(batches)
    return [span for resource in resources for scope in resource["scopeSpans"] for span in scope["spans"]]


async def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """At the start, with its name."""
    with pytest.raises(TracingUnavailable, match="missing/traces"):
        async with open_tracing("gateway", file=str(tmp_path / "missing/traces")):
            pass


async def test_a_collector_that_hangs_holds_up_nothing(collector: Collector) -> None:
    """Spans beyond the queue are dropped; a request waits for none, and the end for two seconds."""
    collector.hangs = True
    async with asyncio.timeout(8):
        async with open_tracing("gateway", endpoint=collector.url) as tracing:
            began = time.monotonic()
            for _ in range(5000):
                tracing.begin({}, "request").end()
            assert time.monotonic() - began < 2
        assert collector.calls > 0
