"""The engine's part of a trace: its request, waiting, prefill and decoding, and what the prefix store does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from backend.prefixes import sharing as prefix_sharing
from prefix_store.store import store
from prefix_store.store.config import StoreConfig
from telemetry.tracing.opening import open_tracing
from telemetry.tracing.span import Tracing
from tests.backend.conftest import CHAT, COMPLETIONS, MODEL, StartServer
from tests.telemetry.tracing.collector import Collector, attributes_of
from tests.waiting import until

TRACE, PARENT = "a" * 32, "b" * 16
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-keepgate-reuse": "conversation"}
PROMPT = "one two three four five six seven eight nine ten eleven twelve " * 6


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector().serving() as collector:
        yield collector


@pytest.fixture
async def tracing(collector: Collector) -> AsyncIterator[Tracing]:
    async with open_tracing("engine", endpoint=collector.url) as tracing:
        yield tracing


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_is_a_span_with_its_steps(
    start_server: StartServer, tracing: Tracing, collector: Collector, streams: bool
) -> None:
    """They follow each other within it; usage and the reason of the end are those of the answer."""
    server = await start_server(tracing=tracing)
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "stream": streams}
    async with server.client.post(CHAT, json=body, headers=HEADERS) as response:
        assert response.status == 200
        await response.read()
    names = (f"chat {MODEL}", "engine.queue", "engine.prefill", "engine.decode")
    request, queue, prefill, decode = await collector.named(*names)
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {request.span_id}
    starts = [span.start_time_unix_nano for span in (request, queue, prefill, decode)]
    ends = [span.end_time_unix_nano for span in (queue, prefill, decode, request)]
    assert starts == sorted(starts)
    assert ends == sorted(ends)
    about = attributes_of(request)
    assert about["http.response.status_code"] == 200
    assert about["gen_ai.usage.output_tokens"] == attributes_of(decode)["keepgate.generated_tokens"] == 4
    assert about["gen_ai.usage.input_tokens"] == attributes_of(prefill)["keepgate.prompt_tokens"]
    assert about["gen_ai.operation.name"] == "chat"
    assert not any(b"twelve" in span.SerializeToString() for span in collector.spans)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_is_told_its_durations(start_server: StartServer, streams: bool) -> None:
    """In the header Server-Timing, in milliseconds, if it asks for them; a stream's head tells those until then."""
    server = await start_server()
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "stream": streams}
    async with server.client.post(CHAT, json=body, headers={"x-keepgate-profile": "1"}) as response:
        told = response.headers["Server-Timing"]
        await response.read()
    parts = {name: float(duration) for name, duration in (part.split(";dur=") for part in told.split(", "))}
    own = ["engine.tokenize", "engine.queue", "engine.prefill", *(["engine.decode"] if not streams else [])]
    assert [name for name in parts if name.startswith("engine.")] == own
    assert sum(parts[name] for name in own) <= parts["total"] + 0.01
    async with server.client.post(CHAT, json=body) as response:
        assert "Server-Timing" not in response.headers


async def test_what_the_prefix_store_does_is_in_the_trace(
    start_server: StartServer, tracing: Tracing, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request offloads its blocks, the next one restores them."""
    monkeypatch.setattr(prefix_sharing, "_SHORTEST_ASK", prefix_sharing._LONGEST_ASK)
    monkeypatch.setattr(store, "_SHORTEST_RESTORE", store._LONGEST_RESTORE)
    server = await start_server(tracing=tracing, prefix_store=StoreConfig(disk=tmp_path / "kv", audit_every=0))
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    for _ in range(2):
        async with server.client.post(COMPLETIONS, json=body, headers=HEADERS) as response:
            await response.read()
        await server.state.prefixes.settled()
        await server.forget_own_blocks()
    lookup, offload, restore = await collector.named(
        "prefix_store.lookup", "prefix_store.offload", "prefix_store.restore"
    )
    requests: list[bytes] = []

    def both_arrived() -> bool:
        requests[:] = [span.span_id for span in collector.spans if span.name == f"text_completion {MODEL}"]
        return len(requests) == 2

    await until(both_arrived)
    assert [lookup.parent_span_id, offload.parent_span_id, restore.parent_span_id] == [
        requests[0],
        requests[0],
        requests[1],
    ]
    found = attributes_of(restore)
    assert found["keepgate.prefix.restored_blocks"] == found["keepgate.prefix.blocks"]


async def test_an_error_is_a_failed_span_and_other_paths_have_none(
    start_server: StartServer, tracing: Tracing, collector: Collector
) -> None:
    """A health check is not worth a trace."""
    server = await start_server(tracing=tracing)
    for method, path in (("GET", "/health"), ("POST", "/tokenize"), ("POST", CHAT)):
        async with server.client.request(method, path, json={}, headers=HEADERS) as response:
            await response.read()
    (span,) = await collector.named(f"chat {MODEL}")
    assert attributes_of(span)["error.type"] == "400"
    assert {each.name for each in collector.spans} == {span.name, "engine.tokenize"}


async def test_a_request_that_its_caller_does_not_trace_has_none(
    start_server: StartServer, tracing: Tracing, collector: Collector
) -> None:
    """The gateway decides which requests are traced, and says so in each."""
    server = await start_server(tracing=tracing)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    for flags in ("00", "01"):
        headers = {"traceparent": f"00-{f'{flags}ab' * 8}-{PARENT}-{flags}"}
        async with server.client.post(COMPLETIONS, json=body, headers=headers) as response:
            await response.read()
    await collector.named("engine.decode")
    assert {span.trace_id.hex() for span in collector.spans} == {"01ab" * 8}
