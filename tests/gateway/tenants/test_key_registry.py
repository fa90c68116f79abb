"""Changes of keys that meet each other, or whose replies are lost."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from cache.stores.redis_store import RedisStore
from gateway.errors import InvalidRequest
from gateway.tenants.key_changes import KeyChanges, LimitChanges, NewKey, Rotation
from gateway.tenants.key_registry import KeyRegistry
from gateway.tenants.virtual_key import Limits
from tests.cache.valkey import Valkey
from tests.gateway.tenants.conftest import Workers


class RepeatingStore(RedisStore):
    """Sends each command twice, as a store does whose connection broke before the first reply came."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def command(self, command: Any, deadline: float | None = None) -> Any:
        await self._store.command(command, deadline)
        return await self._store.command(command, deadline)


async def test_changes_at_the_same_time_all_hold(workers: Workers, valkey: Valkey) -> None:
    """No change undoes another."""
    registries = [(await workers.start(valkey)).registry for _ in range(3)]
    await registries[0].create(NewKey(name="alice"))
    changes = (
        LimitChanges(requests_per_minute=1),
        LimitChanges(tokens_per_minute=2),
        LimitChanges(concurrent_requests=3),
    )
    await asyncio.gather(
        *(
            registry.change("alice", KeyChanges(limits=change))
            for registry, change in zip(registries, changes, strict=True)
        )
    )

    expected = Limits(requests_per_minute=1, tokens_per_minute=2, concurrent_requests=3)
    assert (await registries[0].get("alice")).limits == expected


async def test_one_of_many_gets_a_name(workers: Workers, valkey: Valkey) -> None:
    """Keys that are made at the same time do not share a name."""
    registries = [(await workers.start(valkey)).registry for _ in range(3)]
    made = await asyncio.gather(
        *(registry.create(NewKey(name="alice")) for registry in registries), return_exceptions=True
    )
    assert sum(isinstance(each, InvalidRequest) for each in made) == 2
    assert len(await registries[0].keys()) == 1


async def test_a_change_that_is_sent_twice_is_made_once(workers: Workers, valkey: Valkey) -> None:
    """The secrets that are returned are those that hold, and revoking is no error."""
    store = (await workers.start(valkey)).redis
    registry = KeyRegistry(RepeatingStore(store))
    key, first = await registry.create(NewKey(name="alice"))
    _, second = await registry.rotate("alice", Rotation(grace=60))
    former = await registry.find_by_secret(first)
    assert former is not None
    assert former.expires == pytest.approx(time.time() + 60, abs=30)
    assert msgspec.structs.replace(former, expires=None) == await registry.find_by_secret(second) == key
    assert (await registry.change("alice", KeyChanges(priority=4))).priority == 4
    assert (await registry.revoke("alice")).revoked
    assert await registry.find_by_secret(second) is None
    with pytest.raises(InvalidRequest, match="revoked"):
        await registry.revoke(key.id)
