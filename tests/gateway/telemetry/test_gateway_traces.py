"""Requests through a whole gateway: their ids, their lines in the log and their spans."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.settings.operations import LogSettings, TraceSettings
from gateway.upstreams.mock import Reply
from tests.gateway.client import chat
from tests.gateway.conftest import SECRET, Stage
from tests.waiting import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def spans_in(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [s for line in lines for r in line["resourceSpans"] for scope in r["scopeSpans"] for s in scope["spans"]]


def attributes_of(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span.get("attributes", ())}


async def test_a_request_is_one_trace(stage: Stage, tmp_path: Path) -> None:
    """The client's trace goes on through the cache to the upstream; who joins has a link; no text is in it."""
    file = tmp_path / "traces.jsonl"
    traces = TraceSettings(exporter="file", file=str(file))
    mock = await stage.mock(Reply(delay=0.05))
    client = await stage.gateway(mock, traces=traces)
    first = asyncio.create_task(client.post(chat(SECRET), traceparent=PARENT, x_request_id="mine-1"))
    await mock.wait_for(1)
    second = await client.post(chat(SECRET))
    answer = await first
    hit = await client.post(chat(SECRET))

    assert answer.headers["x-request-id"] == "mine-1"
    assert len({answer.headers["x-request-id"], second.headers["x-request-id"], hit.headers["x-request-id"]}) == 3
    sent = {name.lower(): value for name, value in mock.received[0].headers.items()}
    assert sent["x-request-id"] == "mine-1"
    assert sent["traceparent"].split("-")[1] == TRACE
    await until(lambda: file.exists() and sum(s["name"].startswith("POST") for s in spans_in(file)) >= 3, 10)
    spans = spans_in(file)
    own = [span for span in spans if span["traceId"] == TRACE]
    assert {span["name"] for span in own} == {
        "POST /v1/chat/completions",
        "request.read",
        "cache.lookup",
        "semantic.lookup",
        "admission",
        "chat mock",
        "route.prefix",
        "upstream.first_byte",
        "upstream.body",
        "cache.store",
    }
    call = next(span for span in own if span["name"] == "chat mock")
    assert call["spanId"] == sent["traceparent"].split("-")[2]
    assert attributes_of(call)["gen_ai.usage.input_tokens"] == "1"
    server = next(span for span in own if span["name"].startswith("POST"))
    assert server["parentSpanId"] == PARENT.split("-")[2]
    joined = [span for span in spans if span["traceId"] != TRACE and span.get("links")]
    assert [link["spanId"] for span in joined for link in span["links"]] == [call["spanId"]]
    assert SECRET not in file.read_text()


async def test_a_span_has_the_name_of_its_route(stage: Stage, tmp_path: Path) -> None:
    """The pattern of the path, never the path itself: names are few."""
    file = tmp_path / "traces.jsonl"
    mock = await stage.mock()
    client = await stage.gateway(mock, traces=TraceSettings(exporter="file", file=str(file), share=1.0))
    await client.post(chat())
    for path in ("/v1/models", "/v1/models/mock", "/v1/unheard/of", "/nowhere/at/all"):
        await client.get(path)
    await until(lambda: file.exists() and sum(s["name"].startswith("GET") for s in spans_in(file)) >= 4, 10)
    routes = {
        span["name"]: attributes_of(span).get("http.route") for span in spans_in(file) if "parentSpanId" not in span
    }

    assert routes == {
        "POST /v1/chat/completions": "/v1/chat/completions",
        "GET /v1/models": "/v1/models",
        "GET /v1/models/{model}": "/v1/models/{model}",
        "GET /v1/{rest}": "/v1/{rest}",
        "GET": None,
    }


async def test_what_is_not_sampled_is_passed_on_as_that(stage: Stage, tmp_path: Path) -> None:
    """A parent that is not sampled makes no span, and reaches the upstream with its flag."""
    file = tmp_path / "traces.jsonl"
    mock = await stage.mock()
    client = await stage.gateway(mock, traces=TraceSettings(exporter="file", file=str(file)))
    await client.post(chat(), traceparent=PARENT.removesuffix("1") + "0")
    assert mock.received[0].headers["traceparent"].startswith(f"00-{TRACE}-")
    assert mock.received[0].headers["traceparent"].endswith("-00")


async def test_a_client_s_trace_passes_where_traces_are_off(stage: Stage) -> None:
    """The header goes through as it came."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    await client.post(chat(), traceparent=PARENT)
    assert mock.received[0].headers["traceparent"] == PARENT


async def test_a_line_tells_of_a_request_without_its_text(
    stage: Stage, caplog: pytest.LogCaptureFixture, secret_is_not_logged: None
) -> None:
    """Misses, hits and errors have their fields."""
    mock = await stage.mock()
    client = await stage.gateway(mock, log=LogSettings(requests="all"))
    with caplog.at_level(logging.INFO, "keepgate.requests"):
        for stream in (False, False, True):
            await client.post(chat(SECRET, stream=stream))
        await client.post(b"{", "/v1/chat/completions")
    lines = [record.fields for record in caplog.records if record.name == "keepgate.requests"]  # type: ignore[attr-defined]
    assert [line.get("cache") for line in lines] == ["miss", "hit", "hit", None]
    assert [line["status"] for line in lines] == [200, 200, 200, 400]
    assert lines[0]["upstream"]
    assert lines[0]["prompt_tokens"] == 1
    assert lines[3]["error"] == "invalid_request_error"
