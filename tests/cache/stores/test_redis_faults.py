"""Redis frozen, killed, restarted, absent, refusing, full, lying: requests go on, and nothing wrong is answered."""

import asyncio
import contextlib
import random
import time
from pathlib import Path

import pytest
import redis.asyncio

from cache.entries.entry import decode_entry, encode_entry
from cache.entries.generations import new_purge
from cache.errors import StoreUnavailable
from cache.stores.redis_store import _CONNECTIONS as CONNECTIONS  # the bound itself is tested
from cache.stores.redis_store import RedisStore, open_redis_store
from cache.stores.topology import SingleServer
from tests.cache.conftest import PATIENT
from tests.cache.entries.entry_examples import entry
from tests.cache.valkey import Valkey
from tests.waiting import until

DEADLINE = 0.5


def redis_key(entry_id: str) -> str:
    return f"keepgate:entry:{entry_id}"


async def closed(store: RedisStore, within: float = 15.0) -> None:
    async with asyncio.timeout(within):
        await store.breaker.wait_closed()


async def seconds_to_fail(store: RedisStore, count: int) -> float:
    begun = time.monotonic()
    outcomes = await asyncio.gather(*(store.get(f"public.{n}") for n in range(count)), return_exceptions=True)
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes), outcomes
    return time.monotonic() - begun


async def test_a_frozen_redis_costs_one_deadline_once(own_valkey: Valkey) -> None:
    """A frozen Redis delays the lookups in flight by at most one deadline and later ones not at all."""
    async with open_redis_store(own_valkey.url, DEADLINE) as store:
        await store.put(entry("public.kept"), 60)
        await store.flush()
        # Enough for every one of them to have a connection, and for some to wait for one.
        await asyncio.gather(*(store.get(f"public.{n}") for n in range(200)), return_exceptions=True)
        await closed(store)
        openings = store.breaker.times_opened
        own_valkey.freeze()
        assert await seconds_to_fail(store, 200) < DEADLINE * 3
        assert sum([await seconds_to_fail(store, 20) for _ in range(50)]) < DEADLINE
        assert store.breaker.times_opened == openings + 1
        own_valkey.thaw()
        await closed(store)
        assert await store.get("public.kept") is not None


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_what_is_written_while_redis_answers_is_found(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """Redis has looked for an entry just before it took the write, and its answer comes just after."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        before = await store.commands([("GET", redis_key("public.new"))], PATIENT)

        async def answer_late(*_: object) -> list[object]:
            if is_deleted:
                await store.delete("public.new")
            await store.flush()
            return before

        monkeypatch.setattr(store, "commands", answer_late)
        await store.put(entry("public.new"), 60)
        (found,) = await store.get_many(["public.new"])
        assert (found is None) == is_deleted


async def test_writes_wait_for_a_frozen_redis_and_are_read_meanwhile(own_valkey: Valkey) -> None:
    """An entry stored while Redis is frozen is found at once and is written when Redis answers again."""
    async with open_redis_store(own_valkey.url, DEADLINE) as store:
        own_valkey.freeze()
        await seconds_to_fail(store, 1)
        await store.put(entry("public.new"), 60)
        assert await store.get("public.new") is not None
        assert store.breaker.is_open
        own_valkey.thaw()
        await closed(store)
        raw = redis.asyncio.Redis.from_url(own_valkey.url)

        async def written() -> bool:
            return bool(await raw.exists(redis_key("public.new")))

        await until(written, within=10)
        await raw.aclose()


async def test_the_lifetime_of_an_entry_includes_the_wait_for_its_write(own_valkey: Valkey) -> None:
    """The time that an entry waits to be written counts towards its lifetime."""
    async with open_redis_store(own_valkey.url, DEADLINE) as store:
        own_valkey.freeze()
        await seconds_to_fail(store, 1)
        await store.put(entry("public.short"), 0.05)

        async def gone() -> bool:
            return await store.get("public.short") is None

        await until(gone)
        own_valkey.thaw()
        await closed(store)
        await store.flush()
        assert await store.get("public.short") is None


async def test_a_killed_redis_is_used_again_once_it_is_back(own_valkey: Valkey) -> None:
    """Lookups succeed again after Redis restarts, and find the entries of before."""
    async with open_redis_store(own_valkey.url, DEADLINE) as store:
        kept = entry("public.kept", body=b"before the restart")
        await store.put(kept, 60)
        await store.flush()
        await own_valkey.kill()
        assert await seconds_to_fail(store, 5) < DEADLINE * 3
        assert store.breaker.is_open
        await own_valkey.start()
        await closed(store)
        assert await store.get("public.kept") == kept
    async with open_redis_store(own_valkey.url, DEADLINE) as another:
        assert await another.get("public.kept") == kept


async def test_a_store_opens_before_redis_is_started(late_valkey: Valkey) -> None:
    """A store opens while Redis is down, fails its lookups, and uses Redis once it is up."""
    async with open_redis_store(late_valkey.url, DEADLINE) as store:
        assert store.breaker.is_open
        assert await seconds_to_fail(store, 5) < DEADLINE / 2
        await late_valkey.start()
        await closed(store)
        assert await store.get("public.kept") is None


async def test_a_refused_connection_is_an_outage() -> None:
    """A refused connection makes lookups raise StoreUnavailable."""
    async with open_redis_store("redis://127.0.0.1:1/0", DEADLINE) as store:
        await seconds_to_fail(store, 3)


@pytest.mark.parametrize("password", ["", ":wrong@"])
async def test_refused_credentials_fail_the_start(late_valkey: Valkey, password: str) -> None:
    """Refused credentials fail the opening of a store with a message that does not show the password."""
    await late_valkey.start("--requirepass", "secret")
    url = late_valkey.url.replace("unix://", f"unix://{password}")
    with pytest.raises(StoreUnavailable, match="credentials") as raised:
        async with open_redis_store(url, DEADLINE):
            pytest.fail("the store opened")
    assert "wrong@" not in str(raised.value)
    async with open_redis_store(late_valkey.url.replace("unix://", "unix://:secret@"), PATIENT) as store:
        assert await store.get("public.aa") is None


async def test_a_full_redis_drops_writes_and_answers_lookups(late_valkey: Valkey) -> None:
    """A Redis without free memory refuses writes, which are counted, and still answers lookups."""
    await late_valkey.start("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    async with open_redis_store(late_valkey.url, PATIENT) as store:
        await store.put(entry("public.first"), 60)
        await store.flush()
        for number in range(20):
            await store.put(entry(f"public.{number}", body=b"x" * 500_000), 60)
        await store.flush()
        assert store.writes_dropped > 0
        assert not store.breaker.is_open
        assert store.breaker.times_opened == 0
        assert await store.get("public.first") is not None
        assert await store.get("public.19") is None


async def test_a_corrupt_value_is_a_failure_once_and_then_a_miss(
    redis_store: RedisStore, raw: redis.asyncio.Redis
) -> None:
    """A value that is no entry raises StoreUnavailable once, is counted and is deleted."""
    good = encode_entry(entry("public.aa"))
    for number, value in enumerate([b"", b"x", good[:-1], good[:40] + b"\x00" + good[41:]], start=1):
        await raw.set(redis_key("public.aa"), value)
        with pytest.raises(StoreUnavailable, match="stored bytes"):
            await redis_store.get("public.aa")
        assert redis_store.corrupt_entries == number
        assert await redis_store.get("public.aa") is None
    assert not redis_store.breaker.is_open


async def test_the_bytes_of_another_entry_are_corrupt(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """A whole entry under the key of another one is corrupt."""
    await raw.set(redis_key("mine.aa"), encode_entry(entry("yours.aa")))
    with pytest.raises(StoreUnavailable, match="another entry"):
        await redis_store.get("mine.aa")
    assert redis_store.corrupt_entries == 1


async def test_a_value_of_another_type_is_a_failure(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """An error reply of Redis raises StoreUnavailable and does not open the breaker."""
    await raw.rpush(redis_key("public.aa"), "x")
    with pytest.raises(StoreUnavailable, match="wrong kind of value"):
        await redis_store.get("public.aa")
    assert not redis_store.breaker.is_open


async def test_cancelled_lookups_never_mix_up_the_answers(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Lookups beside cancelled ones get their own entries, and no connection stays behind."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        kept = [entry(f"public.{n}", body=b"%d" % n * (1 + n * 37 % 5000)) for n in range(40)]
        for one in kept:
            await store.put(one, 60)
        await store.flush()
        chance = random.Random(4)  # noqa: S311 (which lookups are cancelled, and when)
        answered = 0

        async def ask() -> None:
            nonlocal answered
            wanted = chance.choice(kept)
            assert await store.get(wanted.id) == wanted
            answered += 1

        async def leave(lookup: asyncio.Task[None], turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            lookup.cancel()

        for _ in range(60):
            lookups = [asyncio.create_task(ask()) for _ in range(40)]
            leaving = [
                asyncio.create_task(leave(one, chance.randrange(60))) for one in lookups if chance.random() < 0.5
            ]
            for outcome in await asyncio.gather(*lookups, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError), repr(outcome)
            await asyncio.gather(*leaving)
        assert answered > 600
        assert store.breaker.times_opened == 0

        async def none_is_lost() -> bool:
            # Those of lookups, of the background and of the client that asks.
            return len(await raw.client_list()) <= CONNECTIONS + 3

        await until(none_is_lost)


async def test_a_cancelled_lookup_is_cancelled(valkey: Valkey) -> None:
    """A lookup raises CancelledError at whatever point it is cancelled."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        for turns in range(40):
            lookup = asyncio.create_task(store.get("public.none"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not lookup.done():
                lookup.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await lookup


async def test_more_lookups_than_connections_are_no_outage(valkey: Valkey) -> None:
    """Lookups beyond the number of connections wait for a free one and succeed."""
    async with open_redis_store(valkey.url, 30.0) as store:
        await store.put(entry(), 60)
        await store.flush()
        assert all(await asyncio.gather(*(store.get("public.aa") for _ in range(1000))))
        assert store.breaker.times_opened == 0


async def test_a_new_connection_sends_nothing_but_its_lookup(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """A new connection sends no command before its first lookup."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        before = (await raw.info("stats"))["total_commands_processed"]
        await asyncio.gather(*(store.get("public.aa") for _ in range(CONNECTIONS)))
        after = (await raw.info("stats"))["total_commands_processed"]
    assert after - before < 1.5 * CONNECTIONS


async def test_connections_that_redis_has_ended_are_no_outage(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Connections that Redis closed are replaced, and lookups succeed."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        await store.put(entry("public.kept"), 60)
        await store.flush()
        await asyncio.gather(*(store.get("public.kept") for _ in range(8)))
        for kept in await raw.client_list(_type="normal"):
            with contextlib.suppress(redis.exceptions.ResponseError):  # it was the one that asks
                await raw.client_kill_filter(_id=kept["id"], skipme=True)
        for _ in range(20):
            assert await store.get("public.kept") is not None
        assert store.breaker.times_opened == 0


async def test_connections_that_were_reset_are_no_outage(valkey: Valkey) -> None:
    """Connections that were reset while idle are replaced, and lookups succeed."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        await store.put(entry("public.kept"), 60)
        await store.flush()
        await asyncio.gather(*(store.get("public.kept") for _ in range(8)))
        # Only a transport can be reset, and no public attribute leads to one.
        assert isinstance(store._topology, SingleServer)
        for connection in store._topology._idle:
            assert connection._writer
            connection._writer.transport.abort()
        await asyncio.sleep(0.01)  # the transport reports its end in a turn of the loop of its own
        for _ in range(20):
            assert await store.get("public.kept") is not None
        assert store.breaker.times_opened == 0


async def test_a_connection_in_use_is_closed_after_its_reply(own_valkey: Valkey) -> None:
    """A connection that was in use when all were closed is not used again: its server may have been replaced."""
    async with open_redis_store(own_valkey.url, PATIENT) as store:
        assert isinstance(store._topology, SingleServer)
        await store.get("public.aa")
        own_valkey.freeze()
        lookup = asyncio.create_task(store.get("public.aa"))
        await until(lambda: not store._topology._idle)  # type: ignore[attr-defined]
        await store._topology.close()
        own_valkey.thaw()
        assert await lookup is None
        assert store._topology._idle == []


async def test_a_lookup_without_a_free_connection_in_time_is_no_outage(own_valkey: Valkey) -> None:
    """A lookup that gets no connection within the deadline fails and does not open the breaker."""
    async with open_redis_store(own_valkey.url, 5.0) as store:
        own_valkey.freeze()
        waiting = [asyncio.create_task(store.get(f"public.{n}")) for n in range(CONNECTIONS)]
        await asyncio.sleep(0)
        store._deadline = 0.05  # for the next lookup only, which has no deadline of its own
        with pytest.raises(StoreUnavailable, match="every connection is busy"):
            await store.get("public.late")
        assert not store.breaker.is_open
        own_valkey.thaw()
        assert await asyncio.gather(*waiting) == [None] * CONNECTIONS


async def test_a_lost_connection_of_the_purge_reader_is_no_outage(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """The reader of purges reconnects after its connection is lost, and the breaker stays closed."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        position, _ = await store.purges_since("")
        reading = asyncio.create_task(store.purges_since(position or "0-0"))

        async def blocked() -> bool:
            return any("b" in client["flags"] for client in await raw.client_list())

        await until(blocked)
        for client in await raw.client_list(_type="normal"):
            if "b" in client["flags"]:
                await raw.client_kill_filter(_id=client["id"])
        await store.purge(new_purge("all", ""))
        _, events = await reading
        assert len(events) == 1
        assert store.breaker.times_opened == 0


async def test_an_entry_above_the_size_limit_is_not_written(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """An entry with a body above 1 MiB is not written to Redis."""
    await redis_store.put(entry("public.large", body=b"x" * (2**20 + 1)), 60)
    await redis_store.put(entry("public.small", body=b"x" * 2**20), 60)
    await redis_store.flush()
    assert await raw.exists(redis_key("public.large")) == 0
    assert await raw.exists(redis_key("public.small")) == 1


async def fill(store: RedisStore, body: bytes, most: int) -> int:
    """The number of entries that the store accepts, which must be below `most`."""
    for number in range(most):
        try:
            await store.put(entry(f"public.{number}", body=body), 60)
        except StoreUnavailable:
            return number
    pytest.fail(f"it accepts {most} entries")


async def test_waiting_writes_are_bounded(folder: Path) -> None:
    """Entries that wait to be written take at most 64 MiB, and further ones raise StoreUnavailable."""
    async with open_redis_store(f"unix://{folder}/none", DEADLINE) as store:
        assert 60 <= await fill(store, b"x" * 2**20, 70) <= 64
        assert store.writes_dropped == 1
        # A write that replaces a waiting one takes no further room.
        for _ in range(70):
            await store.put(entry("public.0", body=b"y" * 2**20), 60)
        with pytest.raises(StoreUnavailable, match="too many writes"):
            await store.put(entry("public.last", body=b"x" * 2**20), 60)
        assert await store.get("public.0") is not None


async def test_waiting_writes_without_bodies_are_bounded(folder: Path) -> None:
    """The bound on waiting writes counts what each of them costs beside its body."""
    async with open_redis_store(f"unix://{folder}/none", DEADLINE) as store:
        assert await fill(store, b"", 100_000) > 0
        with pytest.raises(StoreUnavailable, match="too many writes"):
            await store.put(entry("public.last", body=b""), 60)


async def test_delete_and_write_keep_their_order(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """A delete after a put removes the entry, and a put after a delete keeps it."""
    for number in range(50):
        entry_id = f"public.{number}"
        await redis_store.put(entry(entry_id, body=b"x" * 10_000), 60)
        for _ in range(number % 10):
            await asyncio.sleep(0)
        assert await redis_store.delete(entry_id) is True
        if number % 2:
            await redis_store.put(entry(entry_id, body=b"again"), 60)
    await redis_store.flush()
    for number in range(50):
        data = await raw.get(redis_key(f"public.{number}"))
        assert (data is None) == (number % 2 == 0)
        assert data is None or (isinstance(data, bytes) and decode_entry(data).body == b"again")


async def test_a_delete_waits_for_a_write_under_way(own_valkey: Valkey) -> None:
    """A delete takes effect after a write of the same entry that has begun."""
    async with open_redis_store(own_valkey.url, PATIENT) as store:
        for _ in range(3):
            own_valkey.freeze()
            await store.put(entry("public.aa", body=b"x" * 1_000_000), 60)
            # Nothing public says that a write has begun; its lock is looked at in every turn of the loop.
            await until(store._writing.locked, every=0)
            delete = asyncio.create_task(store.delete("public.aa"))
            await asyncio.sleep(0)
            own_valkey.thaw()
            assert await delete is True
            async with store._writing:  # the write has ended
                pass
            assert await store.get("public.aa") is None


async def test_writes_arrive_in_order(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """Redis keeps the last of many puts of one entry."""
    for number in range(300):
        await redis_store.put(entry("public.aa", prompt_tokens=number), 60)
        if number % 7 == 0:
            await asyncio.sleep(0)
    await redis_store.flush()
    data = await raw.get(redis_key("public.aa"))
    assert isinstance(data, bytes)
    assert decode_entry(data).prompt_tokens == 299


async def test_closing_a_store_writes_what_waits(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Closing a store first writes every entry that waits."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        for number in range(500):
            await store.put(entry(f"public.{number}"), 60)
    assert await raw.dbsize() == 500


async def test_a_shutdown_does_not_wait_for_a_frozen_redis(own_valkey: Valkey) -> None:
    """Closing a store whose Redis is frozen gives up the waiting writes and returns."""
    async with asyncio.timeout(10):
        async with open_redis_store(own_valkey.url, DEADLINE) as store:
            await store.get("public.aa")
            own_valkey.freeze()
            await store.put(entry(), 60)


async def test_an_exception_of_the_caller_passes_through(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """An exception raised while a store is open passes through unchanged, and the connections are closed."""

    async def serve() -> None:
        async with open_redis_store(valkey.url, PATIENT) as store:
            await store.get("public.aa")
            assert len(await raw.client_list()) > 1
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await serve()

    async def all_are_closed() -> bool:
        return len(await raw.client_list()) == 1  # the one that asks

    await until(all_are_closed)


async def test_used_bytes_are_what_the_server_reports(redis_store: RedisStore) -> None:
    """Of its memory."""
    used = await redis_store.used_bytes()
    assert used
    assert used > 0
