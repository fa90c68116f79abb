"""The memory tier: bounded by bytes whatever is done to it, least recently used out first."""

import functools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.entries.entry import Entry
from cache.stores.memory import MemoryStore
from tests.cache.entries.entry_examples import entry

CAPACITY = 64_000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def padding(size: int, _: Entry) -> bytes:
    return b"y" * size


ids = st.sampled_from([f"public.{number}" for number in range(12)])
sizes = st.integers(0, CAPACITY // 8)
digests = st.sampled_from([bytes([number]) * 16 for number in range(20)])
forms = st.sampled_from(["plain", "stream", "usage"])
operations = st.one_of(
    st.tuples(st.just("put"), ids, sizes, st.floats(-1, 100)),
    st.tuples(st.just("get"), ids),
    st.tuples(st.just("delete"), ids),
    st.tuples(st.just("form"), ids, forms, st.integers(0, CAPACITY)),
    st.tuples(st.just("same form"), ids, forms),
    st.tuples(st.just("alias"), ids, digests, forms),
    st.tuples(st.just("by alias"), digests),
    st.tuples(st.just("wait"), st.floats(0, 60)),
)


@given(st.lists(operations, max_size=60))
@settings(max_examples=200, deadline=None)
async def test_any_order_of_operations_keeps_the_invariants(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    """Any sequence of operations leaves the store within its capacity and without problems."""
    clock = Clock()
    store = MemoryStore(CAPACITY, clock)
    for operation, *arguments in steps:
        match operation, arguments:
            case "put", [entry_id, size, keep_for]:
                await store.put(entry(entry_id, body=b"x" * size), keep_for)
            case "get", [entry_id]:
                found = await store.get(entry_id)
                assert found is None or found.id == entry_id
            case "delete", [entry_id]:
                was_there = entry_id in store.ids()
                assert await store.delete(entry_id) == was_there
            case "form", [entry_id, name, size]:
                if slot := store.slot(entry_id):
                    store.form(slot, name, functools.partial(padding, size))
            case "same form", [entry_id, name]:
                if slot := store.slot(entry_id):
                    store.form(slot, name, lambda kept: kept.body)
            case "alias", [entry_id, raw_digest, name]:
                if slot := store.slot(entry_id):
                    store.alias(slot, raw_digest, name)
            case "by alias", [raw_digest]:
                if found_slot := store.by_alias(raw_digest):
                    slot, name = found_slot
                    assert slot.expires > clock.now
                    assert name in slot.forms
            case "wait", [seconds]:
                clock.now += seconds
        assert store.problems() == []
        assert store.size <= CAPACITY
        assert len(store) == len(store.ids())


async def test_a_wrong_size_is_a_problem() -> None:
    """A size that differs from the sum of the slots, or exceeds the capacity, is reported."""
    store = MemoryStore(CAPACITY)
    await store.put(entry(), 60)
    assert store.problems() == []
    store.size += CAPACITY
    assert [problem.split(",")[0] for problem in store.problems()] == [
        f"{store.size} bytes are kept",
        f"the size is {store.size}",
    ]


async def test_the_least_recently_used_entry_is_evicted_first() -> None:
    """A read, a form and a lookup by alias count as uses of an entry, and a peek does not."""
    store = MemoryStore(20_000)
    one = entry("public.0", body=b"x" * 100)
    await store.put(one, 60)
    room = 20_000 // store.size - 1  # and some for the form and the alias
    for number in range(1, room):
        await store.put(entry(f"public.{number}", body=b"x" * 100), 60)
    assert len(store) == room
    await store.get("public.0")
    slot = store.slot("public.1")
    assert slot
    store.form(slot, "plain", lambda kept: kept.body)
    store.alias(slot, b"d" * 16, "plain")
    await store.get("public.2")
    assert store.by_alias(b"d" * 16) == (slot, "plain")
    store.peek("public.3")
    while "public.3" in store.ids():
        await store.put(entry(f"public.{len(store)}.{store.evictions}", body=b"x" * 100), 60)
    assert {"public.0", "public.1", "public.2"} <= set(store.ids())
    assert store.evictions > 0


async def test_an_entry_is_found_by_its_request_in_each_form_of_api() -> None:
    """One entry has an alias for each of eight requests: four forms of API, streamed and not."""
    store = MemoryStore(2**20)
    await store.put(entry("public.0"), 60)
    slot = store.slot("public.0")
    assert slot
    store.form(slot, "plain", lambda kept: kept.body)
    digests = [bytes([number]) * 16 for number in range(8)]
    for digest in digests:
        store.alias(slot, digest, "plain")
    assert [store.by_alias(digest) for digest in digests] == [(slot, "plain")] * 8


async def test_an_entry_that_is_too_large_evicts_nothing() -> None:
    """An entry above an eighth of the capacity is not kept, and the others stay."""
    store = MemoryStore(CAPACITY)
    await store.put(entry("public.small"), 60)
    await store.put(entry("public.large", body=b"x" * (CAPACITY // 8)), 60)
    assert store.ids() == ["public.small"]


async def test_a_form_that_is_too_large_is_returned_and_not_kept() -> None:
    """A form larger than an eighth of the capacity is returned, is not kept, and evicts nothing."""
    store = MemoryStore(CAPACITY)
    for number in range(5):
        await store.put(entry(f"public.{number}"), 60)
    slot = store.slot("public.0")
    assert slot
    made = store.form(slot, "stream", lambda _: b"y" * (CAPACITY - 1))
    assert len(made) == CAPACITY - 1
    assert len(store) == 5
    store.alias(slot, b"d" * 16, "stream")
    assert store.by_alias(b"d" * 16) is None


async def test_a_form_is_made_once() -> None:
    """The second request for a form returns the bytes that the first one made."""
    store = MemoryStore(CAPACITY)
    await store.put(entry(), 60)
    slot = store.slot("public.aa")
    assert slot
    made: list[Entry] = []

    def make(kept: Entry) -> bytes:
        made.append(kept)
        return b"data"

    assert store.form(slot, "stream", make) is store.form(slot, "stream", make)
    assert made == [slot.entry]


async def test_replacing_an_entry_removes_its_aliases_and_forms() -> None:
    """An alias of a replaced entry is no longer found."""
    store = MemoryStore(CAPACITY)
    await store.put(entry(body=b"old"), 60)
    slot = store.slot("public.aa")
    assert slot
    store.form(slot, "plain", lambda kept: kept.body)
    store.alias(slot, b"d" * 16, "plain")
    assert store.by_alias(b"d" * 16) is not None
    await store.put(entry(body=b"new"), 60)
    assert store.by_alias(b"d" * 16) is None
    store.alias(slot, b"d" * 16, "plain")
    assert store.by_alias(b"d" * 16) is None
    store.form(slot, "late", lambda _: b"z" * 100)
    assert store.problems() == []


async def test_an_alias_expires_with_its_entry() -> None:
    """An alias is found until its entry expires."""
    clock = Clock()
    store = MemoryStore(CAPACITY, clock)
    await store.put(entry(), 10)
    slot = store.slot("public.aa")
    assert slot
    store.form(slot, "plain", lambda kept: kept.body)
    store.alias(slot, b"d" * 16, "plain")
    clock.now += 9.9
    assert store.by_alias(b"d" * 16) is not None
    clock.now += 0.2
    assert store.by_alias(b"d" * 16) is None
    assert store.size == 0


async def test_the_aliases_of_an_entry_are_bounded() -> None:
    """An entry keeps a bounded number of aliases."""
    store = MemoryStore(1_000_000)
    await store.put(entry(), 60)
    slot = store.slot("public.aa")
    assert slot
    store.form(slot, "plain", lambda kept: kept.body)
    for number in range(10_000):
        store.alias(slot, number.to_bytes(16), "plain")
    assert store.size < 10_000
    assert store.problems() == []


def test_real_memory_is_within_the_size_that_is_accounted() -> None:
    """Tens of thousands of entries, forms and aliases take no more than `size` says.

    Measured in a process of its own: tracemalloc sees what the interpreter allocates, and nothing else runs there.
    """
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=100)
    for line in done.stdout.splitlines():
        name, real, accounted, slots = line.split(",")
        assert int(slots) > 0
        assert int(real) <= int(accounted), f"{name}: {real} bytes are accounted as {accounted}"
        assert int(real) >= 0.4 * int(accounted), f"{name}: {accounted} accounted bytes hold {real}: hits are wasted"


MEASURE = """
import asyncio, gc, tracemalloc
from cache.entries.key import request_key
from cache.entries.entry import Entry, decode_entry, encode_entry
from cache.stores.memory import MemoryStore

def entry(number, body, model):
    key = request_key("0123456789abcdef0123", "chat.completions", {"n": number})
    made = Entry(key.id, key.proof, "chat.completions", model, body, 1e9 + number, 60.0 + number, "0.0.0", True,
                 1000 + number, 2000 + number, number / 7)
    return decode_entry(encode_entry(made))

async def fill(capacity, count, size, model, forms, aliases):
    gc.collect()
    tracemalloc.start()
    store = MemoryStore(capacity, lambda: 1e9)
    for number in range(count):
        kept = entry(number, b"x" * size, model + "é" * (number % 2) if len(model) > 99 else model)
        await store.put(kept, 60)
        for form in range(forms):
            slot = store.slot(kept.id)
            name = ("plain", "stream", "usage")[form]
            store.form(slot, name, (lambda e: e.body) if form == 0 else (lambda e: b"y" * (3 * size)))
            for alias in range(aliases):
                store.alias(slot, (number * 100 + form * 10 + alias).to_bytes(16), name)
        del kept
        slot = None
    gc.collect()
    real = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return real, store

for name, arguments in {
    "small": (10**9, 5_500, 10, "m", 0, 0),
    "evicting": (8_000_000, 14_000, 100, "m", 0, 0),
    "one form": (10**9, 5_500, 300, "m", 1, 1),
    "forms and aliases": (10**9, 5_500, 300, "m", 3, 2),
    "evicting with aliases": (8_000_000, 14_000, 100, "m", 2, 2),
    "long names of models": (10**9, 2_000, 10, "m" * 2_000, 0, 0),
}.items():
    real, store = asyncio.run(fill(*arguments))
    print(name, real, store.size, len(store), sep=",")
    del store
"""


@pytest.mark.parametrize("capacity", [0, 1, 1000])
async def test_a_store_without_capacity_keeps_nothing(capacity: int) -> None:
    """A store whose capacity is too small for any entry keeps none."""
    store = MemoryStore(capacity)
    await store.put(entry(), 60)
    assert await store.get("public.aa") is None
    assert store.size == 0
