"""Redis frozen, away, flushed, failed over or full: a match ends in time, and the index recovers."""

import asyncio
import statistics
import time
from pathlib import Path

import pytest
import redis.asyncio

from prefix_store.index.index import RedisIndex, open_index
from prefix_store.index.layout import key_names
from prefix_store.index.match import NO_MATCH
from prefix_store.index.owner import TierKind
from prefix_store.index.writes import _MAX_BLOCKS
from tests.cache.entries.entry_examples import until
from tests.cache.valkey import Valkey
from tests.prefix_store.index.blocks import PATIENT, Shelf, chain, new_namespace, owner

DEADLINE = 0.3


async def seconds_of(index: RedisIndex, keys: list[bytes], count: int = 1) -> float:
    """Seconds for `count` matches that find nothing."""
    begun = time.monotonic()
    found = await asyncio.gather(*(index.match(keys) for _ in range(count)))
    assert found == [NO_MATCH] * count
    return time.monotonic() - begun


async def until_matched(index: RedisIndex, keys: list[bytes], blocks: int) -> None:
    async def is_matched() -> bool:
        return (await index.match(keys)).blocks == blocks

    await until(is_matched, within=15)


async def test_a_frozen_redis_costs_one_deadline_once(own_valkey: Valkey) -> None:
    """Calls in flight wait for one deadline, later ones do not wait; then everything is found again."""
    namespace = new_namespace()
    keys = chain(namespace, 300)
    async with open_index(own_valkey.url, namespace, deadline=DEADLINE, heartbeat=0.05, lifetime=60) as index:
        held = await owner(index, "a", *keys[:200])
        await index.next_heartbeat()
        await until_matched(index, keys, 200)
        own_valkey.freeze()
        assert await seconds_of(index, keys, 100) < DEADLINE * 3
        assert statistics.median([await seconds_of(index, keys) for _ in range(200)]) < DEADLINE / 20
        assert index.connection.times_unavailable == 1
        begun = time.monotonic()
        held.publish(keys[200:])
        held.forget([keys[299]])
        assert time.monotonic() - begun < DEADLINE
        own_valkey.thaw()
        await until_matched(index, keys, 299)
        assert index.dropped == 0


async def test_a_redis_that_never_was_is_nothing_known(folder: Path) -> None:
    """Calls do not fail or wait; writes are not queued, since the inventory is claimed later."""
    async with open_index(f"unix://{folder}/nobody", new_namespace(), deadline=DEADLINE) as index:
        keys = chain(new_namespace(), 300)
        held = index.own("a", TierKind.MEMORY, Shelf(*keys).inventory)
        await seconds_of(index, keys)
        assert statistics.median([await seconds_of(index, keys) for _ in range(50)]) < DEADLINE / 20
        held.publish(keys)
        held.forget(keys[::-1])
        await index.flush()
        assert index.failed_matches == 51


async def test_a_redis_that_comes_late_learns_everything(late_valkey: Valkey) -> None:
    """The present inventory is claimed when Redis is available."""
    namespace = new_namespace()
    keys = chain(namespace, 600)
    shelf = Shelf(*keys)
    async with open_index(late_valkey.url, namespace, deadline=DEADLINE, heartbeat=0.05) as index:
        index.own("a", TierKind.MEMORY, shelf.inventory)
        await seconds_of(index, keys)
        shelf.keys = keys[:500]
        await late_valkey.start()
        await until_matched(index, keys, 500)


async def test_a_flushed_redis_learns_everything_again(own_valkey: Valkey) -> None:
    """Blocks, owners and scripts are back after a heartbeat, and no call fails meanwhile."""
    namespace = new_namespace()
    keys = chain(namespace, 300)
    async with open_index(own_valkey.url, namespace, deadline=PATIENT, heartbeat=0.05) as index:
        shelf = Shelf(*keys)
        held = index.own("a", TierKind.MEMORY, shelf.inventory)
        await until_matched(index, keys, 300)
        before = held.epoch
        raw = redis.asyncio.Redis.from_url(own_valkey.url)
        await raw.flushall()
        await raw.script_flush()
        await raw.aclose()
        await until_matched(index, keys, 300)
        assert held.epoch is not None
        assert before is not None
        assert held.epoch > before
        assert index.failed_matches == 0
        assert index.connection.times_unavailable == 0


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_key_that_redis_evicted_is_made_good(own_valkey: Valkey, lost: int) -> None:
    """Lost live owners or epochs are restored, too, with blocks published meanwhile."""
    namespace = new_namespace()
    keys = chain(namespace, 40)
    shelf = Shelf(*keys[:20])
    raw = redis.asyncio.Redis.from_url(own_valkey.url)
    async with open_index(own_valkey.url, namespace, deadline=PATIENT, heartbeat=0.2) as index:
        held = index.own("a", TierKind.MEMORY, shelf.inventory)
        await until_matched(index, keys, 20)
        await raw.delete(key_names(namespace)[lost])
        shelf.keys += keys[20:]
        held.publish(keys[20:])
        await until_matched(index, keys, 40)
    await raw.aclose()


async def test_a_restarted_redis_without_its_data_learns_everything_again(late_valkey: Valkey) -> None:
    """This is a crash of a server without persistence."""
    await late_valkey.start("--appendonly", "no")
    namespace = new_namespace()
    keys = chain(namespace, 300)
    async with open_index(late_valkey.url, namespace, deadline=PATIENT, heartbeat=0.05) as index:
        index.own("a", TierKind.MEMORY, Shelf(*keys).inventory)
        await until_matched(index, keys, 300)
        await late_valkey.kill()
        await seconds_of(index, keys)
        await late_valkey.start()
        await until_matched(index, keys, 300)


async def test_a_server_that_has_become_a_replica_is_left_alone(own_valkey: Valkey) -> None:
    """A replica refuses writes: matches are empty until the new master is found."""
    namespace = new_namespace()
    keys = chain(namespace, 50)
    raw = redis.asyncio.Redis.from_url(own_valkey.url)
    async with open_index(own_valkey.url, namespace, deadline=PATIENT, heartbeat=0.05, lifetime=60) as index:
        await owner(index, "a", *keys)
        await index.next_heartbeat()
        await raw.replicaof("127.0.0.1", 1)
        async with asyncio.timeout(10):
            await index.connection.wait_unavailable()
        assert await index.match(keys) == NO_MATCH
        await raw.replicaof("NO", "ONE")
        await until_matched(index, keys, 50)
    await raw.aclose()


async def test_a_full_redis_loses_claims_and_nothing_else(own_valkey: Valkey) -> None:
    """Refused writes are counted; existing claims are found."""
    namespace = new_namespace()
    keys = chain(namespace, 50)
    raw = redis.asyncio.Redis.from_url(own_valkey.url)
    async with open_index(own_valkey.url, namespace, deadline=PATIENT, heartbeat=60, lifetime=120) as index:
        held = await owner(index, "a", *keys[:20])
        await index.next_heartbeat()
        await raw.config_set("maxmemory-policy", "noeviction")
        await raw.config_set("maxmemory", 1)
        held.publish(keys)
        await index.flush()
        assert index.dropped == 50
        assert (await index.match(keys)).blocks == 20
        assert index.connection.is_available
        await raw.config_set("maxmemory", 0)
        held.publish(keys)
        await index.flush()
        assert (await index.match(keys)).blocks == 50
    await raw.aclose()


async def test_what_waits_is_bounded_and_what_is_lost_is_made_good(own_valkey: Valkey) -> None:
    """An owner whose writes were lost takes a new epoch, and claims its inventory."""
    namespace = new_namespace()
    keys = chain(namespace, 400)
    shelf = Shelf(*keys)
    async with open_index(own_valkey.url, namespace, deadline=DEADLINE, heartbeat=0.05, lifetime=60) as index:
        held = index.own("a", TierKind.MEMORY, shelf.inventory)
        await until_matched(index, keys, 400)
        before = held.epoch
        own_valkey.freeze()
        await seconds_of(index, keys)
        del shelf.keys[100:]
        held.forget(keys[:99:-1])
        for _ in range(_MAX_BLOCKS // 400 + 1):
            held.touch(keys)
        assert index.dropped > _MAX_BLOCKS
        own_valkey.thaw()
        await until_matched(index, keys, 100)
        assert held.epoch != before


async def test_a_refused_password_is_an_outage(late_valkey: Valkey) -> None:
    """Matches are empty during the outage."""
    await late_valkey.start("--requirepass", "secret")
    async with open_index(late_valkey.url, new_namespace(), deadline=PATIENT) as index:
        assert await index.match(chain(new_namespace(), 3)) == NO_MATCH
        assert not index.connection.is_available


async def test_replies_that_come_too_late_are_nobodys(own_valkey: Valkey) -> None:
    """Replies to calls before a freeze are not used for later calls."""
    namespace = new_namespace()
    keys = chain(namespace, 64)
    async with open_index(own_valkey.url, namespace, deadline=DEADLINE, heartbeat=0.05, lifetime=60) as index:
        await owner(index, "a", *keys)
        await index.next_heartbeat()
        for _ in range(3):
            own_valkey.freeze()
            await asyncio.gather(*(index.match(keys[:number]) for number in range(1, 40)))
            own_valkey.thaw()
            await index.next_heartbeat()
            found = await asyncio.gather(*(index.match(keys[:number]) for number in range(1, 65)))
            assert [match.blocks for match in found] == list(range(1, 65))


async def test_a_name_that_two_processes_have_is_reported(own_valkey: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    """The older one stops announcing itself, so that they do not replace each other forever."""
    namespace = new_namespace()
    async with (
        open_index(own_valkey.url, namespace, deadline=PATIENT, heartbeat=0.05) as one,
        open_index(own_valkey.url, namespace, deadline=PATIENT, heartbeat=0.05) as two,
    ):
        older = await owner(one, "engine")
        newer = await owner(two, "engine")
        await one.next_heartbeat()
        assert older.epoch is None
        epoch = newer.epoch
        await one.next_heartbeat()
        await two.next_heartbeat()
        assert newer.epoch == epoch is not None
        assert "give each engine a name of its own" in caplog.text


async def test_connections_that_redis_has_ended_are_no_outage(own_valkey: Valkey) -> None:
    """The index stays available if the server closes idle connections, or all of them."""
    namespace = new_namespace()
    keys = chain(namespace, 64)
    raw = redis.asyncio.Redis.from_url(own_valkey.url)
    async with open_index(own_valkey.url, namespace, deadline=PATIENT, heartbeat=60, lifetime=120) as index:
        await owner(index, "a", *keys)
        await index.next_heartbeat()
        for _ in range(5):
            await asyncio.gather(*(index.match(keys) for _ in range(8)))
            await raw.client_kill_filter(_type="normal", skipme=True)
            found = await asyncio.gather(*(index.match(keys) for _ in range(8)))
            assert [match.blocks for match in found] == [64] * 8
        assert index.connection.times_unavailable == 0
    await raw.aclose()


async def test_connections_that_broke_are_no_outage(own_valkey: Valkey) -> None:
    """An idle connection that was reset is replaced like a closed one."""
    namespace = new_namespace()
    keys = chain(namespace, 64)
    async with open_index(own_valkey.url, namespace, deadline=PATIENT, heartbeat=60, lifetime=120) as index:
        await owner(index, "a", *keys)
        await index.next_heartbeat()
        for turns in range(3):
            await asyncio.gather(*(index.match(keys) for _ in range(8)))
            for connection in index.connection._node._client.connection_pool._available_connections:
                assert connection._writer
                connection._writer.transport.abort()
            for _ in range(turns):  # the transport reports its end in a later turn of the loop
                await asyncio.sleep(0)
            found = [await index.match(keys) for _ in range(8)]
            assert [match.blocks for match in found] == [64] * 8
        assert index.connection.times_unavailable == 0


async def test_a_redis_that_lets_nobody_run_scripts_is_named(
    own_valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis is available then; the reason is logged once."""
    raw = redis.asyncio.Redis.from_url(own_valkey.url)
    await raw.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")  # type: ignore[no-untyped-call]
    async with open_index(own_valkey.url, new_namespace(), deadline=PATIENT, heartbeat=0.02, lifetime=60) as index:
        index.own("a", TierKind.MEMORY, Shelf().inventory)
        for _ in range(20):
            assert await index.match([bytes(16)]) == NO_MATCH
        await asyncio.sleep(0.5)  # several heartbeats
        assert index.connection.is_available
    await raw.aclose()
    complaints = [record for record in caplog.records if "permissions" in record.message.lower()]
    assert len(complaints) == 1


async def test_a_shutdown_does_not_wait_for_a_frozen_redis(own_valkey: Valkey) -> None:
    """It waits for a few background deadlines at most, also if the freeze was not noticed yet."""
    namespace = new_namespace()
    keys = chain(namespace, 300)
    async with asyncio.timeout(15):
        async with open_index(own_valkey.url, namespace, deadline=PATIENT, heartbeat=60, lifetime=120) as index:
            held = await owner(index, "a", *keys)
            own_valkey.freeze()
            held.touch(keys)
    assert held.epoch is None
