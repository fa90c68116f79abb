"""Sentinels and clusters under load: servers that fail, slots that move, replicas that lag."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from redis.crc import key_slot

from cache.entries.entry import encode_entry
from cache.entries.outcomes import Hit
from cache.errors import StoreUnavailable
from cache.stores.cluster import Cluster
from cache.stores.redis_store import RedisStore, open_redis_store
from tests.cache.conftest import PATIENT
from tests.cache.entries.entry_examples import entry
from tests.cache.test_exact import answer_to, key_of, worker, written
from tests.cache.valkey_cluster import Node, ValkeyCluster, ValkeySentinels, running_cluster, running_sentinels
from tests.waiting import until

DEADLINE = 0.5
COUNT = 200


def name(number: int) -> str:
    return f"keepgate:entry:public.{number}"


class Load:
    """Readers and writers that go on until they are told to stop."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.wrong: list[str] = []
        self.longest = 0.0
        self.answered = 0

    async def fill(self) -> None:
        for number in range(COUNT):
            await self._store.put(entry(f"public.{number}", body=b"%d" % number), 600)
        await self._store.flush()

    async def _read(self, reader: int) -> None:
        for turn in range(10**9):
            number = (turn * 7 + reader) % COUNT
            begun = time.monotonic()
            try:
                found = await self._store.get(f"public.{number}")
                if found is not None and found.body != b"%d" % number:
                    self.wrong.append(f"{number}: {found.body!r}")
                self.answered += found is not None
            except StoreUnavailable:
                pass
            self.longest = max(self.longest, time.monotonic() - begun)
            await asyncio.sleep(0.002)

    async def _write(self) -> None:
        for turn in range(10**9):
            number = turn % COUNT
            begun = time.monotonic()
            with suppress(StoreUnavailable):
                await self._store.put(entry(f"public.{number}", body=b"%d" % number), 600)
            self.longest = max(self.longest, time.monotonic() - begun)
            await asyncio.sleep(0.002)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in (*(self._read(n) for n in range(4)), self._write())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, asyncio.CancelledError), repr(outcome)


async def writes_arrive(store: RedisStore, reads: Callable[[str], Awaitable[object]], number: int) -> bool:
    """Whether an entry that is put now can be read from its server."""
    await store.put(entry(f"public.new{number}"), 60)
    try:
        await store.flush()
        return await reads(f"keepgate:entry:public.new{number}") is not None
    except StoreUnavailable:
        return False


async def test_a_killed_master_of_a_cluster_is_replaced_under_load() -> None:
    """Lookups and writes go on at the other masters, and at its replica when that has taken over."""
    async with running_cluster(with_replicas=True) as cluster, open_redis_store(cluster.url, DEADLINE) as store:
        load = Load(store)
        await load.fill()
        async with load.running():
            await until(lambda: load.answered > 200)
            lost = cluster.master_of("keepgate:generations")
            await cluster.masters[lost].kill()
            number = next(n for n in range(1000) if cluster.master_of(f"keepgate:entry:public.new{n}") == lost)
            read = cluster.replicas[lost]

            async def is_written() -> bool:
                return await writes_arrive(store, lambda key: read.ask("GET", key), number)

            await until(is_written, within=15, every=0.1)
            before = load.answered
            await until(lambda: load.answered > before + 500)
        assert load.wrong == []
        assert load.longest < 2 * DEADLINE
        assert len([await store.get(f"public.{number}") for number in range(COUNT)]) == COUNT


async def test_a_frozen_master_costs_one_deadline_and_the_others_go_on() -> None:
    """Lookups wait one deadline for a frozen master; later ones for its keys fail at once, and others succeed."""
    async with (
        running_cluster("--cluster-require-full-coverage", "no") as cluster,
        open_redis_store(cluster.url, DEADLINE) as store,
    ):
        await Load(store).fill()
        frozen = (cluster.master_of("keepgate:generations") + 1) % 3
        theirs, others = (
            [n for n in range(COUNT) if (cluster.master_of(name(n)) == frozen) is wanted] for wanted in (True, False)
        )
        cluster.masters[frozen].freeze()
        try:
            begun = time.monotonic()
            outcomes = await asyncio.gather(*(store.get(f"public.{n}") for n in theirs[:20]), return_exceptions=True)
            assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
            assert time.monotonic() - begun < 2 * DEADLINE
            async with asyncio.timeout(10):
                await store.breaker.wait_closed()
            begun = time.monotonic()
            for number in theirs[:20]:
                with pytest.raises(StoreUnavailable, match="does not answer"):
                    await store.get(f"public.{number}")
            assert all([await store.get(f"public.{n}") for n in others])
            assert time.monotonic() - begun < DEADLINE
        finally:
            cluster.masters[frozen].thaw()
        await until(lambda: is_found(store, theirs[0]), within=10)


async def is_found(store: RedisStore, number: int) -> bool:
    try:
        return await store.get(f"public.{number}") is not None
    except StoreUnavailable:
        return False


async def test_slots_move_while_they_are_used(cluster: ValkeyCluster) -> None:
    """Entries are found, written and deleted before, while and after their slot moves to another master."""
    async with open_redis_store(cluster.url, DEADLINE) as store:
        load = Load(store)
        await load.fill()
        slot, source = key_slot(name(1).encode()), cluster.master_of(name(1))
        target = (source + 1) % 3
        async with load.running():
            await cluster.begin_moving(slot, source, target)
            assert await store.get("public.1") is not None
            await cluster.move_keys(slot, source, target)
            assert await store.get("public.1") is not None  # ASK
            await store.put(entry("public.1", body=b"1"), 600)
            assert await store.delete("public.1") is True
            await cluster.end_moving(slot, target)
            await store.put(entry("public.1", body=b"1"), 600)
            await store.flush()
            assert await store.get("public.1") is not None  # MOVED
            before = load.answered
            await until(lambda: load.answered > before + 300)
        assert await cluster.masters[target].ask("EXISTS", name(1)) == 1
        await cluster.begin_moving(slot, target, source)
        await cluster.move_keys(slot, target, source)
        await cluster.end_moving(slot, source)
        assert await store.get("public.1") is not None
        assert load.wrong == []
        assert store.breaker.times_opened == 0
        assert store.writes_dropped == 0


async def test_a_purge_is_made_while_its_slot_moves(cluster: ValkeyCluster) -> None:
    """The hash of generations and the stream of purges move together, and purges reach others all the while."""
    slot = key_slot(b"keepgate:generations")
    assert slot == key_slot(Cluster.purges_name.encode())
    source = cluster.master_of("keepgate:generations")
    target = (source + 1) % 3
    async with worker(cluster.url) as one, worker(cluster.url) as other:
        for step in (
            cluster.begin_moving(slot, source, target),
            cluster.move_keys(slot, source, target),
            cluster.end_moving(slot, target),
            cluster.begin_moving(slot, target, source),
            cluster.move_keys(slot, target, source),
            cluster.end_moving(slot, source),
        ):
            await one.purge("model", "m")
            await until(lambda: one.generation("public", "m") == other.generation("public", "m"), within=6)
            await step
        await one.purge("model", "m")
        await until(lambda: one.generation("public", "m") == other.generation("public", "m"), within=6)


async def test_a_purge_and_a_deletion_reach_all_workers_of_a_cluster(cluster: ValkeyCluster) -> None:
    """A purge and a deletion remove entries from other workers' memory, whichever master has them."""
    async with worker(cluster.url) as one, worker(cluster.url) as other:
        keys = [key_of(number) for number in range(12)]
        for key in keys:
            await written(one, answer_to(one, key))
            assert isinstance(await other.lookup(key), Hit)
        await one.delete(keys[0].id)
        await until(lambda: other.memory.peek(keys[0].id) is None, within=1.8)
        assert not isinstance(await other.lookup(keys[0]), Hit)
        await one.purge("all")
        await until(lambda: len(other.memory) == 0, within=1.8)
        assert not [key for key in keys if isinstance(await other.lookup(key), Hit)]


async def test_the_bytes_of_a_cluster_are_those_of_its_masters(cluster: ValkeyCluster) -> None:
    """The sum over the masters."""
    async with open_redis_store(cluster.url, PATIENT) as store:
        await Load(store).fill()
        used = await store.used_bytes()
        assert used == pytest.approx(sum([await used_by(node) for node in cluster.masters]), rel=0.2)


async def used_by(node: Node) -> int:
    lines = (await node.ask("INFO", "memory")).decode().splitlines()
    return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


async def test_a_killed_master_of_sentinels_is_replaced_under_load() -> None:
    """Lookups and writes go on at the replica that the sentinels have chosen; no write waits for a request."""
    async with running_sentinels() as sentinels, open_redis_store(sentinels.url, DEADLINE) as store:
        load = Load(store)
        await load.fill()
        first = await sentinels.master()
        async with load.running():
            await until(lambda: load.answered > 200)
            await first.kill()

            async def is_written() -> bool:
                master = await sentinels.master()
                return master is not first and await writes_arrive(store, lambda key: master.ask("GET", key), 1)

            await until(is_written, within=20, every=0.1)
            before = load.answered
            await until(lambda: load.answered > before + 500)
        assert load.wrong == []
        assert load.longest < 2 * DEADLINE


async def test_a_demoted_master_is_left() -> None:
    """A failover without a failure, by which the master becomes a replica, makes the store find the new one."""
    async with running_sentinels() as sentinels, open_redis_store(sentinels.url, DEADLINE) as store:
        before = await sentinels.master()
        await Load(store).fill()
        await sentinels.sentinels[0].ask("SENTINEL", "FAILOVER", "main")

        async def is_replaced() -> bool:
            return await sentinels.master() is not before

        await until(is_replaced, within=20)
        after = await sentinels.master()

        async def is_written() -> bool:
            return await writes_arrive(store, lambda key: after.ask("GET", key), 2)

        # The sentinels tell the old master after ten seconds: until then it takes writes, which are lost.
        await until(is_written, within=5, every=0.1)
        assert store.writes_dropped == 0


async def test_a_purge_that_a_failover_has_lost_is_repeated() -> None:
    """Purged answers stay purged although the new master has never heard of the purge, and deleted ones deleted."""
    async with running_sentinels() as sentinels, worker(sentinels.url) as one:
        await one.purge("all")
        early, deleted = key_of(1), key_of(2)
        kept = answer_to(one, early)
        await written(one, kept)
        await written(one, answer_to(one, deleted))
        first = await sentinels.master()
        others = [node for node in sentinels.servers if node is not first]
        for node in others:
            await until(lambda node=node: has_all(node, early.id, deleted.id))  # type: ignore[misc]
        # From here on the replicas hear nothing of their master.
        for node in others:
            node.freeze()
        await first.ask("CLIENT", "KILL", "TYPE", "replica")
        await one.delete(deleted.id)
        await one.purge("all")
        purged = one.generation("public", "m")
        await first.kill()
        for node in others:
            node.thaw()

        async def is_replaced() -> bool:
            return await sentinels.master() is not first

        await until(is_replaced, within=20)
        after = await sentinels.master()
        assert one.redis
        async with asyncio.timeout(15):
            await one.redis.breaker.wait_closed()

        async def is_repeated() -> bool:
            token = await after.ask("HGET", "keepgate:generations", "all")
            return token is not None and token.decode() not in (kept.generation[:12], purged[:12])

        await until(is_repeated, within=15)
        assert not one.counts(kept)
        assert not isinstance(await one.lookup(early), Hit)
        await until(lambda: is_gone(after, deleted.id), within=5)
        async with worker(sentinels.url) as late:
            # Another failover right after the first loses the repeated purge too, until the worker repeats it again.
            async def is_purged() -> bool:
                return not isinstance(await late.lookup(early), Hit)

            await until(is_purged, within=15)


async def has_all(node: Node, *ids: str) -> bool:
    return bool(await node.ask("EXISTS", *(f"keepgate:entry:{each}" for each in ids)) == len(ids))


async def is_gone(node: Node, entry_id: str) -> bool:
    return bool(await node.ask("EXISTS", f"keepgate:entry:{entry_id}") == 0)


def replicas_of(server: ValkeyCluster | ValkeySentinels, key: str) -> list[Node]:
    return [server.replicas[server.master_of(key)]] if isinstance(server, ValkeyCluster) else server.servers


@pytest.mark.parametrize("kind", ["cluster", "sentinels"])
async def test_reads_go_to_replicas(kind: str, cluster: ValkeyCluster, sentinels: ValkeySentinels) -> None:
    """With read_from=replica lookups are answered by replicas, and by masters while no replica answers."""
    server = cluster if kind == "cluster" else sentinels
    async with open_redis_store(f"{server.url}?read_from=replica", DEADLINE) as store:
        await store.put(entry("public.1", body=b"1"), 60)
        await store.flush()
        nodes = replicas_of(server, name(1))
        if isinstance(server, ValkeySentinels):
            nodes = [node for node in nodes if node is not await server.master()]
        for node in nodes:
            await until(lambda node=node: has_all(node, "public.1"))  # type: ignore[misc]
            await node.ask("CONFIG", "RESETSTAT")
        for _ in range(20):
            assert await store.get("public.1") is not None
        asked = [(await node.ask("INFO", "commandstats")).decode() for node in nodes]
        assert any("cmdstat_get:" in text for text in asked)
        for node in nodes:
            node.freeze()
        try:
            with suppress(StoreUnavailable):  # it waits for one of the frozen
                await store.get("public.1")
            await until(lambda: is_found(store, 1), within=10)
            begun = time.monotonic()
            for _ in range(20):
                with suppress(StoreUnavailable):
                    await store.get("public.1")
            assert time.monotonic() - begun < 2.5 * DEADLINE
        finally:
            for node in nodes:
                node.thaw()


async def test_a_deleted_entry_is_not_read_from_a_replica_that_still_has_it(sentinels: ValkeySentinels) -> None:
    """A worker that knows of a deletion asks the master for the entry."""
    url = f"{sentinels.url}?read_from=replica"
    master = await sentinels.master()
    replicas = [node for node in sentinels.servers if node is not master]
    async with worker(url) as one, worker(url) as other:
        key = key_of(1)
        kept = answer_to(one, key)
        await written(one, kept)
        for replica in replicas:
            await until(lambda replica=replica: has_all(replica, key.id))  # type: ignore[misc]
        assert isinstance(await other.lookup(key), Hit)
        await one.delete(key.id)
        await until(lambda: other.memory.peek(key.id) is None)
        for replica in replicas:  # as on one that lags
            await until(lambda replica=replica: is_gone(replica, key.id))  # type: ignore[misc]
            await replica.ask("CONFIG", "SET", "replica-read-only", "no")
            await replica.ask("SET", f"keepgate:entry:{key.id}", encode_entry(kept))
            await replica.ask("CONFIG", "SET", "replica-read-only", "yes")
        assert not isinstance(await one.lookup(key), Hit)
        assert not isinstance(await other.lookup(key), Hit)
