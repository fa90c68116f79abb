"""Limits and keys on a Redis that is full, restarted or a cluster."""

import asyncio
import time
from typing import Any

import redis.asyncio

from gateway.tenants.key_changes import KeyChanges, LimitChanges, NewKey
from gateway.tenants.key_registry import Team
from gateway.tenants.virtual_key import Limits
from tests.cache.valkey import Valkey
from tests.cache.valkey_cluster import running_cluster
from tests.gateway.tenants.conftest import Workers, caller, headers
from tests.gateway.tenants.test_limiter import admitted


async def configure(valkey: Valkey, **settings: Any) -> None:
    client = redis.asyncio.Redis.from_url(valkey.url)
    for name, value in settings.items():
        await client.config_set(name.replace("_", "-"), value)
    await client.aclose()


async def test_a_full_redis_leaves_each_worker_its_share(workers: Workers, own_valkey: Valkey) -> None:
    """A Redis that takes no writes counts as away, and limits are exact again when it does."""
    worker = await workers.start(own_valkey)
    alice = caller(requests_per_minute=20, tokens_per_minute=10**6)
    await configure(own_valkey, maxmemory_policy="noeviction", maxmemory=1)
    worker.limiter._workers = 4
    assert await admitted([worker.limiter.admit(alice, 1, 1, 0) for _ in range(30)]) == 5
    await configure(own_valkey, maxmemory=0)
    assert await admitted([worker.limiter.admit(alice, 1, 1, 0) for _ in range(30)]) == 20
    bob = caller("bob", tokens_per_minute=40)
    for memory, number in ((1, 5), (0, 1), (1, 0)):  # the outages of a minute have one share together
        await configure(own_valkey, maxmemory=memory)
        worker.limiter._workers = 4
        assert await admitted([worker.limiter.admit(bob, 1, 1, 0) for _ in range(1 if memory == 0 else 30)]) == number


async def test_scripts_are_sent_again_to_a_redis_that_lost_them(workers: Workers, own_valkey: Valkey) -> None:
    """After SCRIPT FLUSH, a restart or a failover nothing is refused."""
    worker = await workers.start(own_valkey)
    alice = caller(tokens_per_minute=1_000, budget_per_day=1.0)
    await worker.limiter.admit(alice, 1, 1, 0)
    client = redis.asyncio.Redis.from_url(own_valkey.url)
    await client.script_flush()
    await client.aclose()
    admission = await worker.limiter.admit(alice, 1, 1, 0)

    assert admission.headers["x-ratelimit-remaining-tokens"] == "996"


async def test_a_request_that_is_cancelled_keeps_no_slot(workers: Workers, own_valkey: Valkey) -> None:
    """A client that leaves while Redis is asked does not block the key."""
    worker = await workers.start(own_valkey)
    alice = caller(concurrent_requests=1)
    own_valkey.freeze()
    request = asyncio.create_task(worker.limiter.admit(alice, 1, 1, 0))
    await asyncio.sleep(0.01)
    request.cancel()
    await asyncio.wait([request])
    own_valkey.thaw()
    await worker.limiter.flush()

    assert await admitted([worker.limiter.admit(alice, 1, 1, 0)]) == 1


async def test_keys_and_limits_on_a_cluster(workers: Workers) -> None:
    """All that a script reads or writes is in one hash slot."""
    async with running_cluster(with_replicas=False) as cluster:
        worker = await workers.start(cluster)  # type: ignore[arg-type]  # it has a URL
        await worker.registry.set_team(Team(name="web", limits=Limits(requests_per_minute=50)))
        _, secret = await worker.registry.create(NewKey(name="alice", team="web", expires=time.time() + 100))
        changes = KeyChanges(limits=LimitChanges(concurrent_requests=30, budget_per_day=1.0, tokens_per_minute=10**6))
        await worker.registry.change("alice", changes)
        found = await worker.callers.identify(headers(Authorization=f"Bearer {secret}"))
        admissions = [await worker.limiter.admit(found, 1, 1, 0.001) for _ in range(30)]
        assert await admitted([worker.limiter.admit(found, 1, 1, 0.001)]) == 0
        for admission in admissions:
            admission.release()
        await worker.limiter.flush()
        assert await admitted([worker.limiter.admit(found, 1, 1, 0.001) for _ in range(60)]) == 20
