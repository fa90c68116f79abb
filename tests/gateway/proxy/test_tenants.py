"""Tenants are separate: in the cache, on the fast path, and in flight."""

import asyncio
from typing import Any

import pytest

from gateway.upstreams.mock import MockUpstream
from tests.gateway.client import Answer, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.wire import request_bytes, wire

shapes = pytest.mark.parametrize("stream", [False, True])


@shapes
async def test_an_answer_is_served_to_the_tenant_that_asked_for_it_only(stage: Stage, stream: bool) -> None:
    """An answer is a hit for the API key that asked for it only, also on the fast path."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    ours = [await client.tenant("sk-ours").post(chat(stream=stream)) for _ in range(4)]
    theirs = [await client.tenant("sk-theirs").post(chat(stream=stream)) for _ in range(4)]
    without_key = [await client.post(chat(stream=stream)) for _ in range(4)]

    for answers in (ours, theirs, without_key):
        assert [answer.cache for answer in answers] == ["miss", "hit", "hit", "hit"]
        assert len({answer.response["id"] for answer in answers}) == 1
    assert len({answers[0].response["id"] for answers in (ours, theirs, without_key)}) == 3
    assert len({answers[0].entry for answers in (ours, theirs, without_key)}) == 3
    assert len(mock.received) == 3


async def test_each_upstream_call_carries_its_own_tenants_key(stage: Stage) -> None:
    """The gateway sends each tenant's own key upstream."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    mock.hold.clear()
    asking = [asyncio.create_task(client.tenant(f"sk-{n}").post(chat(f"I am {n}"))) for n in range(5)]
    await mock.wait_for(5)
    mock.hold.set()
    await asyncio.gather(*asking)

    for received in mock.received:
        assert received.fields["messages"][0]["content"] == f"I am {received.headers['Authorization'][-1]}"


@shapes
async def test_flights_never_cross_tenants(stage: Stage, stream: bool) -> None:
    """Identical concurrent requests of two tenants are two upstream calls with two answers."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    mock.hold.clear()
    tenants = [client.tenant("sk-ours"), client.tenant("sk-theirs"), client]
    asking = [asyncio.create_task(tenant.post(chat(stream=stream))) for tenant in tenants for _ in range(3)]
    await mock.wait_for(3)
    await client.until("flights", 3)
    mock.hold.set()
    answers = [await answer for answer in asking]

    assert len(mock.received) == 3
    ids = [answer.response["id"] for answer in answers]
    assert [len(set(ids[start : start + 3])) for start in (0, 3, 6)] == [1, 1, 1]
    assert len(set(ids)) == 3


async def test_a_bearer_token_is_told_apart_from_other_schemes(stage: Stage) -> None:
    """The whole Authorization header counts, with scheme and case."""
    client = await stage.gateway(await stage.mock())
    credentials = ["Bearer abc", "Basic abc", "Bearer ABC", "Bearer abcd", "abc"]
    answers = [await client.post(chat(), Authorization=credential) for credential in credentials]

    assert [answer.cache for answer in answers] == ["miss"] * len(credentials)


async def test_a_credential_that_is_no_text_is_a_tenant(stage: Stage) -> None:
    """Keys that are not UTF-8 are accepted as distinct tenants."""
    client = await stage.gateway(await stage.mock())
    body = b'{"model":"mock","messages":[{"role":"user","content":"hi"}]}'
    answers: list[Answer] = []
    for credential in (b"\xff", b"\xfe", b"\xff", "ÿ".encode()):
        async with wire(client) as connection:
            await connection.send(request_bytes(body, b"Authorization: Bearer " + credential))
            answers.append(await connection.answer())

    assert [(answer.status, answer.cache) for answer in answers] == [
        (200, "miss"),
        (200, "miss"),
        (200, "hit"),
        (200, "miss"),
    ]


async def test_a_key_is_kept_nowhere(stage: Stage) -> None:
    """An id and an entry have a digest of the credential and no part of the credential itself."""
    client = (await stage.gateway(await stage.mock())).tenant("sk-very-secret-key")
    computed = await client.post(chat())
    shown = await client.get(f"/v1/cache/entries/{computed.entry}")

    assert shown.status == 200
    everything = str(computed.headers).encode() + shown.body + str(shown.headers).encode()
    assert b"secret" not in everything


class TestHeaderNamespace:
    """`namespace: header:NAME` separates tenants by a header that a proxy in front of the gateway sets."""

    async def gateway(self, stage: Stage, mock: MockUpstream) -> Client:
        return await stage.gateway(mock, cache={"namespace": "header:X-Team"})

    @shapes
    async def test_the_header_sets_tenants_apart(self, stage: Stage, stream: bool) -> None:
        """Requests of different teams, or of none, have their own entries, also on the fast path."""
        client = await self.gateway(stage, await stage.mock())
        teams: list[dict[str, str]] = [{"X-Team": "red"}, {"X-Team": "blue"}, {}]
        answers = [
            [await client.send("POST", "/v1/chat/completions", chat(stream=stream), team) for _ in range(3)]
            for team in teams
        ]

        assert [[a.cache for a in of_team] for of_team in answers] == [["miss", "hit", "hit"]] * 3

    @shapes
    async def test_the_upstream_gets_the_namespace_of_the_team(self, stage: Stage, stream: bool) -> None:
        """The upstream gets the gateway's digest of the team instead of the client's own value."""
        mock = await stage.mock()
        client = await self.gateway(stage, mock)
        forged = {"x-keepgate-namespace": "red"}
        for team in ("red", "blue"):
            await client.send("POST", "/v1/chat/completions", chat(stream=stream), {"X-Team": team, **forged})
        red, blue = (received.headers["x-keepgate-namespace"] for received in mock.received)

        assert len({red, blue, "red"}) == 3

    async def test_a_second_header_leads_to_no_other_tenant(self, stage: Stage) -> None:
        """Two team headers on one request make a separate tenant."""
        client = await self.gateway(stage, await stage.mock())
        body = b'{"model":"mock","messages":[{"role":"user","content":"hi"}]}'
        said: list[str] = []
        for teams in ((b"red",), (b"blue",), (b"red", b"blue"), (b"blue", b"red"), (b"red, blue",), (b"red",)):
            async with wire(client) as connection:
                await connection.send(request_bytes(body, *(b"X-Team: " + team for team in teams)))
                said.append((await connection.answer()).cache)

        assert said == ["miss"] * 5 + ["hit"]

    async def test_keys_of_one_team_share_entries(self, stage: Stage) -> None:
        """Two keys of one team share entries, and the case of the header's name does not matter."""
        client = await self.gateway(stage, await stage.mock())
        await client.tenant("sk-1").post(chat(), X_Team="red")

        assert (await client.tenant("sk-2").post(chat(), x_tEAM="red")).cache == "hit"

    async def test_flights_do_not_cross_teams(self, stage: Stage) -> None:
        """Requests with one key in two teams share no flight."""
        mock = await stage.mock()
        client = await self.gateway(stage, mock)
        mock.hold.clear()
        asking = [asyncio.create_task(client.post(chat(), X_Team=team)) for team in ("red", "blue")]
        await mock.wait_for(2)
        mock.hold.set()

        assert len({(await answer).response["id"] for answer in asking}) == 2


@shapes
async def test_shared_is_one_cache_for_all(stage: Stage, stream: bool) -> None:
    """The setting `namespace: shared` gives all tenants one cache."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache={"namespace": "shared"})
    computed = await client.tenant("sk-ours").post(chat(stream=stream))
    hit = await client.tenant("sk-theirs").post(chat(stream=stream))

    assert (hit.cache, hit.response["id"]) == ("hit", computed.response["id"])
    assert len(mock.received) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"User-Agent": "a"},
        {"X-Stainless-Retry-Count": "3"},
        {"X-Request-Id": "1"},
        {"Accept": "text/event-stream"},
        {"Content-Type": "application/json; charset=utf-8"},
        {"Cookie": "a=b"},
    ],
)
async def test_headers_that_clients_vary_do_not_cost_hits(stage: Stage, headers: dict[str, Any]) -> None:
    """Headers that SDKs vary by retry and platform are not part of the key."""
    client = await stage.gateway(await stage.mock())
    await client.post(chat())

    assert (await client.send("POST", "/v1/chat/completions", chat(), headers)).cache == "hit"


@pytest.mark.parametrize(
    "headers",
    [
        {"OpenAI-Organization": "o"},
        {"OpenAI-Project": "p"},
        {"OpenAI-Beta": "assistants=v2"},
        {"anthropic-beta": "context-1m"},
        {"anthropic-version": "2099-01-01"},
        {"X-Model-Revision": "7"},
    ],
)
async def test_headers_that_may_change_an_answer_are_part_of_the_key(stage: Stage, headers: dict[str, Any]) -> None:
    """A request with such a header, of which the operator may name more, shares no answer with one without."""
    client = await stage.gateway(await stage.mock(), cache={"key_headers": ("x-model-revision",)})
    await client.post(chat())
    await client.post(chat())  # the second is answered by the fast path

    assert (await client.send("POST", "/v1/chat/completions", chat(), headers)).cache == "miss"
    assert (await client.send("POST", "/v1/chat/completions", chat(), headers)).cache == "hit"


async def test_a_client_cannot_choose_its_namespace(stage: Stage) -> None:
    """Neither Keepgate's headers nor fields of the body select another tenant's entries."""
    client = await stage.gateway(await stage.mock())
    ours = await client.tenant("sk-ours").post(chat())
    namespace = ours.entry.partition(".")[0]
    forged = await client.tenant("sk-theirs").post(
        chat(), x_keepgate_namespace=namespace, x_keepgate_entry=ours.entry, X_Tenant="ours"
    )
    in_body = await client.tenant("sk-theirs").post(chat(namespace=namespace, user="ours"))

    assert (forged.cache, in_body.cache) == ("miss", "miss")


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
async def test_credentials_in_other_headers_set_tenants_apart(stage: Stage, header: str) -> None:
    """A key in another header than Authorization makes a tenant of its own."""
    client = await stage.gateway(await stage.mock())
    for key, expected in (("a", "miss"), ("b", "miss"), ("a", "hit"), ("b", "hit")):
        assert (await client.send("POST", "/v1/chat/completions", chat(), {header: key})).cache == expected
    assert (await client.post(chat())).cache == "miss"
