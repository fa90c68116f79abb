"""The operator's view of routing."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import msgspec
import pytest
from aiohttp import web

from gateway.api.app_keys import OVERRIDES, ROUTER, ROUTING, SETTINGS, VIEWS
from gateway.api.operator.routing import describe, override, reset
from gateway.http.middleware import answering_errors
from gateway.routing.overrides import StrategyOverrides
from gateway.routing.prefixes.kv_events import EngineBlocks
from gateway.routing.prefixes.views import PrefixViews
from gateway.routing.router import Router
from gateway.routing.table import RoutingTable
from gateway.settings.fields import Secret
from gateway.settings.settings import Settings
from gateway.settings.upstreams import ModelSettings, RoutingSettings, UpstreamSettings
from gateway.surfaces.registry import error_response, form_of
from gateway.telemetry.audit import AUDIT, AuditLog
from gateway.upstreams.connection import open_connections
from gateway.upstreams.upstream import Upstream
from tests.gateway.routing.prefixes.engine import stored

KEY = {"x-keepgate-admin-key": "operator"}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server with these two routes alone, and an upstream that nobody has asked yet."""
    servers = (UpstreamSettings(url="http://127.0.0.1:1/v1", name="one"),)
    models = {"chat": ModelSettings(strategy="round-robin", upstreams=("one",), fallbacks=("spare",))}
    settings = Settings(upstreams=servers, routing=RoutingSettings(models=models), admin_key=Secret("operator"))
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_connections(1.0))
        application = web.Application(
            middlewares=[answering_errors(lambda request, error: error_response(form_of(request.path), error))]
        )
        application[SETTINGS] = settings
        application[AUDIT] = AuditLog(settings)
        table = application[ROUTING] = RoutingTable(settings)
        application[OVERRIDES] = StrategyOverrides(table, None)
        blocks = EngineBlocks()
        blocks.apply(msgspec.msgpack.encode([1.0, [stored([1, 2, 3, 4])]]))
        application[VIEWS] = PrefixViews({"one": blocks})
        application[ROUTER] = Router(Upstream(servers[0].url, pool, settings.timeouts, settings=servers[0]))
        one = "/v1/routing/{model:.+}"
        application.add_routes([web.get("/v1/routing", describe), web.put(one, override), web.delete(one, reset)])
        runner = web.AppRunner(application)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/routing"


async def test_a_strategy_is_switched_and_shown(url: str) -> None:
    """A model's name may have a slash; what was switched is shown with what the settings say."""
    async with aiohttp.ClientSession(headers=KEY) as session:
        async with session.put(f"{url}/org/model", json={"strategy": "prefix-aware"}) as switched:
            assert await switched.json() == {"model": "org/model", "strategy": "prefix-aware", "source": "api"}
        async with session.get(url) as shown:
            told = await shown.json()
    assert told["models"] == {
        "chat": {"strategy": "round-robin", "source": "settings", "upstreams": ["one"]},
        "org/model": {"strategy": "prefix-aware", "source": "api", "upstreams": []},
    }
    assert told["unlisted_models"] == ["spare"]
    assert [(upstream["name"], upstream["kv_blocks"]) for upstream in told["upstreams"]] == [("one", 2)]


async def test_a_switch_is_undone(url: str) -> None:
    """The settings say the strategy again; undoing it twice is no error."""
    async with aiohttp.ClientSession(headers=KEY) as session:
        async with session.put(f"{url}/chat", json={"strategy": "weighted"}) as switched:
            assert (await switched.json())["source"] == "api"
        for _ in range(2):
            async with session.delete(f"{url}/chat") as undone:
                assert undone.status == 200
                assert await undone.json() == {"model": "chat", "strategy": "round-robin", "source": "settings"}


@pytest.mark.parametrize("body", [{}, {"strategy": 1}, {"strategy": "best"}, {"strategy": "weighted", "x": 1}])
async def test_a_strategy_that_there_is_not_is_refused(url: str, body: dict[str, object]) -> None:
    """With the list of those there are."""
    async with aiohttp.ClientSession(headers=KEY) as session, session.put(f"{url}/m", json=body) as refused:
        assert refused.status == 400
        error = (await refused.json())["error"]
    assert error["param"] == "strategy"
    assert "prefix-aware" in error["message"]


async def test_only_the_operator_may(url: str) -> None:
    """Without the admin key neither is answered."""
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as refused:
            assert refused.status == 401
        async with session.put(f"{url}/m", json={"strategy": "weighted"}) as refused:
            assert refused.status == 401
        async with session.delete(f"{url}/m") as refused:
            assert refused.status == 401
