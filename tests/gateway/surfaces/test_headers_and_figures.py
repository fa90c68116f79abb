"""What an answer in any form of API says of the cache, and what the metrics and statistics count."""

import asyncio
import re
from typing import Any

import pytest

from gateway.upstreams.mock import Reply
from tests.gateway.client import Answer, Client
from tests.gateway.conftest import Stage
from tests.gateway.surfaces.dialects import CALLER_NAMES, CALLERS, TRANSLATED, Dialect, Question, completion, names
from tests.gateway.surfaces.native_answers import PLAIN, STREAMS
from tests.gateway.surfaces.native_upstream import CHAT, NativeUpstream

callers = pytest.mark.parametrize(("dialect", "stream"), CALLERS, ids=CALLER_NAMES)

FAMILIES = {"chat": "chat.completions", "messages": "messages", "responses": "responses", "ollama": "ollama.chat"}
TYPES = {"ollama": "application/x-ndjson"}


def content_type(dialect: Dialect, stream: bool) -> str:
    return TYPES.get(dialect.name, "text/event-stream") if stream else "application/json"


async def post(client: Client, dialect: Dialect, stream: bool, **headers: str) -> Answer:
    return await client.post(dialect.body(Question(), stream), dialect.path, **headers)


@callers
async def test_headers_of_misses_and_hits(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """A miss and its hits, from the pipeline and from memory, name one entry in each form of API."""
    mock = await stage.mock(Reply(body=completion({"content": "Sunny."})))
    client = await stage.gateway(mock)
    miss = await post(client, dialect, stream)
    hits = [await post(client, other, streams) for other, streams in CALLERS for _ in range(3)]
    entry = await client.get(f"/v1/cache/entries/{miss.entry}")

    assert (miss.status, miss.cache, miss.headers["x-keepgate-layer"]) == (200, "miss", "none")
    assert miss.headers["Cache-Status"] == "keepgate; fwd=uri-miss"
    assert miss.headers["Content-Type"].partition(";")[0] == content_type(dialect, stream)
    assert "Age" not in miss.headers
    assert entry.status == 200
    for (other, streams), hit in zip([c for c in CALLERS for _ in range(3)], hits, strict=True):
        assert (hit.status, hit.cache, hit.headers["x-keepgate-layer"]) == (200, "hit", "exact")
        assert hit.entry == miss.entry
        assert re.fullmatch(r"keepgate; hit; ttl=\d+; detail=exact", hit.headers["Cache-Status"])
        assert hit.headers["Age"].isdigit()
        assert hit.headers["Content-Type"].partition(";")[0] == content_type(other, streams)
        assert hit.headers.get("Cache-Control") == ("no-cache" if streams else None)
        assert "x-keepgate-ignored-fields" not in hit.headers


@callers
async def test_a_hit_has_the_bytes_of_every_other_hit(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """Hits of one form are equal bytes, whether the answer was rendered for them or lay ready."""
    mock = await stage.mock(Reply(body=completion({"content": "Sunny.", "reasoning_content": "Hm."}, cached=4)))
    client = await stage.gateway(mock)
    miss = await post(client, dialect, stream)
    hits = [await post(client, dialect, stream) for _ in range(4)]

    assert {hit.cache for hit in hits} == {"hit"}
    assert len({hit.body for hit in hits}) == 1
    assert stream or dialect.name == "chat" or hits[0].json == miss.json


@callers
async def test_cache_control(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """`no-cache` computes and stores anew, and `no-store` does not store, in each form of API."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    unstored = await post(client, dialect, stream, Cache_Control="no-store")
    first = await post(client, dialect, stream, Cache_Control="no-cache")
    hit = await post(client, dialect, stream)
    only = await post(client, dialect, stream, Cache_Control="only-if-cached")
    again = await post(client, dialect, stream, Cache_Control="no-cache")

    assert [answer.cache for answer in (unstored, first, hit, only, again)] == [
        *("bypass", "bypass", "hit", "hit", "bypass"),
    ]
    assert unstored.headers["Cache-Status"] == "keepgate; fwd=bypass; detail=no-store"
    assert first.headers["Cache-Status"] == "keepgate; fwd=request; detail=no-cache"
    assert "x-keepgate-entry" not in unstored.headers
    assert first.entry == hit.entry == again.entry
    assert len(mock.received) == 3


@callers
async def test_requests_are_counted_by_family(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """Misses, hits and bypasses count for the form of API in which they were asked; the statistics have all."""
    mock = await stage.mock(Reply(body=completion({"content": "Sunny."})))
    client = await stage.gateway(mock)

    async def counted() -> dict[tuple[str, str], float]:
        return {
            (name, kind): await client.figure("requests_total", family=family, cache=kind)
            for name, family in FAMILIES.items()
            for kind in ("hit", "miss", "bypass", "failed")
        }

    before, saved = await counted(), await client.figure("tokens_saved_total", kind="prompt")
    stats = (await client.get("/v1/cache/stats")).json
    await post(client, dialect, stream)
    for other, streams in CALLERS:
        for _ in range(3):
            await post(client, other, streams)
    await post(client, dialect, stream, Cache_Control="no-store")
    after = await counted()
    now = (await client.get("/v1/cache/stats")).json

    expected = {(name, "hit"): 6.0 for name in FAMILIES} | {(dialect.name, "miss"): 1.0, (dialect.name, "bypass"): 1.0}
    assert {key: after[key] - before[key] for key in after if after[key] != before[key]} == expected
    assert now["requests"] - stats["requests"] == 26
    assert now["layers"]["exact"]["hits"] - stats["layers"]["exact"]["hits"] == 24
    assert now["layers"]["exact"]["bypasses"] - stats["layers"]["exact"]["bypasses"] == 1
    assert await client.figure("tokens_saved_total", kind="prompt") - saved == 24 * 12


IGNORED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "messages": (
        {
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "x": 1},
            "metadata": {"user_id": "u", "x": "y"},
            "service_tier": "auto",
            "inference_geo": "eu",
        },
        {"thinking", "output_config", "metadata", "service_tier", "inference_geo"},
    ),
    "responses": (
        {
            "truncation": "auto",
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_retention": "24h",
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low", "x": 1},
            "background": False,
            "max_tool_calls": 5,
        },
        {"truncation", "include", "prompt_cache_retention", "reasoning", "text", "background", "max_tool_calls"},
    ),
    "ollama": (
        {
            "options": {"temperature": 0, "num_ctx": 4096, "num_gpu": 1},
            "think": True,
            "truncate": True,
            "max_tokens": 5,
        },
        {"options", "think", "truncate", "ollama.max_tokens"},
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("dialect", TRANSLATED, ids=names(TRANSLATED))
async def test_what_was_not_sent_is_named(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """Fields without a meaning for chat completions are not sent, are named in a header, and are part of the key."""
    fields, ignored = IGNORED[dialect.name]
    mock = await stage.mock()
    client = await stage.gateway(mock)
    plain = await client.post(dialect.body(Question(), stream), dialect.path)
    answer = await client.post({**dialect.body(Question(), stream), **fields}, dialect.path)
    sent = mock.received[1].fields

    assert "x-keepgate-ignored-fields" not in plain.headers
    assert set(answer.headers["x-keepgate-ignored-fields"].split(", ")) == ignored
    assert not ignored & set(sent)
    assert answer.cache == "miss"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("dialect", TRANSLATED, ids=names(TRANSLATED))
async def test_a_native_upstream_ignores_nothing(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """An upstream with the form of API gets every field, and no field is named as ignored."""
    paths = (CHAT, dialect.path)
    upstream = NativeUpstream({path: PLAIN[path] for path in paths}, {path: STREAMS[path] for path in paths})
    async with upstream.serving():
        client = await stage.gateway(upstream.url)
        answer = await client.post({**dialect.body(Question(), stream), **IGNORED[dialect.name][0]}, dialect.path)

    assert answer.status == 200
    assert "x-keepgate-ignored-fields" not in answer.headers


@callers
async def test_joined_requests_say_so(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """A request that shared a call says that it was collapsed."""
    mock = await stage.mock()
    mock.hold.clear()
    client = await stage.gateway(mock)
    before = await client.figure("collapsed_requests_total")
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(post(client, dialect, stream))
        await mock.wait_for(1)
        others = [tasks.create_task(post(client, other, streams)) for other, streams in CALLERS]
        await client.until("collapsed_requests_total", before + len(CALLERS))
        mock.hold.set()

    assert first.result().headers["Cache-Status"] == "keepgate; fwd=uri-miss"
    assert {task.result().headers["Cache-Status"] for task in others} == {"keepgate; fwd=uri-miss; collapsed"}
    assert {task.result().entry for task in (first, *others)} == {first.result().entry}
