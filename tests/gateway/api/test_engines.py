"""GET /v1/engines: what the upstreams that are Keepgate's engine do, and one clear entry for each that is not."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gateway.settings.limits import KeySettings
from gateway.settings.upstreams import UpstreamSettings
from tests.cache.valkey import Valkey
from tests.gateway.conftest import Stage
from tests.waiting import until

KEY = "the-admin-key"
STATUS: dict[str, Any] = {
    "object": "keepgate.engine",
    "model": "tiny",
    "runner": "fused",
    "alive": True,
    "batch": {"running": 3, "waiting": 2, "max_batch": 8, "fill": 0.375, "padding": 0.0},
    "kv_blocks": {"total": 100, "held": 40, "cached": 7, "tokens_per_block": 16, "bytes_per_block": 4096},
    "tokens": {"prompt": 900, "generated": 300, "prefill_per_second": 90.0, "decode_per_second": 30},
    "prefix_cache": {"tokens_asked": 1200, "tokens_found": 300},
    "preemptions": 0,
    "drafts": {"prompt-lookup": {"drafts": 4, "proposed_tokens": 20, "accepted_tokens": 15, "speedup": 1.5}},
    "prefix_store": {
        "namespace": "ab12",
        "tiers": {
            "device": {"blocks": 47, "capacity_blocks": 100, "tokens_saved": 200},
            "memory": {"codec": "plain", "blocks": 5, "bytes": 320, "capacity_bytes": 640, "tokens_saved": 100}
            | {"hits": 6, "misses": 2, "writes": 9, "evictions": 1, "bytes_read": 640, "gigabytes_per_second": None},
            "mooncake": {"blocks": None, "bytes": None, "tokens_saved": 0, "hits": 0, "misses": 3},
        },
        "index": {"well": False, "owners": []},
    },
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[UpstreamSettings]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts upstreams that answer GET /engine by a handler, and have a model."""
    async with AsyncExitStack() as stack:

        async def start(handler: Handler) -> UpstreamSettings:
            application = web.Application()
            application.router.add_get("/engine", handler)
            application.router.add_get("/v1/models", _models)
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            return UpstreamSettings(url=f"http://127.0.0.1:{port}/v1", name=f"{handler.__name__}-{port}")

        yield start


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "tiny"}]})


def answering(body: bytes, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="application/json")

    return handler


async def test_each_engine_is_asked_and_each_other_upstream_named(stage: Stage, serve: Serve) -> None:
    """An engine's figures are shown without what is its own; another server, one that is gone and one that fails are
    told apart.
    """
    gone = UpstreamSettings(url="http://127.0.0.1:9/v1", name="gone")
    client = await stage.gateway(
        await serve(answering(msgspec.json.encode(STATUS))),
        await stage.mock(),
        gone,
        await serve(answering(b"{}", status=503)),
        admin_key=KEY,
    )
    answer = await client.get("/v1/engines", x_keepgate_admin_key=KEY)

    assert answer.status == 200
    engine, other, away, failing = answer.json["data"]
    assert engine["state"] == "engine"
    shown = engine["engine"]
    assert shown["batch"] == STATUS["batch"]
    assert shown["drafts"] == STATUS["drafts"]
    assert shown["prefix_store"]["tiers"] == STATUS["prefix_store"]["tiers"]
    assert shown["prefix_store"]["index"] == {"well": False}
    assert "namespace" not in shown["prefix_store"]
    assert (other["state"], "engine" in other) == ("other", False)
    assert "is not Keepgate's engine" in other["reason"]
    assert (away["upstream"], away["state"]) == ("gone", "away")
    assert "gone cannot be reached" in away["reason"]
    assert (failing["state"], failing["reason"][-11:]) == ("away", "status 503.")


@pytest.mark.parametrize(
    ("body", "state", "reason"),
    [
        (b"{}", "other", "is not Keepgate's engine"),
        (b"<html>", "other", "is not Keepgate's engine"),
        (b"[" * 100_000, "other", "is not Keepgate's engine"),
        (b"\xff\xfe", "other", "is not Keepgate's engine"),
        (b'{"object": "keepgate.engine"}', "other", "another version; update it or the gateway"),
        (msgspec.json.encode({**STATUS, "batch": None}), "other", "$.batch"),
        (b" " * (2**20 + 1), "away", "more than 1048576 bytes"),
    ],
)
async def test_a_body_that_is_none_of_an_engine(
    stage: Stage, serve: Serve, body: bytes, state: str, reason: str
) -> None:
    """Whatever an upstream says, the list is answered, and says what is wrong with it."""
    client = await stage.gateway(await serve(answering(body)), admin_key=KEY)
    (found,) = (await client.get("/v1/engines", x_keepgate_admin_key=KEY)).json["data"]
    assert found["state"] == state
    assert reason in found["reason"]


async def test_an_upstream_that_hangs_holds_up_nobody(stage: Stage, serve: Serve) -> None:
    """All are asked at once, and one that does not answer costs one deadline."""

    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    client = await stage.gateway(
        await serve(hang), await serve(hang), await serve(answering(msgspec.json.encode(STATUS))), admin_key=KEY
    )
    began = time.monotonic()
    answer = await client.get("/v1/engines", x_keepgate_admin_key=KEY)
    assert time.monotonic() - began < 3.9, "one after the other would take at least two deadlines"
    assert [each["state"] for each in answer.json["data"]] == ["away", "away", "engine"]
    assert "did not answer GET /engine in 2 s" in answer.json["data"][0]["reason"]


async def test_what_is_no_engine_is_asked_once(stage: Stage, serve: Serve) -> None:
    """A provider's API is not asked at each look; an engine that failed is."""
    asked: list[str] = []

    async def provider(request: web.Request) -> web.Response:
        asked.append("provider")
        raise web.HTTPUnauthorized

    async def loading(request: web.Request) -> web.Response:
        asked.append("loading")
        raise web.HTTPServiceUnavailable

    client = await stage.gateway(await serve(provider), await serve(loading), admin_key=KEY)
    upstreams = client.gateway.router.upstreams
    # The first health check clears what is known of an upstream: it may be another one than before.
    await until(lambda: all(upstream.probed for upstream in upstreams))
    asked.clear()
    for _ in range(3):
        answer = await client.get("/v1/engines", x_keepgate_admin_key=KEY)
        assert [each["state"] for each in answer.json["data"]] == ["other", "away"]
    assert (asked.count("provider"), asked.count("loading")) == (1, 3)


async def test_upstreams_get_nothing_of_the_request(stage: Stage, serve: Serve) -> None:
    """Neither the admin key nor a cookie reaches an upstream, whose own credential does."""
    seen: list[dict[str, str]] = []

    async def note(request: web.Request) -> web.Response:
        seen.append(dict(request.headers))
        return web.json_response(STATUS)

    upstream = await serve(note)
    client = await stage.gateway(upstream, admin_key=KEY)
    await client.get("/v1/engines", authorization=f"Bearer {KEY}", cookie="session=1", x_keepgate_admin_key=KEY)
    assert [name.lower() for name in seen[0]] == ["host"]


async def test_only_the_operator_sees_engines(stage: Stage) -> None:
    """A tenant is refused, also below the path; an unknown parameter is named."""
    client = await stage.gateway(await stage.mock(), admin_key=KEY)
    assert (await client.get("/v1/engines")).status == 401
    wrong = await client.get("/v1/engines?model=tiny", x_keepgate_admin_key=KEY)
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "model")


@pytest.mark.parametrize("path", ["budgets", "costs", "engines", "requests", "routing"])
async def test_a_path_below_an_operators_route_needs_a_key(stage: Stage, valkey: Valkey, path: str) -> None:
    """Where keys are required, one without a key is refused there as anywhere else under /v1."""
    client = await stage.gateway(await stage.mock(), admin_key=KEY, redis=valkey.url, keys=KeySettings(required=True))
    answer = await client.get(f"/v1/{path}/some/where")
    assert (answer.status, answer.json["error"]["code"]) == (401, "key_required")
