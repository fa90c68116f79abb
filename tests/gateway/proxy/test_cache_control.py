"""Cache directives of requests and cache headers of answers: RFC 9111, RFC 9211, RFC 5861."""

import asyncio
from typing import Any

import pytest

from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.cache_status import parse_cache_status
from tests.gateway.client import Answer, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.proxy.aging import grow_old
from tests.gateway.raw_upstream import saying
from tests.gateway.wire import request_bytes, wire

HOUR = 3600.0
SHAPES: dict[str, dict[str, Any]] = {
    "json": {},
    "stream": {"stream": True},
    "stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


async def learned(stage: Stage, age: float = 0.0, **cache: Any) -> tuple[Client, MockUpstream, Answer]:
    """A gateway with an answer of `age` seconds; its lifetime is an hour unless `cache` changes it."""
    mock = await stage.mock(Reply(text="hello"))
    client = await stage.gateway(mock, cache={"ttl": HOUR, **cache})
    answer = await client.post(chat())
    if age:
        await grow_old(client, answer.entry, age)
    return client, mock, answer


# Headers of answers


@shapes
async def test_a_miss_has_the_headers_of_a_miss(stage: Stage, shape: dict[str, Any]) -> None:
    """A miss has Cache-Status with fwd=uri-miss and Keepgate's headers, and no Age, for streams too."""
    client = await stage.gateway(await stage.mock())
    miss = await client.post(chat(**shape))

    assert (miss.cache, miss.headers["x-keepgate-layer"]) == ("miss", "none")
    assert (miss.cache_status.cache, miss.cache_status.fwd) == ("keepgate", "uri-miss")
    assert "Age" not in miss.headers
    assert miss.entry.startswith("public.")


@shapes
async def test_a_hit_has_the_headers_of_a_hit(stage: Stage, shape: dict[str, Any]) -> None:
    """A hit has Age, Cache-Status with hit and ttl, layer and entry, for streams too."""
    client, _, computed = await learned(stage, age=100)
    for _ in range(3):
        hit = await client.post(chat(**shape))

        assert (hit.cache, hit.headers["x-keepgate-layer"], hit.entry) == ("hit", "exact", computed.entry)
        assert hit.cache_status.cache == "keepgate"
        assert hit.cache_status.hit
        assert hit.cache_status.detail == "exact"
        assert 100 <= int(hit.headers["Age"]) <= 110
        assert int(hit.headers["Age"]) + int(hit.cache_status.parameters["ttl"]) in (3599, 3600)


async def test_the_entry_that_a_miss_names_is_that_of_the_hit(stage: Stage) -> None:
    """The x-keepgate-entry of a miss is the id of the later hit."""
    client, _, computed = await learned(stage)

    assert (await client.get(f"/v1/cache/entries/{computed.entry}")).json["id"] == computed.entry


async def test_the_cache_status_of_an_upstream_stays_in_front(stage: Stage) -> None:
    """Keepgate's Cache-Status follows that of the upstream (RFC 9211)."""
    mock = await stage.mock(Reply(headers={"Cache-Status": "edge; fwd=miss; stored"}))
    client = await stage.gateway(mock)
    miss = await client.post(chat())
    members = parse_cache_status(", ".join(miss.headers.getall("Cache-Status")))

    assert [member.cache for member in members] == ["edge", "keepgate"]


async def test_an_upstreams_keepgate_headers_are_replaced(stage: Stage) -> None:
    """An x-keepgate-cache of the upstream is replaced by the gateway's own."""
    headers = {"x-keepgate-cache": "hit", "x-keepgate-layer": "semantic", "x-keepgate-entry": "other"}
    client = await stage.gateway(await stage.mock(Reply(headers=headers)))
    miss = await client.post(chat())

    assert miss.headers.getall("x-keepgate-cache") == ["miss"]
    assert miss.headers.getall("x-keepgate-layer") == ["none"]
    assert miss.headers.getall("x-keepgate-entry") != ["other"]


@pytest.mark.parametrize("status", [400, 500])
async def test_an_upstreams_error_has_the_headers_of_a_miss(stage: Stage, status: int) -> None:
    """An upstream's error has the headers of a miss without an entry."""
    client = await stage.gateway(await stage.mock(Reply(status=status, error={"message": "no"})))
    failed = await client.post(chat())

    assert (failed.status, failed.cache, failed.cache_status.fwd) == (status, "miss", "uri-miss")
    assert "x-keepgate-entry" not in failed.headers


# Directives of clients


@pytest.mark.parametrize(
    "directive", ["no-cache", "No-Cache", " no-cache ", "foo, no-cache", 'x="1", no-cache', "max-age=9, no-cache"]
)
async def test_no_cache_calls_the_upstream_and_replaces_the_entry(stage: Stage, directive: str) -> None:
    """A no-cache request gets a new answer, the reason in its headers, and replaces the entry."""
    client, mock, computed = await learned(stage)
    fresh = await client.post(chat(), Cache_Control=directive)
    after = await client.post(chat())

    assert (fresh.cache, fresh.cache_status.fwd) == ("bypass", "request")
    assert fresh.body != computed.body
    assert (after.cache, after.body) == ("hit", fresh.body)
    assert len(mock.received) == 2


async def test_no_store_neither_reads_nor_writes(stage: Stage) -> None:
    """A no-store request is computed for its client alone and is not stored."""
    client, mock, computed = await learned(stage)
    private = await client.post(chat(), Cache_Control="no-store")
    other = await client.post(chat("other"), Cache_Control="no-store")

    assert (private.cache, private.cache_status.fwd) == ("bypass", "bypass")
    assert private.body != computed.body
    assert (await client.post(chat())).body == computed.body
    assert (await client.post(chat("other"))).cache == "miss"
    assert other.cache == "bypass"
    assert len(mock.received) == 4


@shapes
@pytest.mark.parametrize(
    ("directive", "age", "served"),
    [
        ("max-age=200", 100, True),
        ("max-age=50", 100, False),
        ("max-age=0", 1, False),
        ('max-age="200"', 100, True),
        ("max-age=soon", 1, False),
        ("max-age=-5", 1, False),
        ("max-age=", 1, False),
        ("MAX-AGE = 50", 100, False),
        ("min-fresh=1000", 100, True),
        ("min-fresh=3550", 100, False),
        ("min-fresh=soon", 1, False),
        ("max-stale", HOUR + 500, True),
        ("max-stale=600", HOUR + 500, True),
        ("max-stale=400", HOUR + 500, False),
        ("max-stale=soon", HOUR + 500, False),
        ("max-stale, max-age=100", HOUR + 500, False),
        ("max-stale, min-fresh=1", HOUR + 500, False),
        ("max-stale", 100, True),
        ("stale-while-revalidate=999, unknown, =, ,", 100, True),
        ("only-if-cached", 100, True),
        ("foo", HOUR + 500, False),
    ],
)
async def test_a_client_limits_the_age_of_an_answer(
    stage: Stage, directive: str, age: float, served: bool, shape: dict[str, Any]
) -> None:
    """A client limits the age of its answer by Cache-Control (RFC 9111, section 5.2.1)."""
    client, mock, computed = await learned(stage, age=age)
    answer = await client.post(chat(**shape), Cache_Control=directive)

    assert answer.cache == ("hit" if served else "miss")
    assert len(mock.received) == (1 if served else 2)
    if served:
        assert int(answer.headers["Age"]) >= age
        assert answer.response["id"] == computed.response["id"]
    else:
        assert answer.cache_status.fwd == ("stale" if age > HOUR else "request")


async def test_directives_in_several_headers_count_together(stage: Stage) -> None:
    """Directives in several header lines count together (RFC 9110, section 5.3)."""
    client, _, _ = await learned(stage, age=100)
    body = b'{"model":"mock","messages":[{"role":"user","content":"hello"}]}'
    async with wire(client) as connection:
        await connection.send(request_bytes(body, b"Cache-Control: max-stale", b"Cache-Control: max-age=5"))
        answer = await connection.answer()

    assert answer.cache == "miss"


@pytest.mark.parametrize("header", ["x-keepgate-max-risk", "x-keepgate-reuse", "x-keepgate-threshold"])
async def test_an_invalid_header_is_refused_on_a_hit_as_on_a_miss(stage: Stage, header: str) -> None:
    """An invalid header is refused on a hit, also on the fast path, as on a miss."""
    client, _, _ = await learned(stage)
    named = {header.replace("-", "_"): "none"}
    assert [(await client.post(chat())).cache for _ in range(2)] == ["hit"] * 2
    refused = [await client.post(chat(text), **named) for text in ("hello", "unheard of")]

    assert [answer.status for answer in refused] == [400, 400]
    assert all(header in answer.error["message"] for answer in refused)


async def test_only_if_cached_never_calls_the_upstream(stage: Stage) -> None:
    """A request with only-if-cached and no entry gives 504 (RFC 9111, section 5.2.1.7)."""
    client, mock, _ = await learned(stage, age=2 * HOUR)
    answers = [await client.post(chat(text), Cache_Control="only-if-cached") for text in ("hello", "unheard of")]

    assert [(a.status, a.error["code"]) for a in answers] == [(504, "not_cached")] * 2
    assert len(mock.received) == 1
    assert answers[1].headers["x-should-retry"] == "false", "clients would ask for the same again"
    assert answers[1].cache == "miss"


async def test_a_client_directive_does_not_shorten_the_life_of_an_entry(stage: Stage) -> None:
    """An entry that one client refuses is still served to others."""
    client, mock, computed = await learned(stage, age=100)
    mock.replies[:] = [Reply(status=500, error={"message": "down"})]
    refused = await client.post(chat(), Cache_Control="max-age=1")

    assert refused.status == 500
    assert (await client.post(chat())).body == computed.body


# Lifetimes


@shapes
async def test_a_stale_entry_is_computed_again(stage: Stage, shape: dict[str, Any]) -> None:
    """An entry past its lifetime is computed again, also from memory."""
    client, mock, computed = await learned(stage)
    hits = [await client.post(chat(**shape)) for _ in range(3)]
    await grow_old(client, computed.entry, HOUR + 1)
    stale = await client.post(chat(**shape))

    assert {hit.cache for hit in hits} == {"hit"}
    assert (stale.cache, stale.cache_status.fwd) == ("miss", "stale")
    assert stale.response["id"] != computed.response["id"]
    assert len(mock.received) == 2


async def test_a_lifetime_of_zero_serves_nothing_unasked(stage: Stage) -> None:
    """An entry with a lifetime of zero is served only to a client that accepts stale answers."""
    client, mock, _ = await learned(stage, ttl=0)
    again = await client.post(chat())
    accepting = await client.post(chat(), Cache_Control="max-stale=60")

    assert again.cache == "miss"
    assert (accepting.cache, accepting.body) == ("hit", again.body)
    assert len(mock.received) == 2


@pytest.mark.parametrize("cache", [{"ttl": 0}, {"sampled": "variants"}], ids=["a lifetime of zero", "variants"])
async def test_concurrent_requests_are_one_call(stage: Stage, cache: dict[str, Any]) -> None:
    """Identical concurrent requests are one upstream call, with a lifetime of zero and with variants too."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache=cache)
    mock.hold.clear()
    before = await client.figure("collapsed_requests_total")
    asking = [asyncio.create_task(client.post(chat())) for _ in range(5)]
    await client.until("collapsed_requests_total", before + 4)
    mock.hold.set()

    assert len({(await answer).body for answer in asking}) == len(mock.received) == 1


# Stale while revalidate, stale if error


@shapes
async def test_stale_while_revalidate_answers_at_once_and_computes_behind(stage: Stage, shape: dict[str, Any]) -> None:
    """A stale answer is served with its age while one upstream call renews it."""
    client, mock, computed = await learned(stage, age=HOUR + 50, stale_while_revalidate=100)
    mock.hold.clear()
    stale = [await client.post(chat(**shape)) for _ in range(4)]
    await mock.wait_for(2)
    mock.hold.set()
    await client.until("flights", 0)
    renewed = await client.post(chat(**shape))

    assert {answer.cache for answer in stale} == {"hit"}
    assert all(int(answer.headers["Age"]) >= HOUR + 50 for answer in stale)
    assert all(int(answer.cache_status.parameters["ttl"]) < 0 for answer in stale)
    assert {answer.response["id"] for answer in stale} == {computed.response["id"]}
    assert renewed.cache == "hit"
    assert renewed.response["id"] != computed.response["id"]
    assert int(renewed.headers["Age"]) < 20
    assert len(mock.received) == 2


@pytest.mark.parametrize(
    ("age", "directive"), [(HOUR + 150, ""), (HOUR + 50, "max-age=3600"), (HOUR + 50, "min-fresh=0, max-age=10")]
)
async def test_stale_while_revalidate_has_limits(stage: Stage, age: float, directive: str) -> None:
    """A request past the window or with a limit of its own calls the upstream."""
    client, mock, _ = await learned(stage, age=age, stale_while_revalidate=100)
    answer = await client.post(chat(), Cache_Control=directive)

    assert answer.cache == "miss"
    assert len(mock.received) == 2


async def test_a_revalidation_that_fails_keeps_the_old_answer(stage: Stage) -> None:
    """A failed revalidation keeps the old answer and is not served."""
    client, mock, computed = await learned(stage, age=HOUR + 50, stale_while_revalidate=100)
    mock.replies[:] = [Reply(status=500, error={"message": "down"})]
    answers = []
    for number in range(3):
        answers.append(await client.post(chat()))
        await mock.wait_for(2 + number)
        await client.until("flights", 0)

    assert {answer.body for answer in answers} == {computed.body}


@shapes
@pytest.mark.parametrize("status", [500, 502, 503, 504, 529])
async def test_stale_if_error_stands_in_for_a_failing_upstream(
    stage: Stage, status: int, shape: dict[str, Any]
) -> None:
    """The last good answer, with its age and the reason, replaces a server's error."""
    client, mock, computed = await learned(stage, age=HOUR + 50, stale_if_error=100)
    mock.replies[:] = [Reply(status=status, error={"message": "down"})]
    answer = await client.post(chat(**shape))

    assert (answer.status, answer.cache) == (200, "hit")
    assert answer.response["id"] == computed.response["id"]
    assert int(answer.headers["Age"]) >= HOUR + 50
    assert answer.cache_status.detail == "stale-if-error"
    assert len(mock.received) == 2


async def test_stale_if_error_stands_in_for_an_upstream_that_is_gone(stage: Stage) -> None:
    """The last good answer replaces a failed connection."""
    mock = MockUpstream([Reply(text="hello")])
    async with mock.serving():
        client = await stage.gateway(mock, cache={"ttl": HOUR, "stale_if_error": 100})
        computed = await client.post(chat())
    await grow_old(client, computed.entry, HOUR + 50)
    answer = await client.post(chat())

    assert (answer.status, answer.cache, answer.body) == (200, "hit", computed.body)


async def test_stale_if_error_stands_in_for_a_body_that_breaks_off(stage: Stage) -> None:
    """The last good answer replaces a plain answer that is cut."""
    client, _, computed = await learned(stage, age=HOUR + 50, stale_if_error=100)
    raw = await stage.raw(saying(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"))
    replacing = await stage.gateway(raw, cache={"ttl": HOUR, "stale_if_error": 100})
    entry = await client.gateway.cache.entry(computed.entry)
    assert entry is not None
    await replacing.gateway.cache.store(entry)
    answer = await replacing.post(chat())

    assert (answer.status, answer.cache, answer.body) == (200, "hit", computed.body)


@pytest.mark.parametrize(
    ("age", "status", "directive"),
    [
        (HOUR + 150, 500, ""),
        (HOUR + 50, 400, ""),
        (HOUR + 50, 429, ""),
        (HOUR + 50, 500, "no-cache"),
        (HOUR + 50, 500, "max-age=60"),
    ],
)
async def test_stale_if_error_has_limits(stage: Stage, age: float, status: int, directive: str) -> None:
    """An error is returned past the window, for a fault of the request, and if the client refuses old answers."""
    client, mock, _ = await learned(stage, age=age, stale_if_error=100)
    mock.replies[:] = [Reply(status=status, error={"message": "down"})]
    answer = await client.post(chat(), Cache_Control=directive)

    assert (answer.status, answer.json) == (status, {"error": {"message": "down"}})


async def test_stale_if_error_needs_the_usage_that_was_asked_for(stage: Stage) -> None:
    """An entry without usage does not replace an error for a stream that asks for usage."""
    mock = await stage.mock(Reply(text="hello"))
    client = await stage.gateway(mock, cache={"ttl": HOUR, "stale_if_error": 100, "ask_usage": False})
    computed = await client.post(chat(stream=True))
    await grow_old(client, computed.entry, HOUR + 50)
    mock.replies[:] = [Reply(status=500, error={"message": "down"})]
    answer = await client.post(chat(**SHAPES["stream with usage"]))

    assert answer.status == 500


# Sampled requests


SAMPLED: list[dict[str, Any]] = [{}, {"temperature": 1}, {"temperature": 0.2, "top_p": 0.9}]
DETERMINISTIC: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.0},
    {"seed": 7},
    {"seed": 0, "temperature": 1},
]


@pytest.mark.parametrize(
    ("cache", "fields"),
    [({}, fields) for fields in SAMPLED + DETERMINISTIC]
    + [({"sampled": mode}, fields) for mode in ("bypass", "variants") for fields in DETERMINISTIC],
)
async def test_identical_requests_have_one_answer(stage: Stage, cache: dict[str, Any], fields: dict[str, Any]) -> None:
    """All requests of the mode reuse, which is the default, and deterministic ones of any mode have one answer."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache=cache)
    bodies = {(await client.post(chat(**fields))).body for _ in range(4)}

    assert len(bodies) == len(mock.received) == 1


@pytest.mark.parametrize("fields", SAMPLED)
async def test_bypass_draws_a_sampled_answer_anew(stage: Stage, fields: dict[str, Any]) -> None:
    """The mode bypass sends each sampled request to the upstream and stores nothing."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache={"sampled": "bypass"})
    answers = [await client.post(chat(**fields)) for _ in range(3)]

    assert [(a.cache, a.cache_status.fwd, a.cache_status.detail) for a in answers] == [
        ("bypass", "bypass", "sampled")
    ] * 3
    assert len(mock.received) == 3
    assert await client.figure("memory_entries") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_variants_are_filled_first_and_drawn_from_then(stage: Stage, stream: bool) -> None:
    """The first k requests are computed, and each of the k answers is served to later ones."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache={"sampled": "variants", "variants": 3})
    first = [await client.post(chat(stream=stream)) for _ in range(3)]
    later = [await client.post(chat(stream=stream)) for _ in range(80)]

    kept = {answer.response["id"] for answer in first}
    assert [answer.cache for answer in first] == ["miss"] * 3
    assert len(kept) == len({answer.entry for answer in first}) == 3
    assert {answer.cache for answer in later} == {"hit"}
    # Each half misses one of three answers with probability 3 * (2/3)**40, below one in a million.
    assert {answer.response["id"] for answer in later[:40]} == kept
    assert {answer.response["id"] for answer in later[40:]} == kept
    assert {(answer.entry, answer.response["id"]) for answer in later} == {
        (answer.entry, answer.response["id"]) for answer in first
    }
    assert len(mock.received) == 3
