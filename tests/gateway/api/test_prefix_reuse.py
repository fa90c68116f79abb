"""The upstreams' reused prompt tokens, and the gateway's hints about keeping prompts."""

import asyncio
import functools
from typing import Any

import pytest

from gateway.upstreams.mock import Reply
from tests.gateway.client import CHAT, COMPLETIONS, Answer, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.wire import request_bytes, wire

shapes = pytest.mark.parametrize("stream", [False, True])
# Computes the answer again, so that the upstream gets the same prompt again.
AGAIN = {"Cache-Control": "no-cache"}
PROMPT = "four words are here"


def completion(prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": "mock", "prompt": prompt, **fields}


def prefix_tokens(answer: Answer) -> list[str]:
    return answer.headers.getall("x-keepgate-prefix-tokens", [])


# Reused tokens


@shapes
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat(PROMPT)), (COMPLETIONS, completion())])
async def test_prefix_tokens_of_the_upstream_reach_the_client(
    stage: Stage, path: str, body: dict[str, Any], stream: bool
) -> None:
    """The upstream's header with reused prompt tokens reaches the client of a miss, and no client of a hit."""
    client = await stage.gateway(await stage.prefix())
    asked = {**body, "stream": stream}
    first = await client.post(asked, path)
    second = await client.send("POST", path, asked, AGAIN)
    replays = [await client.post({**body, "stream": other}, path) for other in (stream, not stream, stream, stream)]

    assert (first.cache, prefix_tokens(first)) == ("miss", ["0"])
    assert (second.cache, prefix_tokens(second)) == ("bypass", ["3"])
    assert [(replay.cache, prefix_tokens(replay)) for replay in replays] == [("hit", [])] * 4


@shapes
async def test_cached_tokens_of_usage_come_through_untouched(stage: Stage, stream: bool) -> None:
    """The cached tokens in the usage are relayed unchanged, in the computed answer and in its replay."""
    client = await stage.gateway(await stage.prefix())
    wanted = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    await client.post(chat(PROMPT))
    computed = await client.send("POST", CHAT, chat(PROMPT, **wanted), AGAIN)
    replay = await client.post(chat(PROMPT, **wanted))

    assert computed.response["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert (replay.cache, replay.response["usage"]) == ("hit", computed.response["usage"])


@pytest.mark.parametrize("lead", [False, True])
async def test_followers_of_a_flight_get_its_prefix_tokens(stage: Stage, lead: bool) -> None:
    """Followers of a flight get its header with reused prompt tokens in either shape."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    await client.post(chat(PROMPT))
    await client.send("DELETE", "/v1/cache")
    upstream.hold.clear()
    collapsed = await client.figure("collapsed_requests_total")
    asking = [asyncio.create_task(client.post(chat(PROMPT, stream=lead)))]
    await upstream.wait_for(2)
    asking += [asyncio.create_task(client.post(chat(PROMPT, stream=stream))) for stream in (lead, not lead)]
    await client.until("collapsed_requests_total", collapsed + 2)
    upstream.hold.set()
    answers = await asyncio.gather(*asking)

    assert len(upstream.asked) == 2
    assert [prefix_tokens(answer) for answer in answers] == [["3"]] * 3


async def test_a_stale_answer_carries_no_prefix_tokens(stage: Stage) -> None:
    """A stale answer has no header with reused prompt tokens."""
    client = await stage.gateway(await stage.prefix(), cache={"ttl": 0, "stale_while_revalidate": 600})
    await client.post(chat(PROMPT))
    replay = await client.post(chat(PROMPT))

    assert (replay.cache, prefix_tokens(replay)) == ("hit", [])


async def test_an_entry_keeps_no_prefix_tokens(stage: Stage) -> None:
    """An entry does not have the reused prompt tokens of the request that made it."""
    client = await stage.gateway(await stage.prefix())
    computed = await client.post(chat(PROMPT))
    shown = await client.get(f"/v1/cache/entries/{computed.entry}")

    assert prefix_tokens(computed) == ["0"]
    assert b"prefix-tokens" not in shown.body


@shapes
async def test_saved_prefill_is_counted_by_upstream(stage: Stage, stream: bool) -> None:
    """Prompt tokens and reused ones are counted by upstream, for misses with the header only."""
    upstream, mute = await stage.prefix("told"), await stage.mock(models=("untold",))
    client = await stage.gateway(upstream, mute)
    await client.gateway.router.refresh()  # now it has the models of each upstream
    figures = functools.partial(saved_prefill, client, upstream.url)
    before, all_before = await figures(), (await client.get("/v1/cache/stats")).json["prefix"]
    for headers in ({}, AGAIN, {}):
        await client.send("POST", CHAT, chat(PROMPT, model="told", stream=stream), headers)
    await client.post(chat(PROMPT, model="untold", stream=stream))
    after, all_after = await figures(), (await client.get("/v1/cache/stats")).json["prefix"]

    assert [now - then for now, then in zip(after, before, strict=True)] == [8, 3]
    changed = {name: all_after[name] - all_before[name] for name in ("prompt_tokens", "prefix_tokens")}
    assert changed == {"prompt_tokens": 8, "prefix_tokens": 3}
    assert all_after["hit_rate"] == round(all_after["prefix_tokens"] / all_after["prompt_tokens"], 6)
    shown = all_after["upstreams"][upstream.url]
    assert shown == {
        "prompt_tokens": after[0],
        "prefix_tokens": after[1],
        "written_tokens": 0,
        "hit_rate": round(after[1] / after[0], 6),
    }
    assert all_after["upstreams"].get(mute.url) == all_before["upstreams"].get(mute.url)


async def saved_prefill(client: Client, url: str) -> tuple[float, float]:
    """Prompt tokens of an upstream, and the reused ones."""
    return (
        await client.figure("upstream_prompt_tokens_total", upstream=url),
        await client.figure("upstream_cached_prompt_tokens_total", upstream=url),
    )


@pytest.mark.parametrize("cached", [-1, 5, True, 2.0, "3", None, [], 2**70])
async def test_impossible_token_counts_are_not_counted(stage: Stage, cached: Any) -> None:
    """Impossible token counts of an upstream are relayed and left out of the figures."""
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    body = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}},
    }
    mock = await stage.mock(Reply(body=body))
    client = await stage.gateway(mock)
    before = await saved_prefill(client, mock.url)
    answer = await client.post(chat())

    assert (answer.status, answer.json) == (200, body)
    assert await saved_prefill(client, mock.url) == before


# Hints to the upstream


@shapes
@pytest.mark.parametrize(
    ("path", "body", "expected"), [(CHAT, chat(), "conversation"), (COMPLETIONS, completion(), "one-shot")]
)
async def test_the_endpoint_sets_the_hint_whether_a_prompt_comes_again(
    stage: Stage, path: str, body: dict[str, Any], expected: str, stream: bool
) -> None:
    """The upstream gets the hint that a chat is likely to be continued and a completion is not."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    assert (await client.post({**body, "stream": stream}, path)).status == 200

    assert upstream.asked[0].reuses == [expected]


@pytest.mark.parametrize("said", ["conversation", "one-shot"])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion())])
async def test_a_clients_hint_replaces_the_gateways(stage: Stage, path: str, body: dict[str, Any], said: str) -> None:
    """The upstream gets the client's value of the hint, once."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    answers = [await client.send("POST", path, body, {**AGAIN, "X-Keepgate-Reuse": said})]
    answers.append(
        await client.send("POST", path, body, {**AGAIN, "x-keepgate-reuse": said, "Connection": "x-keepgate-reuse"})
    )

    assert [answer.status for answer in answers] == [200, 200]
    assert [received.reuses for received in upstream.asked] == [[said], [said]]


@pytest.mark.parametrize("said", ["", "Conversation", "oneshot", "one-shot, conversation", "conversation;q=1", "é"])
async def test_an_unknown_hint_is_refused(stage: Stage, said: str) -> None:
    """An unknown value of the hint gives 400 with its name, without an upstream call."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    refused = await client.post(chat(), x_keepgate_reuse=said)

    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert refused.error["message"] == "'x-keepgate-reuse' must be conversation or one-shot, and stand there once."
    assert upstream.asked == []


async def test_a_repeated_hint_is_refused(stage: Stage) -> None:
    """Two values of the hint give 400."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    body = b'{"model":"mock","messages":[{"role":"user","content":"hi"}]}'
    async with wire(client) as connection:
        await connection.send(request_bytes(body, b"x-keepgate-reuse: conversation", b"X-Keepgate-Reuse: conversation"))
        refused = await connection.answer()

    assert refused.status == 400
    assert upstream.asked == []


async def test_the_hint_is_not_part_of_the_key(stage: Stage) -> None:
    """Requests that differ only in the hint share an answer."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream)
    answers = [await client.post(chat(), x_keepgate_reuse=said) for said in ("conversation", "one-shot")]
    answers.append(await client.post(chat()))

    assert [answer.cache for answer in answers] == ["miss", "hit", "hit"]
    assert len({answer.entry for answer in answers}) == 1


# Tenants

FORGED = ("red", "0123456789abcdef0123")


@pytest.mark.parametrize("namespace", ["authorization", "shared", "header:X-Team"])
@pytest.mark.parametrize(
    "hidden", [(), (b"Connection: x-keepgate-namespace",), (b"Connection: close, X-KEEPGATE-NAMESPACE",)]
)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings", b"/v1/models"])
async def test_a_client_does_not_choose_its_tenant_at_the_upstream(
    stage: Stage, namespace: str, hidden: tuple[bytes, ...], path: bytes
) -> None:
    """The upstream gets the gateway's namespace or none, whatever the client sends."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream, cache={"namespace": namespace})
    forged = [
        name + FORGED[n % 2].encode() for n, name in enumerate((b"x-keepgate-namespace: ", b"X-KeepGate-Namespace:"))
    ]
    body = b'{"model":"mock","messages":[{"role":"user","content":"hi"}]}'
    tenants: list[tuple[str, ...]] = []
    for team in (b"red", b"blue", b"blue"):
        request = request_bytes(body, b"X-Team: " + team, b"Cache-Control: no-cache", *forged, *hidden, path=path)
        if path == b"/v1/models":
            request = request.replace(b"POST", b"GET", 1).replace(b"Content-Length: %d" % len(body), b"X: 1")
            request = request.removesuffix(body)
        async with wire(client) as connection:
            await connection.send(request)
            assert (await connection.answer()).status == 200
        tenants.append(upstream.received[-1].tenant)

    if namespace == "header:X-Team" and path != b"/v1/models":
        red, blue, again = tenants
        assert len(red) == len(blue) == 1
        assert len({red, blue}) == 2
        assert blue == again
        assert not any(name in tenant for name in FORGED for tenant in (*red, *blue))
    else:
        assert tenants == [()] * 3


async def test_tenants_share_no_prefixes(stage: Stage) -> None:
    """A prompt is new to the upstream for each tenant, and reused for the same one."""
    upstream = await stage.prefix()
    client = await stage.gateway(upstream, cache={"namespace": "header:X-Team"})
    for team in ("red", "blue"):
        first = await client.send("POST", CHAT, chat(PROMPT), {"X-Team": team})
        assert prefix_tokens(first) == ["0"]
    of_red = upstream.asked[0].headers["x-keepgate-namespace"]
    forging = {"X-Team": "green", "x-keepgate-namespace": of_red, **AGAIN}
    assert prefix_tokens(await client.send("POST", CHAT, chat(PROMPT), forging)) == ["0"]
    assert prefix_tokens(await client.send("POST", CHAT, chat(PROMPT), {"X-Team": "red", **AGAIN})) == ["3"]
