"""An index over sentinels, over several nodes of a cluster, and for a user with few rights."""

import asyncio

import pytest
import redis.asyncio

from prefix_store.index.index import open_index
from prefix_store.index.owner import TierKind
from prefix_store.index.servers import Servers, servers_of
from tests.cache.stores.test_redis_access import rights
from tests.cache.valkey import Valkey
from tests.cache.valkey_cluster import running_sentinels
from tests.prefix_store.index.blocks import PATIENT, Shelf, chain
from tests.prefix_store.index.cluster import Cluster
from tests.prefix_store.index.test_cluster import namespaces_on
from tests.waiting import until


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("redis://u:p@h:1/2", Servers("redis://u:p@h:1/2")),
        ("unix:///run/s?db=1", Servers("unix:///run/s?db=1")),
        (
            "rediss+cluster://u:p@a,[::1]:2?read_from=replica&ssl_ca_certs=x",
            Servers("rediss://u:p@a:6379/?ssl_ca_certs=x", nodes=(("a", 6379), ("::1", 2))),
        ),
        (
            "redis+sentinel://u:p@a:1,b/main/3?sentinel_password=s",
            Servers("redis://u:p@a:1/3", (("a", 1), ("b", 26379)), (), "main", None, "s"),
        ),
    ],
)
def test_the_servers_of_a_url(url: str, servers: Servers) -> None:
    """Addresses, credentials, the master's name and options are told apart."""
    assert servers_of(url) == servers


@pytest.mark.parametrize("url", ["redis+sentinel://a", "redis+sentinel://a,,b/main", "redis+cluster://a:port"])
def test_a_url_without_servers_is_refused(url: str) -> None:
    """A URL with several hosts of which one is none, or without a master, raises ValueError."""
    with pytest.raises(ValueError, match="expected"):
        servers_of(url)


async def test_an_index_follows_the_master_of_sentinels() -> None:
    """Blocks are found with sentinels, and again after the master was killed."""
    async with running_sentinels() as sentinels:
        namespace = next(namespaces_on(0))
        keys = chain(namespace, 50)
        async with open_index(sentinels.url, namespace, deadline=PATIENT, heartbeat=0.1) as index:
            held = index.own("a", TierKind.MEMORY, Shelf(*keys).inventory)
            await index.next_heartbeat()
            await index.flush()
            assert (await index.match(keys)).blocks == 50
            await (await sentinels.master()).kill()
            await until(lambda: not index.connection.is_available)
            held.touch(keys)

            async def is_found_again() -> bool:
                return (await index.match(keys)).blocks == 50

            await until(is_found_again, within=30, every=0.1)


async def test_the_rights_of_the_guide_are_enough(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """A user with exactly the commands and keys of the guide can use the index."""
    await raw.execute_command("ACL", "SETUSER", "keepgate", *rights())  # type: ignore[no-untyped-call]
    namespace = next(namespaces_on(0))
    keys = chain(namespace, 20)
    url = valkey.url.replace("unix://", "unix://keepgate:PASSWORD@")
    async with open_index(url, namespace, deadline=PATIENT, heartbeat=0.1) as index:
        held = index.own("a", TierKind.MEMORY, Shelf(*keys).inventory)
        await index.next_heartbeat()
        await index.flush()
        assert (await index.match(keys)).blocks == 20
        held.touch(keys)
        held.forget(keys[10:])
        await index.flush()
        assert (await index.match(keys)).blocks == 10
        assert (index.dropped, index.connection.times_unavailable) == (0, 0)
    await raw.acl_deluser("keepgate")


def test_an_index_starts_with_any_node_of_a_cluster() -> None:
    """One of the hosts of the URL may be down."""
    with Cluster.running() as cluster:

        async def use() -> None:
            namespace = next(namespaces_on(1))
            keys = chain(namespace, 20)
            url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[0].port}"
            async with open_index(url, namespace, deadline=PATIENT, heartbeat=0.1) as index:
                index.own("a", TierKind.MEMORY, Shelf(*keys).inventory)

                async def is_found() -> bool:
                    return (await index.match(keys)).blocks == 20

                await until(is_found, every=0.05)

        asyncio.run(use())
