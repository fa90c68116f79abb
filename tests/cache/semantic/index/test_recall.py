"""The recall that a running index shows is that of its searches."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from cache.semantic.index.index import VectorIndex
from cache.semantic.index.partition import Thresholds
from tests.cache.semantic.index.vectors import topics

LATER, NOW = 2e9, 1e9
DIMENSIONS, ROWS = 32, 3000
# Some 215 lists, of which one is searched.
COARSE = Thresholds(flat=2900, scan=1)


@contextmanager
def filled(thresholds: Thresholds, share: float = 1.0, load: float = 1.0, rows: int = ROWS) -> Iterator[VectorIndex]:
    with closing(VectorIndex(DIMENSIONS, thresholds, share, load)) as index:
        for number, vector in enumerate(topics(rows, DIMENSIONS, seed=1)):
            # Every tenth has expired.
            index.add("p", f"{number}", vector, LATER if number % 10 else NOW)
        assert index.settle(60)
        yield index


def compared(index: VectorIndex, count: int) -> None:
    """Return when so many searches have been compared."""
    deadline = time.monotonic() + 30
    while index.recall.compared < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_is_the_share_of_searches_that_found_the_nearest() -> None:
    """With few lists searched it is as low as a comparison by hand says; expired entries are not missed."""
    vectors = topics(ROWS, DIMENSIONS, seed=1)
    vectors[::10] = 0  # never the nearest
    hits = []
    with filled(COARSE) as index:
        for number, question in enumerate(topics(200, DIMENSIONS, seed=2), 1):
            found = index.search("p", question, 1, NOW)
            hits.append(bool(found) and found[0][1] > float((vectors @ question).max()) - 2e-4)
            compared(index, number)
        assert index.recall.at_1 == pytest.approx(np.mean(hits), abs=0.011)
        assert 0.1 < np.mean(hits) < 0.98


def test_searches_that_find_all_show_one() -> None:
    """Where all lists are searched the first result is the nearest."""
    with filled(Thresholds(flat=32, scan=10**9), rows=600) as index:
        for number, question in enumerate(topics(30, DIMENSIONS, seed=3), 1):
            index.search("p", question, 16, NOW)
            compared(index, number)
        assert index.recall.at_1 == 1.0


def test_what_is_added_after_a_search_was_not_missed() -> None:
    """A comparison may begin late, while the lists of another partition are made."""
    with filled(Thresholds(flat=32, scan=10**9), rows=600) as index:
        for number, vector in enumerate(topics(10_000, DIMENSIONS, seed=2)):
            index.add("q", f"q{number}", vector, LATER)
        (question,) = topics(1, DIMENSIONS, seed=3)
        index.search("p", question, 16, NOW)
        index.add("p", "new", question, LATER)
        compared(index, 1)
        assert index.recall.at_1 == 1.0


def test_exact_searches_are_not_compared() -> None:
    """A partition without lists is searched exactly anyway."""
    with filled(Thresholds(), rows=100) as index:
        for question in topics(50, DIMENSIONS, seed=3):
            index.search("p", question, 1, NOW)
        assert (index.recall.compared, index.recall.at_1) == (0, None)


def test_it_takes_a_bounded_share_of_a_core() -> None:
    """After a comparison the next one waits for as long as the load says."""
    with filled(COARSE, load=1e-6) as index:
        for question in topics(500, DIMENSIONS, seed=3):
            index.search("p", question, 1, NOW)
        compared(index, 1)
        for question in topics(500, DIMENSIONS, seed=4):
            index.search("p", question, 1, NOW)
    assert index.recall.compared == 1


def test_few_searches_are_drawn() -> None:
    """The share is of all searches, whatever they find."""
    with filled(COARSE, share=0.0) as index:
        for question in topics(50, DIMENSIONS, seed=3):
            index.search("p", question, 1, NOW)
    assert index.recall.compared == 0
