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
from cache.stores.redis_store import _CONNECTIONS, RedisStore, open_redis_store
from tests.cache.conftest import PATIENT
from tests.cache.entries.entry_examples import entry, until
from tests.cache.valkey import Valkey

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
    """The requests in flight wait for at most one deadline, those after them for nothing; then it is used again."""
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


async def test_writes_wait_for_a_frozen_redis_and_are_read_meanwhile(own_valkey: Valkey) -> None:
    """What was computed during an outage is an answer at once, and is in Redis after it."""
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


async def test_an_entry_that_waited_too_long_is_no_answer(own_valkey: Valkey) -> None:
    """The time an entry waits to be written is part of its time."""
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
    """A restart is an outage, and what was kept before it is found after it."""
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


async def test_redis_may_come_later(late_valkey: Valkey) -> None:
    """A gateway that starts before its Redis starts all the same."""
    async with open_redis_store(late_valkey.url, DEADLINE) as store:
        assert store.breaker.is_open
        assert await seconds_to_fail(store, 5) < DEADLINE / 2
        await late_valkey.start()
        await closed(store)
        assert await store.get("public.kept") is None


async def test_nobody_listens_at_the_port() -> None:
    """A refused connection is an outage, not an error."""
    async with open_redis_store("redis://127.0.0.1:1/0", DEADLINE) as store:
        await seconds_to_fail(store, 3)


@pytest.mark.parametrize("password", ["", ":wrong@"])
async def test_refused_credentials_are_said_at_once(late_valkey: Valkey, password: str) -> None:
    """A wrong password will not become right: the start fails and says why, without the password."""
    await late_valkey.start("--requirepass", "secret")
    url = late_valkey.url.replace("unix://", f"unix://{password}")
    with pytest.raises(StoreUnavailable, match="credentials") as raised:
        async with open_redis_store(url, DEADLINE):
            pytest.fail("the store opened")
    assert "wrong@" not in str(raised.value)
    async with open_redis_store(late_valkey.url.replace("unix://", "unix://:secret@"), PATIENT) as store:
        assert await store.get("public.aa") is None


async def test_a_full_redis_drops_writes_and_answers_on(late_valkey: Valkey) -> None:
    """Out of memory is a refused write, counted; lookups go on."""
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
    """Bytes that are no entry are never an answer and never look like a miss; they are counted and removed."""
    good = encode_entry(entry("public.aa"))
    for number, value in enumerate([b"", b"x", good[:-1], good[:40] + b"\x00" + good[41:]], start=1):
        await raw.set(redis_key("public.aa"), value)
        with pytest.raises(StoreUnavailable, match="stored bytes"):
            await redis_store.get("public.aa")
        assert redis_store.corrupt_entries == number
        assert await redis_store.get("public.aa") is None
    assert not redis_store.breaker.is_open


async def test_the_bytes_of_another_entry_are_corrupt(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """A whole entry under the wrong key, of another tenant even, is no answer."""
    await raw.set(redis_key("mine.aa"), encode_entry(entry("yours.aa")))
    with pytest.raises(StoreUnavailable, match="another entry"):
        await redis_store.get("mine.aa")
    assert redis_store.corrupt_entries == 1


async def test_a_value_of_another_type_is_a_failure(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """An error that Redis answers with is neither a miss nor an outage."""
    await raw.rpush(redis_key("public.aa"), "x")
    with pytest.raises(StoreUnavailable, match="wrong kind of value"):
        await redis_store.get("public.aa")
    assert not redis_store.breaker.is_open


async def test_clients_that_leave_never_mix_up_the_answers(valkey: Valkey) -> None:
    """Lookups are cancelled at any moment; every other one gets its own entry, and no connection is lost."""
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
        pool = store._client.connection_pool
        assert not pool._in_use_connections


async def test_a_cancelled_lookup_is_cancelled(valkey: Valkey) -> None:
    """At whatever point it is: else deadlines would pass unnoticed and a shutdown would hang."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        for turns in range(40):
            lookup = asyncio.create_task(store.get("public.none"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not lookup.done():
                lookup.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await lookup


async def test_a_crowd_is_no_outage(valkey: Valkey) -> None:
    """More lookups than there are connections wait for each other."""
    async with open_redis_store(valkey.url, 30.0) as store:
        await store.put(entry(), 60)
        await store.flush()
        assert all(await asyncio.gather(*(store.get("public.aa") for _ in range(1000))))
        assert store.breaker.times_opened == 0


async def test_a_new_connection_sends_nothing_but_its_lookup(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """A burst of lookups may have to open its connections within its deadline."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        before = (await raw.info("stats"))["total_commands_processed"]
        await asyncio.gather(*(store.get("public.aa") for _ in range(_CONNECTIONS)))
        after = (await raw.info("stats"))["total_commands_processed"]
    assert after - before < 1.5 * _CONNECTIONS


async def test_connections_that_redis_has_ended_are_no_outage(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """A server that closes idle connections, or all of them, is as well as before."""
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


async def test_connections_that_broke_are_no_outage(valkey: Valkey) -> None:
    """One that was reset while nobody used it is replaced like one that ended."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        await store.put(entry("public.kept"), 60)
        await store.flush()
        await asyncio.gather(*(store.get("public.kept") for _ in range(8)))
        for connection in store._connections._idle:
            assert connection._writer
            connection._writer.transport.abort()
        await asyncio.sleep(0.01)  # the transport reports its end in a turn of the loop of its own
        for _ in range(20):
            assert await store.get("public.kept") is not None
        assert store.breaker.times_opened == 0


async def test_a_crowd_that_is_late_is_no_outage(own_valkey: Valkey) -> None:
    """Who got no connection within the deadline goes on without Redis, and the breaker is not told."""
    async with open_redis_store(own_valkey.url, 5.0) as store:
        own_valkey.freeze()
        waiting = [asyncio.create_task(store.get(f"public.{n}")) for n in range(_CONNECTIONS)]
        await asyncio.sleep(0)
        store._deadline = 0.05
        with pytest.raises(StoreUnavailable, match="every connection is busy"):
            await store.get("public.late")
        assert not store.breaker.is_open
        own_valkey.thaw()
        assert await asyncio.gather(*waiting) == [None] * _CONNECTIONS


async def test_a_lost_connection_of_the_background_is_no_outage(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """The reader of purges goes on with another one, and lookups do not notice."""
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


async def test_what_redis_could_not_give_in_time_is_not_given_to_it(
    redis_store: RedisStore, raw: redis.asyncio.Redis
) -> None:
    """An answer of megabytes stays in memory: fetching it would look like an outage."""
    await redis_store.put(entry("public.large", body=b"x" * (2**20 + 1)), 60)
    await redis_store.put(entry("public.small", body=b"x" * 2**20), 60)
    await redis_store.flush()
    assert await raw.exists(redis_key("public.large")) == 0
    assert await raw.exists(redis_key("public.small")) == 1


async def test_waiting_writes_are_bounded(folder: Path) -> None:
    """When Redis takes nothing, what waits for it does not grow without end, and the refusal is said."""
    async with open_redis_store(f"unix://{folder}/nobody", DEADLINE) as store:
        for number in range(60):
            await store.put(entry(f"public.{number}", body=b"x" * 2**20), 60)
        for number in range(60, 70):
            with contextlib.suppress(StoreUnavailable):
                await store.put(entry(f"public.{number}", body=b"x" * 2**20), 60)
        with pytest.raises(StoreUnavailable, match="too many writes"):
            await store.put(entry("public.last", body=b"x" * 2**20), 60)
        assert store.writes_dropped > 0
        assert sum(len(w.entry.body) for w in store._pending.values() if w.entry) <= 64 * 2**20
        assert store._pending_bytes == sum(w.size for w in store._pending.values()) <= 64 * 2**20
        assert await store.get("public.0") is not None


async def test_tiny_writes_are_bounded_too(folder: Path) -> None:
    """What a waiting write costs beside its body counts."""
    async with open_redis_store(f"unix://{folder}/nobody", DEADLINE) as store:
        with contextlib.suppress(StoreUnavailable):
            for number in range(100_000):
                await store.put(entry(f"public.{number}", body=b""), 60)
        assert len(store._pending) < 100_000


async def test_delete_and_write_keep_their_order(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """A delete after a put deletes it even while the write is on its way; a put after a delete stays."""
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
    """A write that has begun would otherwise end after the delete, and bring the entry back."""
    async with open_redis_store(own_valkey.url, PATIENT) as store:
        for _ in range(3):
            own_valkey.freeze()
            await store.put(entry("public.aa", body=b"x" * 1_000_000), 60)
            async with asyncio.timeout(5):
                while not store._writing.locked():  # noqa: ASYNC110 (to look at every turn of the loop)
                    await asyncio.sleep(0)
            delete = asyncio.create_task(store.delete("public.aa"))
            await asyncio.sleep(0)
            own_valkey.thaw()
            assert await delete is True
            async with store._writing:  # the write has ended
                pass
            assert await store.get("public.aa") is None


async def test_writes_arrive_in_order(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """Of many puts of one entry the last one stays, whichever were on their way."""
    for number in range(300):
        await redis_store.put(entry("public.aa", prompt_tokens=number), 60)
        if number % 7 == 0:
            await asyncio.sleep(0)
    await redis_store.flush()
    data = await raw.get(redis_key("public.aa"))
    assert isinstance(data, bytes)
    assert decode_entry(data).prompt_tokens == 299


async def test_what_waits_is_written_at_the_end(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """A shutdown loses nothing that Redis can take."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        for number in range(500):
            await store.put(entry(f"public.{number}"), 60)
    assert await raw.dbsize() == 500


async def test_a_shutdown_does_not_wait_for_a_frozen_redis(own_valkey: Valkey) -> None:
    """It gives up what waits, says so, and ends."""
    async with asyncio.timeout(10):
        async with open_redis_store(own_valkey.url, DEADLINE) as store:
            await store.get("public.aa")
            own_valkey.freeze()
            await store.put(entry(), 60)


async def test_what_the_caller_raises_comes_out_as_it_is(valkey: Valkey) -> None:
    """The store adds nothing to an error that passes through it, and closes its connections all the same."""
    opened: list[RedisStore] = []

    async def serve() -> None:
        async with open_redis_store(valkey.url, PATIENT) as store:
            opened.append(store)
            await store.get("public.aa")
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await serve()
    assert not any(one.is_connected for one in opened[0]._client.connection_pool._available_connections)


async def test_usage_counts_keys_and_bytes(redis_store: RedisStore) -> None:
    """(keys, bytes) as the server has them."""
    await redis_store.put(entry(), 60)
    await redis_store.flush()
    keys, used = await redis_store.usage()
    assert keys == 1
    assert used > 0
