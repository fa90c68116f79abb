"""The index on a real Redis Cluster of three nodes."""

import binascii
import itertools
from collections.abc import Iterator

import redis.asyncio
from redis.crc import key_slot

from prefix_store.index.index import open_index
from prefix_store.index.layout import key_names
from prefix_store.index.match import NO_MATCH
from tests.cache.entries.entry_examples import until
from tests.prefix_store.index.blocks import PATIENT, chain, new_namespace, outline, owner
from tests.prefix_store.index.cluster import Cluster


def namespaces_on(node: int) -> Iterator[bytes]:
    """Namespaces whose slot is one of the node with this number."""
    for namespace in (new_namespace() for _ in itertools.count()):
        if key_slot(key_names(namespace)[0]) // 5_462 == node:
            yield namespace


def test_all_keys_of_a_namespace_lie_in_one_slot() -> None:
    """The slot depends on the namespace only, not on the block's key."""
    for _ in range(50):
        namespace = new_namespace()
        live, owners, block = key_names(namespace)
        tag = live[live.index(b"{") + 1 : live.index(b"}")]
        expected = binascii.crc_hqx(tag, 0) % 16_384
        keys = [live, owners, *(block + key for key in chain(namespace, 20)), block + b"{}}{" * 4]
        assert {key_slot(key) for key in keys} == {expected}


async def test_a_namespace_is_found_whichever_node_is_asked(cluster: Cluster) -> None:
    """Owners, matches and withdrawals work with the URL of any node."""
    for number in range(3):
        namespace = next(namespaces_on(number))
        keys = chain(namespace, 600)
        async with (
            open_index(cluster.nodes[0].url, namespace, deadline=PATIENT, lifetime=30) as one,
            open_index(cluster.nodes[1].url, namespace, deadline=PATIENT, lifetime=30) as two,
        ):
            held = await owner(one, "a", *keys[:500])
            await owner(two, "b", *keys[:200])
            await one.next_heartbeat()
            match = await one.match(keys)
            assert outline(match) == [(200, {"a", "b"}), (300, {"a"})]
            holder = match.runs[1].holders[0].owner
            held.forget(keys[499:299:-1])
            held.touch(keys[:300])
            two.remove_claims(holder, keys[250:300])
            await one.flush()
            await two.flush()
            assert (await two.match(keys)).blocks == 250
        node = redis.asyncio.Redis(port=cluster.nodes[number].port)
        assert await node.exists(key_names(namespace)[1]) == 1
        await node.aclose()


async def test_namespaces_spread_over_the_nodes(cluster: Cluster) -> None:
    """Each model has one node; engines of many models use all of them."""
    found = {key_slot(key_names(new_namespace())[0]) // 5_462 for _ in range(200)}
    assert found == {0, 1, 2}


async def test_a_moved_slot_is_followed(cluster: Cluster) -> None:
    """The index follows its keys to their new node."""
    namespace = next(namespaces_on(0))
    keys = chain(namespace, 50)
    slot = key_slot(key_names(namespace)[0])
    source, target = (redis.asyncio.Redis(port=node.port) for node in cluster.nodes[:2])

    async def cluster_command(client: "redis.asyncio.Redis", *words: str | int | bytes) -> object:
        return await client.execute_command("CLUSTER", *words)  # type: ignore[no-untyped-call]

    source_id, target_id = [await cluster_command(client, "MYID") for client in (source, target)]
    assert isinstance(source_id, bytes) and isinstance(target_id, bytes)  # noqa: PT018 (one thing)
    async with open_index(cluster.nodes[2].url, namespace, deadline=PATIENT, heartbeat=0.05, lifetime=30) as index:
        await owner(index, "a", *keys)
        await index.next_heartbeat()
        assert (await index.match(keys)).blocks == 50
        await cluster_command(target, "SETSLOT", slot, "IMPORTING", source_id)
        await cluster_command(source, "SETSLOT", slot, "MIGRATING", target_id)
        stored = [name async for name in source.scan_iter(b"keepgate:*") if key_slot(name) == slot]
        assert len(stored) == 52
        await source.execute_command(  # type: ignore[no-untyped-call]
            "MIGRATE", "127.0.0.1", cluster.nodes[1].port, "", 0, 5000, "KEYS", *stored
        )
        for client in (target, source):
            await cluster_command(client, "SETSLOT", slot, "NODE", target_id)

        async def is_found_again() -> bool:
            return (await index.match(keys)).blocks == 50

        await until(is_found_again, within=15)
        assert index.connection.is_available
        await cluster_command(target, "SETSLOT", slot, "NODE", target_id)
    await source.aclose()
    await target.aclose()


async def test_without_its_node_a_namespace_is_not_known(cluster: Cluster) -> None:
    """Other namespaces work; when the node is back, so does this one."""
    gone, there = next(namespaces_on(2)), next(namespaces_on(0))
    async with (
        open_index(cluster.nodes[0].url, gone, deadline=0.3, heartbeat=0.05, lifetime=60) as one,
        open_index(cluster.nodes[0].url, there, deadline=PATIENT, heartbeat=0.05, lifetime=60) as two,
    ):
        keys, others = chain(gone, 30), chain(there, 30)
        await owner(one, "a", *keys)
        await owner(two, "a", *others)
        await one.next_heartbeat()
        await two.next_heartbeat()
        cluster.nodes[2].freeze()
        try:
            assert await one.match(keys) == NO_MATCH
            assert not one.connection.is_available
            assert (await two.match(others)).blocks == 30
        finally:
            cluster.nodes[2].thaw()
        await one.next_heartbeat()
        assert (await one.match(keys)).blocks == 30
