"""Strategies that are set while gateways run, in a real Redis that several share."""

from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from cache.stores.redis_store import RedisStore, open_redis_store
from gateway.errors import CacheUnavailable, InvalidRequest
from gateway.http.background_tasks import background_tasks
from gateway.routing.overrides import StrategyOverrides
from gateway.routing.table import RoutingTable
from gateway.settings.settings import Settings
from gateway.settings.upstreams import RoutingSettings
from tests.cache.valkey import Valkey
from tests.waiting import until

KEY = "keepgate:strategies"


def table(**routing: Any) -> RoutingTable:
    return RoutingTable(Settings(routing=msgspec.convert(routing, RoutingSettings)))


async def redis_of(stack: AsyncExitStack, valkey: Valkey) -> RedisStore:
    return await stack.enter_async_context(open_redis_store(valkey.url, 2.0))


async def test_a_switch_reaches_all_and_lasts(valkey: Valkey) -> None:
    """Also a gateway that starts later; one whose settings say another strategy for the model keeps to them."""
    async with AsyncExitStack() as stack, background_tasks() as tasks:
        redis = await redis_of(stack, valkey)
        here, there, otherwise = table(), table(), table(models={"org/m": {"strategy": "weighted"}})
        for follower in (there, otherwise):
            tasks.keep(StrategyOverrides(follower, await redis_of(stack, valkey)).follow)
        overrides = StrategyOverrides(here, redis)
        await overrides.set("n", "prefix-aware")
        await overrides.set("org/m", "round-robin")
        assert here.name_of("org/m") == "round-robin"
        await until(lambda: there.name_of("org/m") == "round-robin" and otherwise.name_of("n") == "prefix-aware")
        assert (otherwise.name_of("org/m"), otherwise.source_of("org/m")) == ("weighted", "settings")

        later = table()
        await StrategyOverrides(later, redis).read()
        assert list(later.strategies()) == [("n", "prefix-aware"), ("org/m", "round-robin")]
        await overrides.remove("org/m")
        await until(lambda: there.source_of("org/m") == "settings")
        assert there.name_of("n") == "prefix-aware"


async def test_switches_of_other_versions_do_no_harm(valkey: Valkey, raw: Any) -> None:
    """A strategy that this version does not have is left alone, and the others count."""
    async with AsyncExitStack() as stack:
        here = table()
        overrides = StrategyOverrides(here, await redis_of(stack, valkey))
        await raw.hset(KEY, mapping={"version": "1", "model:a": b'{"strategy":"psychic","instead_of":"x"}', "b": "?"})
        await overrides.set("m", "round-robin")
        assert list(here.strategies()) == [("m", "round-robin")]
        with pytest.raises(InvalidRequest):
            await overrides.set("m", "psychic")


async def test_without_redis_nothing_is_switched(own_valkey: Valkey) -> None:
    """The operator hears of it, and what is known stays."""
    async with AsyncExitStack() as stack:
        here = table()
        overrides = StrategyOverrides(here, await redis_of(stack, own_valkey))
        await overrides.set("m", "round-robin")
        await own_valkey.kill()
        with pytest.raises(CacheUnavailable, match="set while running"):
            await overrides.set("m", "weighted")
        with pytest.raises(CacheUnavailable):
            await overrides.remove("m")
        assert here.name_of("m") == "round-robin"
