"""Inspecting and emptying the cache."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from gateway.upstreams.mock import MockUpstream, Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import CHAT, COMPLETIONS, DEADLINE, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.proxy.aging import grow_old
from tests.gateway.wire import request_bytes, wire

EVERYWHERE = "0.0.0.0"  # noqa: S104  # an operator's setting for access from other hosts

STATS = "/v1/cache/stats"
CACHE = "/v1/cache"


def of(entry: str) -> str:
    return f"/v1/cache/entries/{entry}"


# Access


OPERATIONS = [
    ("GET", STATS),
    ("DELETE", CACHE),
    ("DELETE", CACHE + "?namespace=public"),
    ("DELETE", CACHE + "?model=m"),
]
operations = pytest.mark.parametrize(("method", "path"), OPERATIONS)


@operations
@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer the-admin-key"}, {"x-keepgate-admin-key": "the-admin-key"}]
)
async def test_the_admin_key_opens_inspection(stage: Stage, method: str, path: str, headers: dict[str, str]) -> None:
    """The admin key opens inspection as a bearer token and in its own header."""
    client = await stage.gateway(await stage.mock(), admin_key="the-admin-key")

    assert (await client.send(method, path, None, headers)).status == 200


@operations
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer the-admin-key2"},
        {"Authorization": "Bearer THE-ADMIN-KEY"},
        {"x-keepgate-admin-key": "the-admin-ke"},
        {"x-keepgate-admin-key": ""},
        {"x-keepgate-admin-key": "schlüssel"},
        {"x-keepgate-admin-key": "wrong", "Authorization": "Bearer the-admin-key"},
    ],
)
async def test_without_the_admin_key_inspection_is_closed(
    stage: Stage, method: str, path: str, headers: dict[str, str]
) -> None:
    """A wrong, partial or missing admin key gives 401 and changes nothing."""
    client = await stage.gateway(await stage.mock(), admin_key="the-admin-key")
    await client.post(chat(model="m"))
    refused = await client.send(method, path, None, headers)

    assert (refused.status, refused.error["code"]) == (401, "admin_key_required")
    assert "the-admin-key" not in refused.body.decode()
    assert (await client.post(chat(model="m"))).cache == "hit"


async def test_a_key_that_is_no_text_is_refused(stage: Stage) -> None:
    """An admin key that is not text gives 401 and not 500."""
    client = await stage.gateway(await stage.mock(), admin_key="the-admin-key")
    async with wire(client) as connection:
        await connection.send(b"GET /v1/cache/stats HTTP/1.1\r\nHost: g\r\nx-keepgate-admin-key: \xff\xfe\r\n\r\n")
        refused = await connection.answer()

    assert (refused.status, refused.error["code"]) == (401, "admin_key_required")


@operations
async def test_beyond_loopback_a_key_must_be_set(stage: Stage, method: str, path: str) -> None:
    """A gateway that is reachable from other hosts requires an admin key for inspection."""
    client = await stage.gateway(await stage.mock(), host=EVERYWHERE)
    refused = await client.send(method, path)

    assert refused.status == 403
    assert "admin_key" in refused.error["message"]


@operations
async def test_on_loopback_no_key_is_needed(stage: Stage, method: str, path: str) -> None:
    """A gateway on loopback without an admin key allows inspection."""
    client = await stage.gateway(await stage.mock())

    assert (await client.send(method, path)).status == 200


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("settings", [{"admin_key": "the-admin-key"}, {"host": EVERYWHERE}])
async def test_an_entry_belongs_to_its_tenant(stage: Stage, settings: dict[str, Any], method: str) -> None:
    """An entry is read and deleted by its own tenant, and is 404 for others."""
    client = await stage.gateway(await stage.mock(), **settings)
    ours, theirs = client.tenant("sk-ours"), client.tenant("sk-theirs")
    entry = (await ours.post(chat())).entry
    missing = entry[:-4] + "0000"
    answers = [await tenant.send(method, of(e)) for tenant in (theirs, client) for e in (entry, missing)]

    assert {answer.status for answer in answers} <= {401, 403, 404}
    assert len({(answer.status, answer.body.replace(missing.encode(), entry.encode())) for answer in answers}) == 1
    assert (await ours.post(chat())).cache == "hit"
    assert (await ours.send(method, of(entry))).status == 200


async def test_the_operator_may_see_every_entry(stage: Stage) -> None:
    """The admin key opens the entries of all tenants."""
    client = await stage.gateway(await stage.mock(), admin_key="the-admin-key")
    entry = (await client.tenant("sk-ours").post(chat())).entry

    assert (await client.get(of(entry), x_keepgate_admin_key="the-admin-key")).json["id"] == entry


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_endpoints_without_tenant_data_need_no_key(stage: Stage, path: str) -> None:
    """Health, readiness and metrics need no key."""
    client = await stage.gateway(await stage.mock(), admin_key="the-admin-key", host=EVERYWHERE)
    await client.post(chat())

    assert (await client.get(path)).status == 200


# What is shown


async def test_an_entry_shows_what_is_kept_and_what_it_cost(stage: Stage) -> None:
    """An entry is shown with its answer, age, lifetime, tokens and seconds."""
    client = await stage.gateway(await stage.mock(), cache={"ttl": 1000})
    computed = await client.post(chat("four words are here"))
    await grow_old(client, computed.entry, 400)
    shown = (await client.get(of(computed.entry))).json

    assert shown["answer"] == computed.json
    assert (shown["id"], shown["namespace"]) == (computed.entry, "public")
    assert (shown["family"], shown["model"]) == ("chat.completions", "mock")
    assert (shown["fresh_for"], shown["stale"], 400 <= shown["age"] < 420) == (1000, False, True)
    assert shown["bytes"] == len(computed.body)
    assert (shown["cost"]["prompt_tokens"], shown["cost"]["completion_tokens"]) == (4, 4)
    assert 0 < shown["cost"]["seconds"] < 20


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("entry", ["public.00", "nonsense", "..", "a.b.c", "x" * 3000, "%F0%9F%A6%8A"])
async def test_an_unknown_entry_is_404(stage: Stage, entry: str, method: str) -> None:
    """An unknown entry id gives 404 in OpenAI's error form."""
    client = await stage.gateway(await stage.mock())
    answer = await client.send(method, of(entry))

    assert answer.status == 404
    assert answer.error["type"] == "invalid_request_error"


async def test_stats_count_every_request_once(stage: Stage) -> None:
    """Hits, misses, bypasses, tokens and seconds saved are counted, also on the fast path."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    before = (await client.get(STATS)).json
    text = "one two three"
    await client.post(chat(text))
    for stream in (False, True, False, True, False):
        assert (await client.post(chat(text, stream=stream))).cache == "hit"
    await client.post(chat("other"), Cache_Control="no-store")
    after = (await client.get(STATS)).json
    layer, was = after["layers"]["exact"], before["layers"]["exact"]

    counted = {name: layer[name] - was[name] for name in ("hits", "misses", "bypasses", "failures")}
    assert counted == {"hits": 5, "misses": 1, "bypasses": 1, "failures": 0}
    assert after["requests"] - before["requests"] == 7
    saved = {name: layer["saved"][name] - was["saved"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert saved == {"prompt_tokens": 15, "completion_tokens": 15}
    assert 0 < layer["saved"]["seconds"] - was["saved"]["seconds"] < 20
    tier, tier_was = layer["tiers"]["memory"], was["tiers"]["memory"]
    assert (tier["hits"] - tier_was["hits"], tier["misses"] - tier_was["misses"]) == (5, 1)
    assert (layer["entries"], tier["entries"]) == (1, 1)
    assert tier["bytes"] == layer["bytes"] > 0
    assert layer["hit_rate"] == round(layer["hits"] / (layer["hits"] + layer["misses"] + layer["failures"]), 6)


async def test_tokens_are_counted_where_they_were_computed(stage: Stage) -> None:
    """A miss alone counts tokens of the upstream, and a hit alone counts tokens saved."""
    mock = await stage.mock()
    client = await stage.gateway(mock)

    async def tokens() -> tuple[float, float]:
        computed = await client.figure("upstream_tokens_total")
        return computed, await client.figure("tokens_saved_total")

    async def spent(before: tuple[float, float]) -> tuple[float, float]:
        computed, saved = await tokens()
        return computed - before[0], saved - before[1]

    before = await tokens()
    mock.hold.clear()
    collapsed = await client.figure("collapsed_requests_total")
    asking = [asyncio.create_task(client.post(chat("one two three"))) for _ in range(4)]
    await client.until("collapsed_requests_total", collapsed + 3)
    mock.hold.set()
    answers = await asyncio.gather(*asking)
    assert {answer.json["usage"]["total_tokens"] for answer in answers} == {6}
    assert await spent(before) == (6, 0)

    await client.post(chat("one two three"))
    await client.post(chat("one two three", stream=True))
    await client.post(chat("one two three"))
    assert await spent(before) == (6, 18)


async def test_a_hit_reports_the_usage_of_the_answer_once(stage: Stage) -> None:
    """The usage of a replayed stream is in one chunk, with the entry's figures."""
    client = await stage.gateway(await stage.mock())
    computed = await client.post(chat("one two three"))
    hit = await client.post(chat("one two three", stream=True, stream_options={"include_usage": True}))

    assert [chunk["usage"] for chunk in hit.chunks if chunk.get("usage")] == [computed.json["usage"]]


# Emptying


class Filled:
    """Entries of two tenants, two models and two endpoints."""

    def __init__(self, client: Client, mock: MockUpstream) -> None:
        self.client = client
        self.mock = mock
        self.entries: dict[str, str] = {}

    async def ask(self, stream: bool = False) -> dict[str, str]:
        """The cache's result for each request."""
        said: dict[str, str] = {}
        for tenant in ("red", "blue"):
            for model in ("m1", "m2"):
                answer = await self.client.tenant(tenant).post(chat(model=model, stream=stream))
                said[f"{tenant} {model}"] = answer.cache
                self.entries[f"{tenant} {model}"] = answer.entry
        answer = await self.client.tenant("red").post({"model": "m1", "prompt": "x", "stream": stream}, COMPLETIONS)
        said["red m1 text"] = answer.cache
        return said


@pytest.fixture(params=["memory", "redis"])
async def filled(stage: Stage, valkey: Valkey, request: pytest.FixtureRequest) -> Filled:
    mock = await stage.mock(models=("m1", "m2"))
    redis = valkey.url if request.param == "redis" else "none"
    settings: dict[str, Any] = {"redis": redis}
    filled = Filled(await stage.gateway(mock, **settings), mock)
    assert set((await filled.ask()).values()) == {"miss"}
    # Until all of them are on the fast path: purges must reach it as well.
    for stream in (False, True, False, True):
        assert set((await filled.ask(stream)).values()) == {"hit"}
    return filled


async def test_a_purge_of_everything_leaves_nothing(filled: Filled) -> None:
    """DELETE /v1/cache removes every entry."""
    purged = await filled.client.send("DELETE", CACHE)

    assert (purged.status, purged.json) == (200, {"purged": "all"})
    assert await filled.client.figure("memory_entries") == 0
    assert set((await filled.ask()).values()) == {"miss"}
    assert set((await filled.ask(stream=True)).values()) == {"hit"}


async def test_a_purge_of_a_namespace_leaves_other_tenants_alone(filled: Filled) -> None:
    """A purge with ?namespace= removes the entries of that namespace only."""
    namespace = filled.entries["red m1"].partition(".")[0]
    purged = await filled.client.send("DELETE", f"{CACHE}?namespace={namespace}")

    assert purged.json == {"purged": "namespace", "namespace": namespace}
    said = await filled.ask()
    assert {name for name, cache in said.items() if cache == "miss"} == {"red m1", "red m2", "red m1 text"}


async def test_a_purge_of_a_model_leaves_other_models_alone(filled: Filled) -> None:
    """A purge with ?model= removes that model's entries of all tenants and endpoints only."""
    purged = await filled.client.send("DELETE", f"{CACHE}?model=m1")

    assert purged.json == {"purged": "model", "model": "m1"}
    said = await filled.ask(stream=True)
    assert {name for name, cache in said.items() if cache == "miss"} == {"red m1", "blue m1", "red m1 text"}


async def test_a_purge_by_age_leaves_younger_answers_alone(stage: Stage, valkey: Valkey) -> None:
    """It takes an age in seconds, and says the time before which nothing counts."""
    client = await stage.gateway(await stage.mock(), redis=valkey.url)
    old, young = chat("old"), chat("young")
    await grow_old(client, (await client.post(old)).entry, 500)
    assert client.gateway.cache.redis
    await client.gateway.cache.redis.flush()  # else Redis may have the entry as it was
    await client.post(young)
    purged = await client.send("DELETE", CACHE + "?min_age=400")
    assert purged.json["purged"] == "before"
    assert abs(time.time() - 400 - purged.json["before"]) < DEADLINE
    assert [(await client.post(body)).cache for body in (old, young)] == ["miss", "hit"]


async def test_a_purge_of_a_tag_leaves_other_answers_alone(stage: Stage, valkey: Valkey) -> None:
    """In every form of API; the first request's tags hold, and no upstream sees them."""
    client = await stage.gateway(mock := await stage.mock(), redis=valkey.url)
    asked = {
        "chat": chat("a"),
        "stream": chat("b", stream=True),
        "other": chat("c"),
        "untagged": chat("d"),
    }
    tags = {"chat": "docs-v7", "stream": "product:1, docs-v7", "other": "product:1", "untagged": ""}
    for name, body in asked.items():
        await client.post(body, **({"x_keepgate_tags": tags[name]} if tags[name] else {}))
    embedding = {"model": "m", "input": "text"}
    await client.post(embedding, "/v1/embeddings", x_keepgate_tags="docs-v7")
    assert not any("x-keepgate-tags" in request.headers for request in mock.received)
    listed = (await client.get(CACHE + "/entries?tag=docs-v7")).json["data"]
    assert sorted(each["tags"] for each in listed) == [["docs-v7"], ["docs-v7"], ["product:1", "docs-v7"]]
    assert (await client.post(asked["untagged"], x_keepgate_tags="docs-v7")).cache == "hit"

    purged = await client.send("DELETE", CACHE + "?tag=docs-v7")
    assert purged.json == {"purged": "tag", "tag": "docs-v7"}
    said = {name: (await client.post(body)).cache for name, body in asked.items()}
    assert said == {"chat": "miss", "stream": "miss", "other": "hit", "untagged": "hit"}
    assert (await client.post(embedding, "/v1/embeddings")).cache == "miss"


@pytest.mark.parametrize("tags", ["a b", "-a", "ä", "x" * 129, ",".join(map(str, range(17)))])
async def test_tags_that_are_no_names_are_refused(stage: Stage, tags: str) -> None:
    """With the header's name, and what would be right."""
    client = await stage.gateway(await stage.mock())
    embedding = ({"model": "m", "input": "text"}, "/v1/embeddings")
    batch = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
    for body, path in ((chat(), CHAT), embedding, (batch, "/v1/batches")):
        refused = await client.post(body, path, x_keepgate_tags=tags)
        assert (refused.status, refused.error["param"]) == (400, "x-keepgate-tags"), path
        assert "docs-v7" in refused.error["message"]
    await client.post(chat())
    await client.post(chat())
    assert (await client.post(chat(), x_keepgate_tags=tags)).status == 400  # though the answer is known


async def test_tags_may_stand_on_several_lines(stage: Stage) -> None:
    """And between them may be nothing (RFC 9110, sections 5.3 and 5.6.1)."""
    client = await stage.gateway(await stage.mock())
    async with wire(client) as connection:
        lines = (b"x-keepgate-tags: one, ,", b"x-keepgate-tags: ", b"x-keepgate-tags: two")
        await connection.send(request_bytes(msgspec.json.encode(chat()), *lines))
        assert (await connection.answer()).status == 200
    assert (await client.get(CACHE + "/entries?tag=one")).json["data"][0]["tags"] == ["one", "two"]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_request_after_a_purge_joins_no_call_of_before(stage: Stage, path: str) -> None:
    """It would get what was purged; nor does one by a name of which nobody knows whether it was purged since."""
    mock = await stage.mock(Reply(delay=0.5))
    client = await stage.gateway(mock)
    body = chat() if path == CHAT else {"model": "mock", "input": "text"}
    calls = 0
    for purge, tags, joins in [
        ("?tag=docs", "docs", False),
        ("?tag=news", "docs", True),
        ("?tag=news", "docs, news", False),
        ("?namespace=public", "docs", False),
        ("?model=mock", "docs", False),
        ("?namespace=other", "docs", True),
    ]:
        await client.send("DELETE", CACHE)
        first = asyncio.create_task(client.post(body, path, x_keepgate_tags="docs"))
        await mock.wait_for(calls + 1)
        assert (await client.send("DELETE", CACHE + purge)).status == 200
        assert (await client.post(body, path, x_keepgate_tags=tags)).status == 200
        assert (await first).status == 200
        calls += 1 if joins else 2
        assert len(mock.received) == calls, purge + tags


async def test_who_joins_a_call_names_its_answer_too(stage: Stage) -> None:
    """A purge of any of the names concerns the answer."""
    mock = await stage.mock(Reply(delay=0.5))
    client = await stage.gateway(mock)
    first = asyncio.create_task(client.post(chat(), x_keepgate_tags="docs"))
    await mock.wait_for(1)
    await client.post(chat(), x_keepgate_tags="news, docs")
    await first
    assert len(mock.received) == 1
    await client.send("DELETE", CACHE + "?tag=news")
    assert (await client.post(chat())).cache == "miss"


async def test_an_answer_keeps_its_tags_when_it_is_computed_again(stage: Stage) -> None:
    """In the background, for a client that calls it nothing."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache={"stale_while_revalidate": 600.0})
    first = await client.post(chat(), x_keepgate_tags="docs")
    await grow_old(client, first.entry, 86_400 + 60)
    assert (await client.post(chat())).cache == "hit"
    await mock.wait_for(2)
    await client.until("flights", 0)
    await client.send("DELETE", CACHE + "?tag=docs")
    assert (await client.post(chat())).cache == "miss"


async def test_an_answer_that_was_purged_meanwhile_is_no_fallback(stage: Stage) -> None:
    """A stale answer may serve when the upstream fails, but not one that was purged while the upstream was asked."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache={"stale_if_error": 600.0, "ttl": 60.0})
    first = await client.post(chat(), x_keepgate_tags="docs")
    await grow_old(client, first.entry, 90)
    mock.replies[:] = [Reply(delay=0.2, status=503, error={"message": "away"})]
    again = asyncio.create_task(client.post(chat()))
    await mock.wait_for(2)
    await client.send("DELETE", CACHE + "?tag=docs")
    assert (await again).status == 503


async def test_deleting_an_entry_leaves_the_others_alone(filled: Filled) -> None:
    """The deletion of an entry removes it alone, and gives 404 the second time."""
    entry = filled.entries["red m1"]
    deleted = await filled.client.send("DELETE", of(entry))

    assert (deleted.status, deleted.json) == (200, {"id": entry, "deleted": True})
    assert (await filled.client.send("DELETE", of(entry))).status == 404
    assert (await filled.client.get(of(entry))).status == 404
    said = await filled.ask()
    assert {name for name, cache in said.items() if cache == "miss"} == {"red m1"}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("?namespace=", "namespace"),
        ("?model=", "model"),
        ("?model=a&model=b", "model"),
        ("?model=a&namespace=b", "namespace"),
        ("?modle=a", "modle"),
        ("?all=true", "all"),
        ("?min_age=-1", "min_age"),
        ("?min_age=old", "min_age"),
        ("?min_age=5&model=m", "model"),
        ("?Namespace=a", "Namespace"),
        ("?tag=", "tag"),
        ("?tag=a,b", "tag"),
        ("?layer=exact", "layer"),
    ],
)
async def test_an_ambiguous_purge_is_refused(stage: Stage, query: str, field: str) -> None:
    """An unknown, empty or repeated parameter of a purge gives 400 with its name and purges nothing."""
    client = await stage.gateway(await stage.mock())
    await client.post(chat())
    refused = await client.send("DELETE", CACHE + query)

    assert (refused.status, refused.error["param"]) == (400, field)
    assert (await client.post(chat())).cache == "hit"


@pytest.mark.parametrize("path", [CACHE, CACHE + "/", CACHE + "/entries", CACHE + "/nonsense", STATS + "/x"])
async def test_paths_of_inspection_that_do_not_exist_reach_no_upstream(stage: Stage, path: str) -> None:
    """An unknown path or method of inspection gives 404 or 405 without an upstream call."""
    mock = await stage.mock()
    client = await stage.gateway(mock)

    assert (await client.send("POST", path, {"x": 1})).status in (404, 405)
    assert mock.received == []


@pytest.mark.parametrize("scope", ["", "?model=mock", "?namespace=public"])
async def test_an_answer_computed_during_a_purge_is_not_kept(stage: Stage, scope: str) -> None:
    """An answer whose request began before a purge is not stored."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    mock.hold.clear()
    asking = asyncio.create_task(client.post(chat()))
    await mock.wait_for(1)
    await client.send("DELETE", CACHE + scope)
    mock.hold.set()

    assert (await asking).status == 200
    assert (await client.post(chat())).cache == "miss"
    assert (await client.post(chat())).cache == "hit"


# Several gateways on one store


@pytest.mark.parametrize("scope", ["", "?model=mock", "?namespace=public", "the entry"])
async def test_a_purge_in_one_gateway_reaches_the_others(stage: Stage, valkey: Valkey, scope: str) -> None:
    """A purge or a deletion removes entries from the memory of other gateways."""
    first, second, entry = await two_gateways(stage, valkey)
    await first.send("DELETE", of(entry) if scope == "the entry" else CACHE + scope)

    await until_gone(second)
    assert (await second.post(chat())).cache == "miss"


async def test_a_gateway_that_starts_after_a_purge_knows_of_it(stage: Stage, valkey: Valkey) -> None:
    """A gateway that starts after a purge does not serve purged entries of the store."""
    first, _, _ = await two_gateways(stage, valkey)
    await first.send("DELETE", CACHE)
    third = await stage.gateway(await stage.mock(), redis=valkey.url)

    assert (await third.post(chat())).cache == "miss"


async def two_gateways(stage: Stage, valkey: Valkey) -> tuple[Client, Client, str]:
    """Two gateways on one store that both have the same answer in memory, and its entry's id."""
    mock = await stage.mock()
    settings: dict[str, Any] = {"redis": valkey.url}
    first = await stage.gateway(mock, **settings)
    second = await stage.gateway(mock, **settings)
    entry = (await first.post(chat())).entry
    redis = first.gateway.cache.redis
    assert redis is not None
    await redis.flush()
    for _ in range(3):
        assert (await second.post(chat())).cache == "hit"
    assert len(mock.received) == 1
    assert await second.figure("memory_entries") == 1
    return first, second, entry


async def until_gone(client: Client) -> None:
    """Return once the client's gateway has no entries in memory."""
    async with asyncio.timeout(DEADLINE):
        await client.until("memory_entries", 0)
