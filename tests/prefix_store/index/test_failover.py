"""A master of a cluster fails, its replica takes over, and the index works again."""

from collections.abc import Iterator

import pytest

from prefix_store.index.index import open_index
from prefix_store.index.owner import TierKind
from tests.cache.entries.entry_examples import until
from tests.prefix_store.index.blocks import PATIENT, Shelf, chain
from tests.prefix_store.index.cluster import Cluster
from tests.prefix_store.index.test_cluster import namespaces_on


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A cluster whose nodes this test may kill; the first of them has a replica."""
    with Cluster.running(with_replica=True) as started:
        yield started


async def test_a_dead_master_is_replaced_by_its_replica(own_cluster: Cluster) -> None:
    """The master may be the only node that was known at the start."""
    namespace = next(namespaces_on(0))
    keys = chain(namespace, 200)
    master = own_cluster.nodes[0]
    async with open_index(master.url, namespace, deadline=PATIENT, heartbeat=0.1) as index:
        held = index.own("a", TierKind.MEMORY, Shelf(*keys).inventory)
        await index.next_heartbeat()
        await index.flush()
        master.process.kill()

        async def is_found_again() -> bool:
            return (await index.match(keys)).blocks == 200

        async def is_missed() -> bool:
            return not index.connection.is_available

        await until(is_missed)
        held.touch(keys)
        await until(is_found_again, within=30, every=0.1)
        assert index.connection.times_unavailable >= 1
