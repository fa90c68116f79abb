"""TLS, users with few rights, servers with few commands, and servers that are full or read only."""

import asyncio
import contextlib
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio
import trustme

from cache.entries.outcomes import Hit
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.index.entry_index import EntryFilter
from cache.index.redis_index import RedisIndex
from cache.stores.conversations import Conversations, Record, encode_record
from cache.stores.recent_answers import RecentAnswers
from cache.stores.redis_store import open_redis_store
from tests.cache.conftest import PATIENT
from tests.cache.entries.entry_examples import entry
from tests.cache.test_exact import answer_to, key_of, worker, written
from tests.cache.valkey import Valkey
from tests.cache.valkey_cluster import Node, ValkeyCluster, ValkeySentinels
from tests.waiting import until

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "redis.md"
DEADLINE = 0.5


def rights(*more: str) -> list[str]:
    """What the guide gives Keepgate's user."""
    line = re.search(r"^user keepgate (.*)$", GUIDE.read_text(), re.MULTILINE)
    assert line
    return [*line[1].split(), *more]


@asynccontextmanager
async def with_tls(socket: Path, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of a server that ends TLS in front of a server on a unix socket."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_unix_connection(str(socket))
        await asyncio.gather(pump(reader, to_server[1]), pump(to_server[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_server_is_reached_with_tls(valkey: Valkey, tmp_path: Path) -> None:
    """A certificate of the authority in the URL is accepted; another one is an outage, and never a plain connection."""
    authority, other = trustme.CA(), trustme.CA()
    certificate, ca, wrong_ca = tmp_path / "chain.pem", tmp_path / "ca.pem", tmp_path / "other.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(ca))
    other.cert_pem.write_to_path(str(wrong_ca))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with with_tls(valkey.socket, context) as port:
        url = f"rediss://localhost:{port}/0?ssl_ca_certs="
        async with open_redis_store(f"{url}{ca}", PATIENT) as store:
            await store.put(entry("public.1"), 60)
            await store.flush()
            assert await store.get("public.1") is not None
        async with open_redis_store(f"{url}{wrong_ca}", PATIENT) as store:
            assert store.breaker.is_open
            with pytest.raises(StoreUnavailable):
                await store.get("public.1")


@pytest.fixture
async def restricted(valkey: Valkey, raw: redis.asyncio.Redis) -> AsyncIterator[str]:
    """The URL of a server for a user with the rights of the guide."""
    await raw.execute_command("ACL", "SETUSER", "keepgate", *rights())  # type: ignore[no-untyped-call]
    yield valkey.url.replace("unix://", "unix://keepgate:PASSWORD@")
    await raw.acl_deluser("keepgate")


async def use_index(cache: ExactCache) -> None:
    assert isinstance(cache.index, RedisIndex)
    cache.index.hit(key_of(1, "tenant").id)
    await cache.index.flush()
    for wanted in (EntryFilter(), EntryFilter(model="m"), EntryFilter(namespace="tenant"), EntryFilter(hottest=True)):
        assert (await cache.index.page(wanted, None, 10)).ids
    await cache.index.asked_like("tenant", b"question", 1)
    await cache.index.in_semantic([key_of(1, "tenant").id])
    assert sum(await cache.index.ages([60.0], time.time())) == 6
    assert await cache.index.sizes(5)
    await cache.index.sweep(pause=0)


async def use_everything(url: str) -> None:
    """Use all of the cache that is in Redis. Raises StoreUnavailable where something is refused."""
    async with worker(url) as one, worker(url) as other:
        assert one.redis
        keys = [key_of(number, "tenant") for number in range(6)]
        for key in keys:
            await written(one, answer_to(one, key))
            assert isinstance(await other.lookup(key), Hit)
        await use_index(one)
        await one.delete(keys[0].id)
        await until(lambda: other.memory.peek(keys[0].id) is None)
        conversations = Conversations(one.redis, 60)
        await conversations.save("tenant", "r1", encode_record(Record([], {"output": []})))
        assert await conversations.load("tenant", "r1") is not None
        await conversations.delete("tenant", "r1")
        await conversations.save("tenant", "r2", encode_record(Record([], {"output": []})))
        recent = RecentAnswers(one.redis, 60)
        assert [await recent.serve(keys[1].id) for _ in range(2)] == [False, True]
        await one.purge("model", "m")
        await until(lambda: len(other.memory) == 0)
        await one.redis.restore_generations({"model:other": "1"})
        erased = await one.erase("tenant")
        assert (erased.found, erased.removed, erased.remaining) == (7, 7, 0)
        await one.purge("all")
        await one.redis.purges_since("0-0")
        assert one.redis.breaker.times_opened == other.redis.breaker.times_opened == 0  # type: ignore[union-attr]
        assert await one.redis.used_bytes()


async def test_the_rights_of_the_guide_are_enough(restricted: str) -> None:
    """A user with exactly the commands and keys of the guide can use the whole cache."""
    await use_everything(restricted)


async def test_the_rights_of_the_guide_are_enough_for_a_cluster(cluster: ValkeyCluster) -> None:
    """In a cluster, with the few commands that the guide adds for one."""
    await set_user(cluster.nodes, *rights("+cluster|slots", "+readonly", "+asking"))
    url = cluster.url.replace("://", "://keepgate:PASSWORD@")
    await use_everything(f"{url}?read_from=replica")


async def test_the_rights_of_the_guide_are_enough_with_sentinels(sentinels: ValkeySentinels) -> None:
    """With sentinels, with the command that the guide adds for them."""
    await set_user(sentinels.servers, *rights("+role"))
    await use_everything(sentinels.url.replace("://", "://keepgate:PASSWORD@"))


async def set_user(nodes: list[Node], *given: str) -> None:
    for node in nodes:
        await node.ask("ACL", "SETUSER", "keepgate", *given)


@pytest.mark.parametrize("kind", ["cluster", "sentinels"])
async def test_refused_credentials_fail_the_start_everywhere(
    kind: str, cluster: ValkeyCluster, sentinels: ValkeySentinels
) -> None:
    """A wrong password of a cluster or of servers behind sentinels fails the opening of a store, and is not shown."""
    server = cluster if kind == "cluster" else sentinels
    url = server.url.replace("://", "://keepgate:wrong-one@")
    with pytest.raises(StoreUnavailable, match="credentials") as raised:
        async with open_redis_store(url, PATIENT):
            pytest.fail("the store opened")
    assert "wrong-one" not in str(raised.value)


async def test_a_server_that_tells_little_is_used(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Where INFO is refused, the figure is left out, and nothing fails."""
    given = [each for each in rights() if each != "+info"]
    await raw.execute_command("ACL", "SETUSER", "keepgate", *given)  # type: ignore[no-untyped-call]
    async with open_redis_store(valkey.url.replace("unix://", "unix://keepgate:PASSWORD@"), PATIENT) as store:
        await store.put(entry("public.1"), 60)
        await store.flush()
        assert await store.get("public.1") is not None
        assert await store.used_bytes() is None
    await raw.acl_deluser("keepgate")


@pytest.mark.parametrize(
    ("policy", "limit", "warns"),
    [
        ("noeviction", "100mb", True),
        ("noeviction", "0", False),
        ("allkeys-lru", "100mb", False),
    ],
)
async def test_a_server_that_will_refuse_writes_is_warned_of(
    late_valkey: Valkey, caplog: pytest.LogCaptureFixture, policy: str, limit: str, warns: bool
) -> None:
    """A limit of memory without an eviction policy is logged at the start."""
    await late_valkey.start("--maxmemory", limit, "--maxmemory-policy", policy)
    with caplog.at_level(logging.WARNING):
        async with open_redis_store(late_valkey.url, PATIENT):
            pass
    assert ("noeviction" in caplog.text) is warns


async def test_refused_writes_are_logged_once_in_a_while(late_valkey: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    """A full Redis drops and counts every write, and writes one line of the log."""
    await late_valkey.start("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    async with open_redis_store(late_valkey.url, PATIENT) as store:
        with caplog.at_level(logging.WARNING):
            for number in range(30):
                await store.put(entry(f"public.{number}", body=b"x" * 500_000), 60)
                await store.flush()
        assert store.writes_dropped > 10
        assert len([record for record in caplog.records if "refused" in record.message]) == 1


async def test_writes_wait_while_a_server_is_read_only(own_valkey: Valkey) -> None:
    """A server that becomes a replica refuses writes for now: they arrive when it is a master again."""
    raw = redis.asyncio.Redis.from_url(own_valkey.url)
    async with open_redis_store(own_valkey.url, DEADLINE) as store:
        await store.put(entry("public.before"), 60)
        await store.flush()
        await raw.replicaof("127.0.0.1", "1")
        for number in range(200):
            await store.put(entry(f"public.{number}"), 60)
        with pytest.raises(StoreUnavailable, match="takes no writes"):
            await store.flush()
        assert await store.get("public.before") is not None
        assert await store.get("public.7") is not None  # from the queue
        await raw.replicaof("NO", "ONE")

        async def arrived() -> bool:
            return int(await raw.dbsize()) == 201

        await until(arrived)
        assert (store.writes_dropped, store.breaker.times_opened) == (0, 0)
    await raw.aclose()
