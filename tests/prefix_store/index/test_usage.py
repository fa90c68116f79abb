"""Counting the index's claims, and repairing wrong ones."""

from collections import Counter

import pytest
import redis.asyncio

from prefix_store.errors import IndexUnavailable
from prefix_store.index.index import open_index
from prefix_store.index.owner import TierKind
from prefix_store.index.usage import OwnerUsage, measure_usage, repair
from tests.cache.valkey import Valkey
from tests.prefix_store.index.blocks import PATIENT, Shelf, chain, new_namespace, owner
from tests.prefix_store.index.cluster import Cluster


@pytest.fixture(params=["single", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a single server, and of a cluster's node."""
    if request.param == "single":
        server: Valkey = request.getfixturevalue("shared_valkey")
        return server.url
    cluster: Cluster = request.getfixturevalue("cluster")
    return cluster.nodes[0].url


async def test_blocks_are_counted_by_owner_tier_and_codec(url: str) -> None:
    """Only one namespace is counted; claims of dead owners are counted separately."""
    first, second = new_namespace(), new_namespace()
    keys = chain(first, 2_500)
    async with (
        open_index(url, first, deadline=PATIENT, lifetime=30) as index,
        open_index(url, second, deadline=PATIENT, lifetime=30) as other,
    ):
        await owner(other, "a", *chain(second, 100))
        await owner(index, "a", *keys[:2_000])
        disk = await owner(index, "disk", tier=TierKind.DISK)
        disk.publish(keys[1_000:], codec=3)
        dead = await owner(index, "dead", *keys[:10])
        await index.flush()
        await index.disown(dead)
        await index.next_heartbeat()
        census = await measure_usage(index)
        assert census.blocks == 2_500
        assert census.claims == Counter(
            {
                OwnerUsage("a", TierKind.MEMORY, 0): 2_000,
                OwnerUsage("disk", TierKind.DISK, 3): 1_500,
                OwnerUsage("", TierKind.MEMORY, 0): 10,
            }
        )


async def test_a_repair_makes_the_index_say_what_is_held(valkey: Valkey) -> None:
    """Wrong claims are withdrawn, missing ones are made; those of others stay."""
    namespace = new_namespace()
    keys = chain(namespace, 1_500)
    shelf = Shelf()
    async with open_index(valkey.url, namespace, deadline=PATIENT, lifetime=30) as index:
        held = index.own("a", TierKind.DISK, shelf.inventory, lasting=True)
        await owner(index, "b", *keys[:3])
        held.publish(keys[:1_000])
        await index.flush()
        shelf.keys = [*keys[:500], *keys[1_000:]]
        assert await repair(index, held) == 500
        census = await measure_usage(index)
        assert census.claims == Counter(
            {OwnerUsage("a", TierKind.DISK, 0): 1_000, OwnerUsage("b", TierKind.MEMORY, 0): 3}
        )
        assert await repair(index, held) == 0
        assert (await index.match(keys)).blocks == 500


async def test_a_census_needs_redis(own_valkey: Valkey) -> None:
    """Unlike a match it raises an error in an outage."""
    async with open_index(own_valkey.url, new_namespace()) as index:
        await index.next_heartbeat()
        await own_valkey.kill()
        with pytest.raises(IndexUnavailable):
            await measure_usage(index)


async def test_a_census_of_foreign_values_counts_no_claims(valkey: Valkey, raw: "redis.asyncio.Redis") -> None:
    """Foreign values are not counted."""
    async with open_index(valkey.url, new_namespace(), deadline=PATIENT) as index:
        await raw.set(index.connection.block_names + bytes(16), b"something else")
        await index.next_heartbeat()
        assert await measure_usage(index) == (1, Counter())
