"""Conversations: kept in Valkey and in memory alike, apart by namespace, and missed loudly when Valkey is down."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import CorruptEntry, StoreUnavailable
from cache.stores import conversations as conversations_module
from cache.stores.conversations import Conversations, Record, decode_record, encode_record
from cache.stores.redis_store import RedisStore, open_redis_store
from tests.cache.conftest import PATIENT
from tests.cache.valkey import Valkey
from tests.waiting import until

LARGE = bytes(range(256)) * 2**12


@pytest.fixture(autouse=True)
def patient_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save has a tenth of a second, which a busy machine may take."""
    monkeypatch.setattr(conversations_module, "_SAVE_DEADLINE", PATIENT)


@pytest.fixture(params=["memory", "redis"])
async def conversations(request: pytest.FixtureRequest, valkey: Valkey) -> AsyncIterator[Conversations]:
    if request.param == "memory":
        yield Conversations(None, 60)
        return
    async with open_redis_store(valkey.url, PATIENT) as store:
        yield Conversations(store, 60)


async def redis_value(raw: redis.asyncio.Redis) -> tuple[bytes, bytes]:
    """The only key of a response, and its value."""
    (key,) = await raw.keys("keepgate:response:*")
    value = await raw.get(key)
    assert isinstance(key, bytes)
    assert isinstance(value, bytes)
    return key, value


@pytest.mark.parametrize("record", [b"", b'{"input":[]}', LARGE, b"a" * 10**7])
async def test_a_record_comes_back_as_it_was(conversations: Conversations, record: bytes) -> None:
    """A record of any length is loaded as it was saved."""
    await conversations.save("public", "resp_1", record)
    assert await conversations.load("public", "resp_1") == record


async def test_an_unknown_response_is_not_found(conversations: Conversations) -> None:
    """An unknown id gives None, and deleting it gives False."""
    assert await conversations.load("public", "resp_1") is None
    assert await conversations.delete("public", "resp_1") is False


@pytest.mark.parametrize("response_id", ["", "a b\r\n*", "é\u2028", "\ud800", "x" * 100_000, "keepgate:entry:public.a"])
async def test_an_id_is_the_clients_to_choose(conversations: Conversations, response_id: str) -> None:
    """Any text is an id."""
    assert await conversations.load("public", response_id) is None
    assert await conversations.delete("public", response_id) is False


async def test_a_save_replaces_an_older_record(conversations: Conversations) -> None:
    """The last of several records with one id is loaded."""
    for number in range(3):
        await conversations.save("public", "resp_1", b"%d" % number)
    assert await conversations.load("public", "resp_1") == b"2"


async def test_a_delete_removes_one_record(conversations: Conversations) -> None:
    """A delete removes one record and returns whether it was there."""
    await conversations.save("public", "resp_1", b"1")
    await conversations.save("public", "resp_2", b"2")
    assert await conversations.delete("public", "resp_1") is True
    assert await conversations.load("public", "resp_1") is None
    assert await conversations.load("public", "resp_2") == b"2"
    assert await conversations.delete("public", "resp_1") is False


namespaces = st.text("ab:*", max_size=3)
ids = st.text("ab.:*", max_size=3)


@given(st.lists(st.tuples(namespaces, ids), unique=True, min_size=2, max_size=6))
@settings(max_examples=100, deadline=None)
async def test_namespaces_never_see_each_other(places: list[tuple[str, str]]) -> None:
    """Whatever the names, a record is loaded and deleted by its own namespace and id alone."""
    conversations = Conversations(None, 60)
    for namespace, response_id in places[1:]:
        await conversations.save(namespace, response_id, f"{namespace} {response_id}".encode())
    assert await conversations.load(*places[0]) is None
    assert await conversations.delete(*places[0]) is False
    for namespace, response_id in places[1:]:
        assert await conversations.load(namespace, response_id) == f"{namespace} {response_id}".encode()


async def test_tenants_of_one_valkey_never_see_each_other(conversations: Conversations) -> None:
    """A namespace loads and deletes nothing of another one with the same id."""
    await conversations.save("one", "resp_1", b"secret")
    assert await conversations.load("other", "resp_1") is None
    assert await conversations.delete("other", "resp_1") is False
    assert await conversations.load("one", "resp_1") == b"secret"
    with pytest.raises(ValueError, match="dot"):
        await conversations.load("one.x", "resp_1")


async def test_a_record_expires(valkey: Valkey) -> None:
    """A record is found before its lifetime ends and not after it."""
    async with open_redis_store(valkey.url, PATIENT) as store:
        for conversations in (Conversations(store, 0.3), Conversations(None, 0.3)):
            begun = time.monotonic()
            await conversations.save("public", "resp_1", b"x")
            assert await conversations.load("public", "resp_1") is not None or time.monotonic() - begun > 0.25

            async def is_gone(kept: Conversations = conversations) -> bool:
                return await kept.load("public", "resp_1") is None

            await until(is_gone)
            assert time.monotonic() - begun >= 0.29
            assert await conversations.delete("public", "resp_1") is False


@pytest.mark.parametrize("keep_for", [1e-9, 1e12, float("inf")])
async def test_any_lifetime_is_accepted(redis_store: RedisStore, keep_for: float) -> None:
    """A lifetime below a millisecond and an endless one are accepted."""
    await Conversations(redis_store, keep_for).save("public", "resp_1", b"x")


async def test_processes_share_records_through_valkey(valkey: Valkey) -> None:
    """A record that one process saves is loaded and deleted by another one."""
    async with open_redis_store(valkey.url, PATIENT) as one, open_redis_store(valkey.url, PATIENT) as other:
        await Conversations(one, 60).save("public", "resp_1", LARGE)
        assert await Conversations(other, 60).load("public", "resp_1") == LARGE
        assert await Conversations(other, 60).delete("public", "resp_1") is True
        assert await Conversations(one, 60).load("public", "resp_1") is None


async def test_a_long_record_is_compressed(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """A long record takes less than a tenth of its length if it repeats itself."""
    await Conversations(redis_store, 60).save("public", "resp_1", LARGE)
    _, value = await redis_value(raw)
    assert len(value) < len(LARGE) / 10


@pytest.mark.parametrize("record", [b"x", LARGE])
async def test_a_corrupt_value_is_a_miss(redis_store: RedisStore, raw: redis.asyncio.Redis, record: bytes) -> None:
    """A value that is not what was saved counts as none, and is counted."""
    conversations = Conversations(redis_store, 60)
    await conversations.save("public", "resp_1", record)
    key, good = await redis_value(raw)
    middle = len(good) // 2
    broken = [b"", b"x", good[:-1], good + b"x", good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]]
    for number, value in enumerate(broken, start=1):
        await raw.set(key, value)
        assert await conversations.load("public", "resp_1") is None
        assert conversations.corrupt_records == number
    await raw.set(key, good)
    assert await conversations.load("public", "resp_1") == record
    assert not redis_store.breaker.is_open


async def test_the_value_of_another_response_is_a_miss(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """A whole value under the key of another namespace or response counts as none."""
    conversations = Conversations(redis_store, 60)
    await conversations.save("one", "resp_1", b"secret")
    key, value = await redis_value(raw)
    await raw.set(key.replace(b"one", b"other"), value)
    assert await conversations.load("other", "resp_1") is None
    assert conversations.corrupt_records == 1


async def test_a_valkey_that_does_not_answer_is_an_error(own_valkey: Valkey) -> None:
    """While Valkey is frozen nothing is saved, loaded or deleted, and each call says so; one deadline, once."""
    async with open_redis_store(own_valkey.url, PATIENT) as store:
        conversations = Conversations(store, 60)
        await conversations.save("public", "resp_1", b"x")
        own_valkey.freeze()
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await conversations.load("public", "resp_1")
        for _ in range(50):
            with pytest.raises(StoreUnavailable):
                await conversations.save("public", "resp_2", b"x")
            with pytest.raises(StoreUnavailable):
                await conversations.delete("public", "resp_1")
        assert time.monotonic() - begun < 3.5
        assert store.breaker.times_opened == 1
        own_valkey.thaw()
        async with asyncio.timeout(15):
            await store.breaker.wait_closed()
        assert await conversations.load("public", "resp_1") == b"x"


async def test_a_load_waits_for_a_valkey_that_comes_back(own_valkey: Valkey) -> None:
    """A record is found though Valkey is away when it is asked for, if it is back within the deadline of a load."""
    async with open_redis_store(own_valkey.url, PATIENT) as store:
        conversations = Conversations(store, 60)
        await conversations.save("public", "resp_1", b"x")
        await own_valkey.kill()
        with pytest.raises(StoreUnavailable):
            await store.command(("GET", "anything"))
        assert store.breaker.is_open
        loading = asyncio.create_task(conversations.load("public", "resp_1"))
        await own_valkey.start()
        assert await loading == b"x"


async def test_a_refused_command_is_an_error(late_valkey: Valkey) -> None:
    """A full Valkey refuses a record, which raises StoreUnavailable, and still answers."""
    await late_valkey.start("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    async with open_redis_store(late_valkey.url, PATIENT) as store:
        conversations = Conversations(store, 60)
        await conversations.save("public", "resp_1", b"x")

        async def fill() -> None:
            for number in range(1000):
                await conversations.save("public", f"resp_{number}", b"x" * 16_000)

        with pytest.raises(StoreUnavailable, match="memory"):
            await fill()
        assert await conversations.load("public", "resp_1") is not None
        assert not store.breaker.is_open


async def test_a_value_of_another_type_is_an_error(redis_store: RedisStore, raw: redis.asyncio.Redis) -> None:
    """An error reply of Valkey raises StoreUnavailable."""
    conversations = Conversations(redis_store, 60)
    await conversations.save("public", "resp_1", b"x")
    key, _ = await redis_value(raw)
    await raw.delete(key)
    await raw.rpush(key, "x")
    with pytest.raises(StoreUnavailable, match="wrong kind of value"):
        await conversations.load("public", "resp_1")


async def test_a_record_that_is_too_long_is_an_error(conversations: Conversations) -> None:
    """A record beyond the limit is refused and not cut."""
    with pytest.raises(StoreUnavailable, match="too long"):
        await conversations.save("public", "resp_1", b"x" * (32 * 2**20 + 1))


operations = st.one_of(
    st.tuples(st.just("save"), st.integers(0, 9), st.integers(0, 9000)),
    st.tuples(st.just("load"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("delete"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("wait"), st.just(0), st.integers(0, 40)),
)


@given(st.lists(operations, max_size=40))
@settings(max_examples=150, deadline=None)
async def test_memory_is_bounded_and_keeps_what_was_used_last(steps: list[tuple[str, int, int]]) -> None:
    """In any order of operations, what is loaded is what was saved, and what is kept is within the capacity."""
    now = 1000.0
    conversations = Conversations(None, 60, capacity=20_000, clock=lambda: now)
    saved: dict[int, tuple[bytes, float]] = {}
    for operation, number, amount in steps:
        if operation == "save":
            saved[number] = (bytes([number]) * amount, now)
            await conversations.save("public", f"resp_{number}", saved[number][0])
            assert await conversations.load("public", f"resp_{number}") == saved[number][0]
        elif operation == "delete":
            saved.pop(number, None)
            await conversations.delete("public", f"resp_{number}")
            assert await conversations.load("public", f"resp_{number}") is None
        elif operation == "load":
            found = await conversations.load("public", f"resp_{number}")
            assert found is None or (number in saved and found == saved[number][0] and saved[number][1] + 60 > now)
        else:
            now += amount
    held = [await conversations.load("public", f"resp_{number}") for number in range(10)]
    assert sum(len(record) for record in held if record is not None) <= 20_000


async def test_memory_forgets_the_least_recently_used() -> None:
    """A record that was loaded outlives an older use of another one, when a third needs its place."""
    conversations = Conversations(None, 60, capacity=3000)
    for response_id in ("resp_1", "resp_2"):
        await conversations.save("public", response_id, b"x" * 1000)
    assert await conversations.load("public", "resp_1") is not None
    await conversations.save("public", "resp_3", b"x" * 1000)
    held = [await conversations.load("public", f"resp_{number}") is not None for number in (1, 2, 3)]
    assert held == [True, False, True]


async def test_a_record_that_memory_cannot_hold_is_not_kept() -> None:
    """A record beyond the capacity without Valkey is not found later, and takes the place of no other."""
    conversations = Conversations(None, 60, capacity=1000)
    await conversations.save("public", "resp_1", b"x")
    await conversations.save("public", "resp_2", b"x" * 2000)
    assert await conversations.load("public", "resp_1") == b"x"
    assert await conversations.load("public", "resp_2") is None


json_objects = st.dictionaries(st.text(max_size=3), st.none() | st.integers(-9, 9) | st.text(max_size=3), max_size=3)


@given(st.lists(json_objects, max_size=3), json_objects, st.lists(json_objects, max_size=2))
@settings(max_examples=50, deadline=None)
def test_a_record_is_json(items: list[Any], response: dict[str, Any], output: list[Any]) -> None:
    """A record is decoded as it was encoded, and its items end with the output."""
    record = Record(items, {**response, "output": output})
    assert decode_record(encode_record(record)) == record
    assert record.items == [*items, *output]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"input":[1],"response":{"output":[]}}',
        b'{"input":[]}',
        b'{"input":[],"response":{}}',
        b'{"input":[],"response":{"output":[1]}}',
        b'{"input":[],"response":{"output":' + b"[" * 2000 + b"]" * 2000 + b"}}",
    ],
)
def test_what_is_no_record_is_corrupt(data: bytes) -> None:
    """Bytes that are no record raise CorruptEntry."""
    with pytest.raises(CorruptEntry):
        decode_record(data)
