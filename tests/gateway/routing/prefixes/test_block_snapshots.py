"""What a worker that starts later knows of blocks that the engine no longer replays."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq.asyncio

from cache.stores.redis_store import RedisStore, open_redis_store
from gateway.http.background_tasks import background_tasks
from gateway.routing.prefixes.block_snapshots import BlockSnapshots
from gateway.routing.prefixes.event_sources import configured_source
from gateway.routing.prefixes.kv_events import EngineBlocks
from gateway.routing.prefixes.kv_subscription import Subscription
from tests.cache.valkey import Valkey
from tests.gateway.routing.prefixes.engine import Publisher, removed, stored
from tests.waiting import until

TOKENS = [11, 12, 13, 14]


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    with zmq.asyncio.Context() as context:
        async with Publisher(context).serving() as publisher:
            yield publisher


@asynccontextmanager
async def following(publisher: Publisher, store: RedisStore) -> AsyncIterator[EngineBlocks]:
    """The blocks that a worker knows, which shares snapshots by Redis."""
    subscription = Subscription(configured_source(publisher.address), BlockSnapshots(store))
    async with background_tasks() as tasks:
        tasks.start(subscription.follow())
        yield subscription.blocks


@pytest.fixture
async def snapshot(publisher: Publisher, valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisStore]:
    """A store with a worker's snapshot of an engine that holds TOKENS, and has published three messages."""
    monkeypatch.setattr("gateway.routing.prefixes.block_snapshots._INTERVAL", 0.02)
    async with open_redis_store(valkey.url, 2.0) as store:
        await publisher.publish(stored(TOKENS))
        await publisher.publish(stored([1, 2]))
        await publisher.publish(removed([1, 2]))
        async with following(publisher, store):
            snapshots = BlockSnapshots(store)

            async def is_written() -> bool:
                found = await snapshots.load(publisher.address)
                return found is not None and found.last.number == 2

            await until(is_written)
        yield store


async def test_a_late_worker_knows_what_is_replayed_no_longer(publisher: Publisher, snapshot: RedisStore) -> None:
    """From the snapshot; what has happened since comes from the replay, before the engine's next event."""
    del publisher.log[:2]
    await publisher.publish(stored([5, 6]))
    async with following(publisher, snapshot) as blocks:
        await until(lambda: blocks.leading([5, 6]) == 2)
        assert (blocks.leading(TOKENS), blocks.leading([1, 2]), blocks.is_whole) == (4, 0, True)
        await publisher.wait_for_subscriber()
        await publisher.publish(removed(TOKENS[:2]))
        await until(lambda: blocks.leading(TOKENS) == 0)


@pytest.mark.parametrize("count", [1, 5])
async def test_a_snapshot_of_another_engine_is_not_believed(
    publisher: Publisher, snapshot: RedisStore, count: int
) -> None:
    """It has started again at the same address, and has published less or more than the snapshot knows."""
    publisher.log.clear()
    publisher.number = 0
    for number in range(count):
        await publisher.publish(stored([20 + number, 21]))
    async with following(publisher, snapshot) as blocks:
        await until(lambda: len(blocks) == count and blocks.leading([20, 21]) == 2)
        assert (blocks.leading(TOKENS), blocks.is_whole) == (0, True)


async def test_a_snapshot_whose_end_is_replayed_no_longer_is_not_believed(
    publisher: Publisher, snapshot: RedisStore
) -> None:
    """What has changed since then is unknown."""
    for tokens in ([5, 6], [7, 8]):
        await publisher.publish(stored(tokens))
    del publisher.log[:-1]
    async with following(publisher, snapshot) as blocks:
        await until(lambda: blocks.leading([7, 8]) == 2)
        assert (blocks.leading(TOKENS), blocks.is_whole) == (0, False)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", msgspec.msgpack.encode([[5, 5], [True, [2], []], [b"\xc1"]])])
async def test_what_is_no_snapshot_is_ignored(publisher: Publisher, valkey: Valkey, data: bytes) -> None:
    """Of another version, or a stranger's."""
    await publisher.publish(stored(TOKENS))
    async with open_redis_store(valkey.url, 2.0) as store:
        await store.command(("SET", f"keepgate:kv-blocks:{publisher.address}", data))
        async with following(publisher, store) as blocks:
            await until(lambda: blocks.leading(TOKENS) == 4)


async def test_a_killed_redis_costs_snapshots_only(publisher: Publisher, own_valkey: Valkey) -> None:
    """Events are followed as ever."""
    async with open_redis_store(own_valkey.url, 0.1) as store:
        await own_valkey.kill()
        await publisher.publish(stored(TOKENS))
        async with following(publisher, store) as blocks:
            await until(lambda: blocks.leading(TOKENS) == 4)


async def test_a_snapshot_is_bounded() -> None:
    """It has the first blocks, whose children may be unknown, and says that it is not whole."""
    blocks, late = EngineBlocks(), EngineBlocks()
    for tokens in (TOKENS, [1, 2]):
        blocks.apply(msgspec.msgpack.encode([1.0, [stored(tokens)]]))
    blocks.is_whole = True
    for most, known in ((2, (4, 0, False)), (3, (4, 2, True))):
        state, held = blocks.state(most)
        await late.restore(state, [held[:1], held[1:]])
        assert (late.leading(TOKENS), late.leading([1, 2]), late.is_whole) == known
