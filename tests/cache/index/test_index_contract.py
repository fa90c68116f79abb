"""What an index of entries promises, in Redis and in memory."""

import time
from collections.abc import Sequence

import pytest

from cache.entries.entry import Entry
from cache.exact import ExactCache
from cache.index.entry_index import EntryFilter, InvalidCursor
from cache.index.fingerprint import encode_fingerprint, fingerprint
from cache.stores.memory import MemoryStore
from cache.stores.redis_store import RedisStore
from tests.cache.entries.entry_examples import entry

NOW = time.time()


@pytest.fixture(params=["memory", "redis"])
async def cache(request: pytest.FixtureRequest, redis_store: RedisStore) -> ExactCache:
    """A cache whose purges are known."""
    shared = redis_store if request.param == "redis" else None
    made = ExactCache(MemoryStore(2**24), shared, keep_stale=60)
    await made.sync_purges()
    return made


async def store(cache: ExactCache, entry_id: str, model: str = "m", age: float = 0.0, question: str = "") -> Entry:
    """Store an answer of some seconds ago, to a question."""
    asked = fingerprint({"model": model, "messages": [{"role": "user", "content": question}]} if question else {})
    namespace = entry_id.partition(".")[0]
    kept = entry(
        entry_id,
        model=model,
        created=NOW - age,
        fresh_for=1e6,
        generation=cache.generation(namespace, model),
        asked=encode_fingerprint(asked),
    )
    await cache.store(kept)
    return kept


async def flushed(cache: ExactCache) -> None:
    if cache.redis is not None:
        await cache.redis.flush()
    await cache.index.flush()


async def all_ids(cache: ExactCache, wanted: EntryFilter, limit: int = 3) -> list[str]:
    """Of all pages."""
    found: list[str] = []
    cursor = None
    while True:
        page = await cache.index.page(wanted, cursor, limit)
        assert len(page.ids) <= limit
        found += page.ids
        if (cursor := page.next) is None:
            return found


def ids(*numbers: int, namespace: str = "a") -> list[str]:
    return [f"{namespace}.{number:032x}" for number in numbers]


async def fill(cache: ExactCache, numbers: Sequence[int]) -> None:
    for number in numbers:
        for namespace in "ab":
            await store(cache, f"{namespace}.{number:032x}", f"m{number % 2}", age=10.0 * number)
    await flushed(cache)


async def test_pages_have_every_entry_once_the_newest_first(cache: ExactCache) -> None:
    """By model, by namespace, or of all; ages and pages of any size change nothing."""
    await fill(cache, range(7))
    assert await all_ids(cache, EntryFilter(namespace="a")) == ids(*range(7))
    both = await all_ids(cache, EntryFilter(), limit=4)
    assert sorted(both) == sorted(ids(*range(7)) + ids(*range(7), namespace="b"))
    assert [each[2:] for each in both] == sorted(each[2:] for each in both)
    assert await all_ids(cache, EntryFilter(model="m1"), 2) == [
        each for number in (1, 3, 5) for each in (*ids(number, namespace="b"), *ids(number))
    ]


async def test_entries_of_one_moment_are_all_found(cache: ExactCache) -> None:
    """More entries of the same time than a page holds are all there, each once."""
    for number in range(25):
        await store(cache, ids(number)[0])
    await flushed(cache)
    found = await all_ids(cache, EntryFilter(model="m"), limit=4)
    assert sorted(found) == ids(*range(25))


async def test_a_listing_is_of_a_time(cache: ExactCache) -> None:
    """Since and until are inclusive."""
    await fill(cache, range(6))
    wanted = EntryFilter(namespace="a", since=NOW - 40.5, until=NOW - 19.5)
    assert await all_ids(cache, wanted) == ids(2, 3, 4)


async def test_the_hottest_come_first(cache: ExactCache) -> None:
    """Entries that were served, by how often; with a least number only those with as many."""
    await fill(cache, range(4))
    for number, times in ((2, 5), (1, 3), (3, 1)):
        for _ in range(times):
            cache.index.hit(ids(number)[0])
    await cache.index.flush()
    assert await all_ids(cache, EntryFilter(hottest=True), 2) == ids(2, 1, 3)
    assert await all_ids(cache, EntryFilter(min_hits=3)) == ids(2, 1)
    assert await cache.index.hits(ids(0, 1, 2, 3)) == [0, 3, 5, 1]


async def test_questions_that_are_much_the_same_are_found(cache: ExactCache) -> None:
    """Numbers, case and punctuation do not tell them apart; tenants are never mixed."""
    await store(cache, ids(1)[0], question="What is the time? It is 12:03.")
    await store(cache, ids(2)[0], question="what is the time, it is 12:04")
    await store(cache, ids(3)[0], question="What is the date?")
    await store(cache, ids(1, namespace="b")[0], question="What is the time? It is 12:03.")
    await flushed(cache)
    question = fingerprint({"messages": [{"role": "user", "content": "What is the time - it is 9:00!"}]}).question
    assert sorted(await cache.index.asked_like("a", question, 10)) == ids(1, 2)
    assert len(await cache.index.asked_like("a", question, 1)) == 1
    assert await cache.index.asked_like("c", question, 10) == []


async def test_other_namespaces_with_the_same_request_are_found(cache: ExactCache) -> None:
    """By the id without its namespace; the entry's own is no other."""
    (mine,), (theirs,), (another,) = (ids(number, namespace=name) for number, name in ((1, "a"), (1, "b"), (2, "c")))
    for each in (mine, theirs, another):
        await store(cache, each)
    await flushed(cache)
    assert await cache.index.elsewhere(mine, 5) == ["b"]
    assert await cache.index.elsewhere(ids(1, namespace="d")[0], 1) in (["a"], ["b"])
    assert await cache.index.elsewhere(another, 5) == []


async def test_counts_ages_and_sizes(cache: ExactCache) -> None:
    """Entries are counted by model and by age, the bound of an age included, and weighed."""
    await fill(cache, range(6))
    assert await cache.index.counts() == {"m0": 6, "m1": 6}
    assert await cache.index.ages([0.0, 20.0, 45.0], NOW) == [2, 4, 4, 2]
    assert len(await cache.index.sizes(4)) >= 4
    assert all(size > 0 for size in await cache.index.sizes(4))


async def test_a_deleted_entry_is_not_listed(cache: ExactCache) -> None:
    """Nor one whose store has lost it, once somebody has looked at it."""
    await fill(cache, range(3))
    await cache.delete(ids(1)[0])
    found = await cache.entries(await all_ids(cache, EntryFilter(namespace="a")))
    assert [each.id for each in found] == ids(0, 2)


@pytest.mark.parametrize(
    ("scope", "name", "left"),
    [
        ("all", "", []),
        ("model", "m1", [*ids(0, 2), *ids(0, 2, namespace="b")]),
        ("namespace", "b", ids(0, 1, 2)),
    ],
)
async def test_purged_entries_are_not_listed(cache: ExactCache, scope: str, name: str, left: list[str]) -> None:
    """By any way to list them; others stay."""
    await fill(cache, range(3))
    for each in await all_ids(cache, EntryFilter()):
        cache.index.hit(each)
    await cache.index.flush()
    await cache.purge(scope, name)  # type: ignore[arg-type]  # one of them
    for wanted in (EntryFilter(), EntryFilter(hottest=True)):
        found = await cache.entries(await all_ids(cache, wanted))
        assert sorted(each.id for each in found) == sorted(left)
    for namespace in "ab":
        found = await cache.entries(await all_ids(cache, EntryFilter(namespace=namespace)))
        assert [each.id for each in found] == [each for each in sorted(left) if each[0] == namespace]


async def test_old_entries_are_purged(cache: ExactCache) -> None:
    """By the time at which they were computed; what is stored afterwards stays, and so does the later of two times."""
    await fill(cache, range(4))
    await cache.purge_before(NOW - 15)
    await cache.purge_before(NOW - 1000)
    for wanted in (EntryFilter(namespace="a"), EntryFilter(model="m0"), EntryFilter(model="m1")):
        found = await cache.entries(await all_ids(cache, wanted))
        assert all(each.created >= NOW - 15 for each in found)
    found = await cache.entries(await all_ids(cache, EntryFilter(namespace="a")))
    assert [each.id for each in found] == ids(0, 1)
    assert not cache.counts(await store(cache, ids(9)[0], age=20))


@pytest.mark.parametrize("wanted", [EntryFilter(), EntryFilter(hottest=True)])
async def test_a_cursor_that_no_page_gave_is_refused(cache: ExactCache, wanted: EntryFilter) -> None:
    """It is no number, or is empty."""
    for cursor in ("", "x", "nonsense a.b"):
        with pytest.raises(InvalidCursor):
            await cache.index.page(wanted, cursor, 3)
