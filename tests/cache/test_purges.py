"""A purge in one worker holds in all of them, also for requests in flight and for workers that were cut off."""

import asyncio
import time
from typing import Literal

import pytest
import redis.asyncio

from cache.entries.generations import Purge
from cache.entries.key import Key
from cache.entries.outcomes import Failed, Hit, Miss
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.stores.memory import MemoryStore
from cache.stores.redis_store import RedisStore, open_redis_store
from tests.cache.conftest import PATIENT
from tests.cache.test_exact import answer_to, key_of, tier_of, worker, written
from tests.cache.valkey import Valkey
from tests.waiting import until

A, B = "a" * 20, "b" * 20


async def is_gone(cache: ExactCache, key: Key) -> bool:
    return isinstance(await cache.lookup(key), Miss)


@pytest.mark.parametrize(
    ("scope", "name", "purged"),
    [
        ("all", "", {(A, "m"), (A, "other"), (B, "m")}),
        ("namespace", A, {(A, "m"), (A, "other")}),
        ("model", "m", {(A, "m"), (B, "m")}),
        ("namespace", "unknown", set()),
        ("model", A, set()),
    ],
)
async def test_a_purge_is_seen_by_all_workers(
    valkey: Valkey, scope: Literal["all", "namespace", "model"], name: str, purged: set[tuple[str, str]]
) -> None:
    """A purge removes the entries of its scope, and no others, from every worker and from Redis."""
    owners = [(A, "m"), (A, "other"), (B, "m")]
    keys = {owner: key_of(number, owner[0]) for number, owner in enumerate(owners)}
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        for (_, model), key in keys.items():
            await written(one, answer_to(one, key, model))
            assert await tier_of(other, key) == "redis"
        await one.purge(scope, name)
        for owner in purged:
            assert await is_gone(one, keys[owner])
        for owner in purged:
            await until(lambda key=keys[owner]: is_gone(other, key), within=1.8)  # type: ignore[misc]
        for owner in set(owners) - purged:
            assert await tier_of(one, keys[owner]) == await tier_of(other, keys[owner]) == "memory"
        async with worker(valkey.url) as late:
            for owner in owners:
                assert isinstance(await late.lookup(keys[owner]), Miss) == (owner in purged)


async def test_a_purge_of_a_tag_is_seen_by_all_workers(valkey: Valkey) -> None:
    """It concerns what has the tag, alone or with others; an answer that was being computed then is not kept."""
    names = {key_of(1, A): ("x",), key_of(2, A): ("y", "x"), key_of(3, B): ("y",), key_of(4, B): ()}
    purged = list(names)[:2]
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        for key, tags in names.items():
            await written(one, answer_to(one, key, tags=one.tagged(tags)))
            assert await tier_of(other, key) == "redis"
        late_answer = answer_to(other, key_of(5), tags=other.tagged(["x"]))
        await one.purge("tag", "x")
        for key in purged:
            assert await is_gone(one, key)
            await until(lambda key=key: is_gone(other, key), within=1.8)  # type: ignore[misc]
        for key in set(names) - set(purged):
            assert await tier_of(one, key) == await tier_of(other, key) == "memory"
        await other.store(late_answer)
        assert await is_gone(other, key_of(5))
        async with worker(valkey.url) as late:
            assert [await is_gone(late, key) for key in names] == [True, True, False, False]
        await written(other, answer_to(other, key_of(5), tags=other.tagged(["x"])))
        assert await tier_of(one, key_of(5)) == "redis"


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "redis"])
async def test_too_many_purged_tags_purge_what_has_a_tag(
    valkey: Valkey, shared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their number is bounded; what has no tag stays, and tags can be purged as before."""
    monkeypatch.setattr("cache.exact._MAX_TAGS", 5)
    async with worker(valkey.url) as with_redis:
        cache = with_redis if shared else ExactCache(MemoryStore(2**24), None, keep_stale=60)
        await cache.store(answer_to(cache, key_of(1)))
        await cache.store(answer_to(cache, key_of(2), tags=cache.tagged(["kept"])))
        for number in range(6):
            assert await tier_of(cache, key_of(2)) == "memory"
            await cache.purge("tag", f"t{number}")
        await cache.sync_purges()
        assert "all answers with tags" in caplog.text
        assert await is_gone(cache, key_of(2))
        assert await tier_of(cache, key_of(1)) == "memory"
        assert cache._generations.purged_tags <= 5  # Redis may tell of purges of before once more
        await cache.store(answer_to(cache, key_of(2), tags=cache.tagged(["kept"])))
        assert await tier_of(cache, key_of(2)) == "memory"
        await cache.purge("tag", "kept")
        assert await is_gone(cache, key_of(2))


async def test_a_purge_of_a_layer_concerns_it_alone(valkey: Valkey) -> None:
    """The answers count in the exact cache; processes that start later know the time as well."""
    now = time.time()
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        await written(one, answer_to(one, key_of(1), created=now - 1))
        await one.purge_before(now, "semantic")
        await one.purge_before(now - 9, "semantic")
        assert await tier_of(one, key_of(1)) == "memory"
        await until(lambda: other.purged_before("semantic") == now, within=1.8)
        async with worker(valkey.url) as late:
            assert late.purged_before("semantic") == now
            assert late.purged_before("another") == 0.0


async def test_a_purge_by_age_is_seen_by_all_workers(valkey: Valkey) -> None:
    """Also by those that start later; of two times the later one holds, and what is stored afterwards counts."""
    now = time.time()
    keys = [key_of(number, A) for number in range(3)]
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        for age, key in zip((100, 50, 0), keys, strict=True):
            await written(one, answer_to(one, key, created=now - age))
            assert await tier_of(other, key) == "redis"
        await one.purge_before(now - 75)
        await other.purge_before(now - 90)
        await until(lambda: is_gone(other, keys[0]), within=1.8)
        assert await is_gone(one, keys[0])
        async with worker(valkey.url) as late:
            assert await is_gone(late, keys[0])
            assert [await tier_of(late, key) for key in keys[1:]] == ["redis", "redis"]
        await written(one, answer_to(one, keys[0]))
        assert await tier_of(one, keys[0]) == "memory"


async def test_a_purge_by_age_that_redis_has_lost_is_told_again(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """As a failover to a replica can lose it; nonsense from another writer ends no cache."""
    now = time.time()
    async with worker(valkey.url) as one:
        key = key_of(1, A)
        kept = answer_to(one, key, created=now - 100)
        await one.purge_before(now - 75)
        for token in (b"1.0", b"nonsense", b"inf", b"nan"):
            await raw.hset("keepgate:generations", "before", token)
            await one.sync_purges()
            assert await raw.hget("keepgate:generations", "before") == repr(now - 75).encode()
        assert not one.counts(kept)
        assert one.counts(answer_to(one, key, created=now))


async def test_a_purge_frees_the_memory_of_its_entries(valkey: Valkey) -> None:
    """A purge frees the memory of the entries of its scope in every worker."""
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        for number in range(3000):
            for cache in (one, other):
                key = key_of(number, A if number % 3 else B)
                await cache.memory.put(answer_to(cache, key), 60)
        await one.purge("namespace", A)
        assert len(one.memory) == 1000

        async def freed() -> bool:
            return len(other.memory) == 1000

        await until(freed, within=1.8)


async def test_an_answer_computed_during_a_purge_is_not_kept(valkey: Valkey) -> None:
    """An answer whose request began before a purge is not kept by any worker."""
    key = key_of(1)
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        here, there = answer_to(one, key), answer_to(other, key)
        await one.purge("all")
        await written(one, here)
        assert await is_gone(one, key)
        assert len(one.memory) == 0
        await written(other, there)
        await until(lambda: is_gone(other, key), within=1.8)
        assert await is_gone(one, key)
        await written(one, answer_to(one, key))
        assert await tier_of(one, key) == "memory"


async def test_purged_entries_stay_purged_after_redis_was_flushed(valkey: Valkey) -> None:
    """An entry of before a purge is not kept even after Redis has lost the purge."""
    key = key_of(1)
    raw = redis.asyncio.Redis.from_url(valkey.url)
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        early = answer_to(one, key)
        await written(one, early)
        assert await tier_of(other, key) == "redis"
        await one.purge("all")
        await until(lambda: is_gone(other, key), within=1.8)
        await raw.flushall()
        for cache in (one, other):
            await cache.sync_purges()
        assert not one.counts(early)
        await written(one, early)
        assert await is_gone(one, key)
        assert await is_gone(other, key)
        async with worker(valkey.url) as late:
            assert late.generation("public", "m") == one.generation("public", "m") == other.generation("public", "m")
            assert not late.counts(early)
        await written(other, answer_to(other, key))
        assert await tier_of(one, key) == "redis"
    await raw.aclose()


async def test_purges_after_redis_was_flushed_are_still_followed(valkey: Valkey) -> None:
    """Workers follow purges that are made after Redis was flushed."""
    key = key_of(1)
    raw = redis.asyncio.Redis.from_url(valkey.url)
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        await one.purge("all")
        await raw.flushall()
        await written(one, answer_to(one, key))
        await until(lambda: _hits(other, key), within=4)
        await one.purge("model", "m")
        await until(lambda: is_gone(other, key), within=4)
    await raw.aclose()


async def _hits(cache: ExactCache, key: Key) -> bool:
    return isinstance(await cache.lookup(key), Hit)


async def test_a_reconnected_worker_learns_what_was_purged(own_valkey: Valkey) -> None:
    """A worker that was cut off during a purge serves nothing purged once it is connected again."""
    key, deleted = key_of(1), key_of(2)
    raw = redis.asyncio.Redis.from_url(own_valkey.url)
    # `other` alone comes by this path, and has a name by which the server knows its connections.
    path = own_valkey.socket.with_name("other")
    path.symlink_to(own_valkey.socket)
    async with worker(own_valkey.url) as one, worker(f"unix://{path}?client_name=other") as other:
        for each in (key, deleted):
            await written(one, answer_to(one, each))
            assert await tier_of(other, each) == "redis"
        assert other.redis
        path.unlink()
        for client in await raw.client_list():
            if client["name"] == "other":
                await raw.client_kill_filter(_id=client["id"])
        async with asyncio.timeout(10):
            await other.redis.breaker.wait_opened()
        await one.purge("all")
        await one.delete(deleted.id)
        assert isinstance(await other.lookup(key_of(3)), Failed)
        path.symlink_to(own_valkey.socket)
        async with asyncio.timeout(10):
            await other.redis.breaker.wait_closed()
        await until(lambda: is_gone(other, key), within=5)
        await until(lambda: is_gone(other, deleted), within=5)
    await raw.aclose()


async def test_after_an_outage_lookups_fail_until_the_purges_were_read(valkey: Valkey) -> None:
    """A lookup after an outage fails until the purges made during the outage were read."""
    key = key_of(1)
    async with worker(valkey.url) as one, open_redis_store(valkey.url, PATIENT) as store:
        other = ExactCache(MemoryStore(2**20), store, keep_stale=60)  # nothing follows the purges for it
        await other.sync_purges()
        await written(one, answer_to(one, key))
        store.breaker.trip(ConnectionError("cut"))
        await one.purge("all")
        async with asyncio.timeout(10):
            await store.breaker.wait_closed()
        assert isinstance(await other.lookup(key), Failed)
        with pytest.raises(StoreUnavailable):
            await other.entry(key.id)
        await other.sync_purges()
        assert isinstance(await other.lookup(key), Miss)


async def test_the_purges_are_read_at_once_after_an_outage(valkey: Valkey) -> None:
    """Lookups succeed within a second after an outage ends."""
    async with worker(valkey.url) as cache:
        assert cache.redis
        for _ in range(10):
            cache.redis.breaker.trip(ConnectionError("cut"))
            await until(lambda: is_gone(cache, key_of(1)), within=1.8)


async def test_a_purge_during_an_outage_reaches_all_workers_after_it(own_valkey: Valkey) -> None:
    """A purge that fails during an outage holds in its own worker at once and in all others after the outage."""
    key = key_of(1)
    async with worker(own_valkey.url) as one:
        await one.purge("all")  # so that Redis has an older purge of the same scope
        await written(one, answer_to(one, key))
        await own_valkey.kill()
        with pytest.raises(StoreUnavailable):
            await one.purge("all")
        assert not isinstance(await one.lookup(key), Hit)
        await own_valkey.start()
        await until(lambda: is_gone(one, key), within=15)
        async with worker(own_valkey.url, PATIENT) as other:
            assert await is_gone(other, key)


async def test_workers_agree_after_concurrent_purges(valkey: Valkey) -> None:
    """All workers agree on the generation after concurrent purges, and no earlier entry counts."""
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        before = [answer_to(cache, key_of(1)) for cache in (one, other)]
        for _ in range(20):
            await asyncio.gather(one.purge("all"), other.purge("all"), one.sync_purges(), other.sync_purges())

        async def agreed() -> bool:
            return one.generation(A, "m") == other.generation(A, "m")

        await until(agreed, within=1.8)
        assert not any(cache.counts(kept) for cache in (one, other) for kept in before)


async def test_generations_read_before_a_purge_do_not_undo_it(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge is not undone by generations that Redis sent before it."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        cache = ExactCache(MemoryStore(2**20), store, keep_stale=60)
        await cache.purge("all")
        replied, purged = asyncio.Event(), asyncio.Event()
        read = RedisStore.generations

        async def slow(of: RedisStore) -> dict[str, str]:
            reply = await read(of)
            replied.set()
            await purged.wait()
            return reply

        monkeypatch.setattr(RedisStore, "generations", slow)
        learning = asyncio.create_task(cache.sync_purges())
        await replied.wait()
        before = answer_to(cache, key_of(1))
        await cache.purge("all")
        after = answer_to(cache, key_of(1))
        purged.set()
        await learning
        assert not cache.counts(before)
        assert cache.counts(after)


async def test_of_two_purges_the_one_that_redis_received_last_holds(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge of another worker that is read while an own purge is under way does not replace the own one."""
    async with worker(valkey.url) as other, open_redis_store(valkey.url, PATIENT) as store:
        one = ExactCache(MemoryStore(2**20), store, keep_stale=60)
        position, _ = await store.purges_since("")
        publish = RedisStore.purge

        async def overtaken(to: RedisStore, purge: Purge) -> None:
            if to is store:
                await other.purge("all")
                _, events = await store.purges_since(position)
                for event in events:
                    assert isinstance(event, Purge)
                    # As the reader of purges does, of which nothing public says when it has read them.
                    one._generations.apply(event)
            await publish(to, purge)

        monkeypatch.setattr(RedisStore, "purge", overtaken)
        await one.purge("all")
        assert one.generation(A, "m").split(".")[0] == (await store.generations())["all"]


async def test_the_cost_of_a_purge_does_not_depend_on_its_entries(valkey: Valkey) -> None:
    """The number of commands of a purge does not depend on the number of entries."""
    raw = redis.asyncio.Redis.from_url(valkey.url)
    async with worker(valkey.url) as cache:
        assert cache.redis
        for number in range(500):
            await cache.store(answer_to(cache, key_of(number, A)))
        await cache.redis.flush()
        before = (await raw.info("stats"))["total_commands_processed"]
        await cache.purge("namespace", A)
        after = (await raw.info("stats"))["total_commands_processed"]
        assert after - before < 20
        assert await is_gone(cache, key_of(7, A))
    await raw.aclose()


async def test_a_stream_that_went_back_is_read_again(valkey: Valkey) -> None:
    """After a position that the stream does not reach, as after a failover, deletions are repeated, and no tokens."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        await store.purge(Purge("all", "", "old"))
        await store.delete("public.aa")
        await store.purge(Purge("all", "", "new"))
        position, events = await store.purges_since("9999999999999-0")
        assert events == ["public.aa"]
        assert await store.purges_since("") == (position, [])
        await store.delete("public.bb")
        assert (await store.purges_since(position))[1] == ["public.bb"]


async def test_the_hash_of_generations_is_bounded(valkey: Valkey) -> None:
    """A purge of everything takes the place of all others, in Redis and in every worker."""
    raw = redis.asyncio.Redis.from_url(valkey.url)
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        for number in range(20):
            await one.purge("namespace", f"{number}")
        early = answer_to(one, key_of(1, "7"))
        await raw.hset("keepgate:generations", mapping={f"namespace:x{number}": "1" for number in range(10_000)})
        await one.sync_purges()
        assert await raw.hlen("keepgate:generations") == 1
        await until(lambda: one.generation("7", "m") == other.generation("7", "m"), within=5)
        assert not one.counts(early)
        assert not other.counts(early)
        assert one.generation("7", "m").endswith(".0.0")
    await raw.aclose()
