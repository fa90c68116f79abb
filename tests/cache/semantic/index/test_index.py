"""What is asked of the index, whatever it is made of: right answers, and nothing dead."""

import threading
import time
import timeit
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from cache.semantic.index.index import VectorIndex
from cache.semantic.index.partition import Thresholds
from tests.cache.semantic.index.vectors import topics, unit, units

LATER = 2_000_000_000.0
NOW = 1_900_000_000.0
SMALL = Thresholds(flat=32, scan=512, batch=16)


@pytest.fixture
def index() -> Iterator[VectorIndex]:
    index = VectorIndex(8, SMALL)
    yield index
    index.close()


def test_neighbours_come_nearest_first_with_their_cosines(index: VectorIndex) -> None:
    """A search returns the nearest entries first, with cosines right to the fourth decimal."""
    question = unit(0)
    for seed in range(20):
        index.add("p", f"e{seed}", unit(seed), LATER)
    found = index.search("p", question, 5, NOW)
    expected = sorted(((float(unit(seed) @ question), f"e{seed}") for seed in range(20)), reverse=True)[:5]
    assert [entry for entry, _ in found] == [entry for _, entry in expected]
    assert [cosine for _, cosine in found] == pytest.approx([cosine for cosine, _ in expected], abs=1e-4)


def test_partitions_see_nothing_of_each_other(index: VectorIndex) -> None:
    """A search finds only the entries of its own partition."""
    index.add("a", "in a", unit(1), LATER)
    index.add("b", "in b", unit(1), LATER)
    assert [entry for entry, _ in index.search("a", unit(1), 16, NOW)] == ["in a"]
    assert index.search("c", unit(1), 16, NOW) == []


def test_a_replaced_entry_is_only_where_it_was_put_last(index: VectorIndex) -> None:
    """An id that is added again has the vector, lifetime and partition of the last addition."""
    index.add("a", "e", unit(1), LATER)
    index.add("b", "e", unit(2), LATER + 9)
    assert index.search("a", unit(1), 16, NOW) == []
    assert [entry for entry, _ in index.search("b", unit(2), 16, LATER + 1)] == ["e"]
    assert (len(index), index.partitions) == (1, 1)


def test_an_expired_entry_is_not_found_before_it_is_removed(index: VectorIndex) -> None:
    """An expired entry is not found although the index still counts it."""
    index.add("p", "short", unit(1), NOW + 1)
    index.add("p", "long", unit(2), LATER)
    assert {entry for entry, _ in index.search("p", unit(1), 16, NOW + 0.5)} == {"short", "long"}
    assert {entry for entry, _ in index.search("p", unit(1), 16, NOW + 1)} == {"long"}
    assert len(index) == 2


def test_valid_entries_are_found_among_many_expired_ones(index: VectorIndex) -> None:
    """A search finds the nearest valid entries behind thousands of nearer ones that have expired."""
    near, far = topics(2000, 8, seed=1, about=1), topics(20, 8, seed=2, about=50)
    for number, vector in enumerate(near):
        index.add("p", f"dead {number}", vector, NOW - 1)
    for number, vector in enumerate(far):
        index.add("p", f"alive {number}", vector, LATER)
    assert index.settle(30)
    found = index.search("p", near[0], 16, NOW)
    expected = np.sort(far @ near[0])[::-1][:16]
    assert [cosine for _, cosine in found] == pytest.approx(expected.tolist(), abs=1e-4)


def test_memory_is_freed_when_entries_are_removed(index: VectorIndex) -> None:
    """An index from which all entries were removed takes little more memory than a new one."""
    empty = index.bytes
    vectors = topics(6000, 8, seed=1)
    for number, vector in enumerate(vectors):
        index.add("p", str(number), vector, LATER)
    full = index.bytes
    for number in range(len(vectors)):
        assert index.remove(str(number))
    assert index.settle(30)
    # What is left is the dict of entries, which Python shrinks at the next addition.
    index.add("p", "one", unit(1), LATER)
    assert full > 6000 * 16
    assert index.bytes < empty + 0.3 * (full - empty)


def test_a_hundred_thousand_partitions_are_filled_and_searched_quickly() -> None:
    """A hundred thousand small partitions take little memory, and each about as long as the first thousands."""
    partitions, entries, dimensions = 100_000, 120_000, 8
    index = VectorIndex(dimensions)
    vectors = topics(1000, dimensions, seed=1)
    fills, searches = [], []
    for first in range(0, entries, 10_000):
        began = time.process_time()
        for number in range(first, first + 10_000):
            index.add(f"p{number % partitions}", f"e{number}", vectors[number % 1000], LATER)
        filled = time.process_time()
        for number in range(first, first + 1000):
            assert f"e{number}" in dict(index.search(f"p{number % partitions}", vectors[number % 1000], 16, NOW))
        fills.append(filled - began)
        searches.append(time.process_time() - filled)
    for number in range(0, partitions, 100):
        found = index.search(f"p{number}", vectors[number % 1000], 16, NOW)
        assert {entry for entry, _ in found} == {f"e{place}" for place in range(number, entries, partitions)}
    assert (index.partitions, len(index)) == (partitions, entries)
    assert min(fills[6:]) < 5 * min(fills[:6])
    assert min(searches[6:]) < 5 * min(searches[:6])
    assert index.bytes / entries < 1000
    index.close()


def test_the_memory_of_many_partitions_is_reported_quickly() -> None:
    """The reported memory follows additions and removals, and reading it takes as long as that of few."""
    index = VectorIndex(8, Thresholds(flat=32))

    def reading() -> float:
        return min(timeit.repeat(lambda: index.bytes, repeat=5, number=100))

    few = reading()
    vectors = topics(1000, 8, seed=1)
    for number in range(100_000):
        index.add(f"p{number}", str(number), vectors[number % 1000], LATER)
    small = index.bytes
    for number, vector in enumerate(vectors):
        index.add("large", f"large {number}", vector, LATER)
    assert index.settle(60)
    with_lists = index.bytes
    assert reading() < 50 * few
    for number in range(1000):
        index.remove(f"large {number}")
    assert index.settle(60)
    assert with_lists - small > 1000 * 16
    assert index.bytes - small < 0.1 * (with_lists - small) + 2048 * 64
    index.close()


def test_approximate_search_misses_little() -> None:
    """A search of 12,000 vectors finds 98% of the nearest entries and 97% of the nearest sixteen."""
    vectors, questions = topics(12_000, 64, seed=1), topics(1000, 64, seed=2)
    with closing(VectorIndex(64, Thresholds(flat=256, scan=1500))) as index:
        for number, vector in enumerate(vectors):
            index.add("p", str(number), vector, LATER)
        assert index.settle(60)
        first = all_sixteen = 0.0
        for question in questions:
            cosines = vectors @ question
            expected = np.argsort(-cosines)[:16]
            found = index.search("p", question, 16, NOW)
            first += found[0][1] >= cosines[expected[0]] - 1e-4
            all_sixteen += len({int(entry) for entry, _ in found} & set(expected.tolist())) / 16
            assert all(cosine == pytest.approx(cosines[int(entry)], abs=1e-4) for entry, cosine in found)
    # Between .990 and 1, by how many rows there were when the lists were made last, which the threads decide.
    assert first / len(questions) >= 0.98
    assert all_sixteen / len(questions) >= 0.97


def test_searches_go_on_while_lists_are_made(index: VectorIndex) -> None:
    """Every entry is found while lists are made, moved and made again."""
    vectors = topics(3000, 8, seed=1, about=3000)
    for number, vector in enumerate(vectors):
        index.add("p", str(number), vector, LATER)
        asked = number * 7919 % (number + 1)
        nearest = index.search("p", vectors[asked], 1, NOW)[0]
        assert nearest[1] > 0.9998
    assert index.settle(30)


def test_many_equal_vectors_are_listed_found_and_removed(index: VectorIndex) -> None:
    """Entries with one and the same vector are listed, found and removed."""
    for number in range(1500):
        index.add("p", str(number), unit(1), LATER)
    assert index.settle(30)
    found = index.search("p", unit(1), 16, NOW)
    assert len(found) == 16
    for number in range(1500):
        assert index.remove(str(number))
    assert index.search("p", unit(1), 16, NOW) == []


@pytest.mark.parametrize("count", range(1, 20))
def test_lists_of_any_number_of_rows_can_be_made(count: int) -> None:
    """A partition of any number of rows can be divided into lists and searched."""
    index = VectorIndex(8, Thresholds(flat=1, scan=64, batch=1))
    for number, vector in enumerate(topics(count, 8, seed=1, about=count)):
        index.add("p", str(number), vector, LATER)
    assert index.settle(30)
    assert len(index.search("p", unit(1), 100, NOW)) == count
    index.close()


def test_the_background_ends_with_the_index() -> None:
    """Closing an index ends its threads, even in the middle of their work."""
    before = set(threading.enumerate())
    with closing(VectorIndex(8, SMALL)) as index:
        for number, vector in enumerate(topics(5000, 8, seed=1)):
            index.add("p", str(number), vector, LATER)
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before
    assert units(unit(1)) == pytest.approx(unit(1))
    assert index.search("p", unit(1), 16, NOW)
