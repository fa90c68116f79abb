"""Entries that go, change or come while a background thread is between two looks at them."""

import threading
from collections.abc import Iterator

import pytest

from cache.semantic.index.index import VectorIndex
from cache.semantic.index.partition import InvertedLists, Thresholds, spherical_centroids
from cache.semantic.index.table import Floats, Rows
from tests.cache.semantic.index.vectors import topics, unit

LATER = 2_000_000_000.0
NOW = 1_900_000_000.0
SMALL = Thresholds(flat=32, scan=512, batch=16)


class Gate:
    """Stops the background at a point: it says when it is there, and goes on when it may."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.go_on.wait(30)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.go_on.set()


@pytest.fixture
def filling(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The background stops when it has looked at some vectors, before it puts them into new lists."""
    put = InvertedLists.add

    def stop_and_put(self: InvertedLists, rows: Rows, vectors: Floats) -> None:
        if threading.current_thread() is not threading.main_thread():
            gate.pass_through()
        put(self, rows, vectors)

    monkeypatch.setattr(InvertedLists, "add", stop_and_put)
    return gate


@pytest.fixture
def training(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The background stops when new centroids are there, before they are used."""

    def train_and_stop(sample: Floats, count: int, is_over: object) -> Floats | None:
        centroids = spherical_centroids(sample, count, lambda: False)
        gate.pass_through()
        return centroids

    monkeypatch.setattr("cache.semantic.index.partition.spherical_centroids", train_and_stop)
    return gate


def filled(count: int) -> tuple[VectorIndex, Floats]:
    index, vectors = VectorIndex(8, SMALL), topics(count, 8, seed=1, about=count)
    for number, vector in enumerate(vectors):
        index.add("p", str(number), vector, LATER)
    return index, vectors


def found(index: VectorIndex, vector: Floats, partition: str = "p") -> set[str]:
    return {entry for entry, _ in index.search(partition, vector, 500, NOW)}


@pytest.mark.parametrize("every", [2, 5])  # more than a batch, which take another round, or fewer
def test_an_entry_removed_while_lists_are_filled_is_not_found(filling: Gate, every: int) -> None:
    """An entry that is removed while it is put into new lists is not found afterwards."""
    index, vectors = filled(40)
    assert filling.reached.wait(30)
    for number in range(0, 40, every):
        assert index.remove(str(number))
    left = {str(number) for number in range(40) if number % every}
    assert found(index, vectors[0]) == left
    filling.go_on.set()
    assert index.settle(30)
    assert found(index, vectors[0]) == left
    assert len(index) == len(left)
    index.close()


@pytest.mark.parametrize("count", [40, 4])
def test_a_new_entry_in_a_freed_row_does_not_get_the_old_list(filling: Gate, count: int) -> None:
    """A list chosen for a removed entry is not used for a new entry in its row."""
    index, _ = filled(40)
    assert filling.reached.wait(30)
    for number in range(count):
        assert index.remove(str(number))
    others = topics(count, 8, seed=5, about=40)
    for number, vector in enumerate(others):
        index.add("p" if number % 2 else "q", f"new {number}", vector, LATER)
    filling.go_on.set()
    assert index.settle(30)
    for number, vector in enumerate(others):
        entry, cosine = index.search("p" if number % 2 else "q", vector, 1, NOW)[0]
        assert entry == f"new {number}"
        assert cosine == pytest.approx(1, abs=1e-4)
    left = {str(number) for number in range(count, 40)}
    assert found(index, others[0]) == left | {f"new {number}" for number in range(1, count, 2)}
    assert found(index, others[0], "q") == {f"new {number}" for number in range(0, count, 2)}
    index.close()


def test_an_entry_removed_during_a_training_is_never_found(training: Gate) -> None:
    """New lists do not have entries that were removed during their training."""
    index, vectors = filled(200)
    assert training.reached.wait(30)
    for number in range(0, 200, 2):
        assert index.remove(str(number))
    index.add("q", "1", vectors[1], LATER)
    left = {str(number) for number in range(3, 200, 2)}
    assert found(index, vectors[0]) == left
    training.go_on.set()
    assert index.settle(30)
    assert found(index, vectors[0]) == left
    assert found(index, vectors[1], "q") == {"1"}
    index.close()


def test_an_entry_added_during_a_training_is_found_at_once(training: Gate) -> None:
    """Entries that are added during a training are found during it and after it."""
    index, _ = filled(100)
    assert training.reached.wait(30)
    late = topics(300, 8, seed=9, about=300)
    for number, vector in enumerate(late):
        index.add("p", f"late {number}", vector, LATER)
    assert all(index.search("p", vector, 1, NOW)[0][1] > 0.9998 for vector in late)
    training.go_on.set()
    assert index.settle(30)
    assert all(index.search("p", vector, 1, NOW)[0][1] > 0.9998 for vector in late)
    index.close()


def test_lists_of_a_partition_emptied_during_training_are_discarded(training: Gate) -> None:
    """Lists trained for a partition that was emptied meanwhile are not used for its successor."""
    index, vectors = filled(100)
    assert training.reached.wait(30)
    for number in range(100):
        assert index.remove(str(number))
    assert (len(index), index.partitions) == (0, 0)
    index.add("p", "new", vectors[0], LATER)
    training.go_on.set()
    assert index.settle(30)
    assert found(index, vectors[0]) == {"new"}
    index.close()


def test_a_failed_training_costs_speed_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A training that fails is logged, and all entries are still found."""
    failed = threading.Event()

    def fail(sample: Floats, count: int, is_over: object) -> Floats | None:
        failed.set()
        raise MemoryError("no memory for centroids")

    monkeypatch.setattr("cache.semantic.index.partition.spherical_centroids", fail)
    index, vectors = filled(300)
    assert failed.wait(30)
    assert all(index.search("p", vector, 1, NOW)[0][1] > 0.9998 for vector in vectors)
    index.close()
    assert "no memory for centroids" in caplog.text


def test_a_failed_training_is_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that could not be made anew for a partition that has shrunk are not tried again and again."""
    index, vectors = filled(1000)
    assert index.settle(30)
    trainings: list[int] = []

    def fail(sample: Floats, count: int, is_over: object) -> Floats | None:
        trainings.append(count)
        raise MemoryError

    monkeypatch.setattr("cache.semantic.index.partition.spherical_centroids", fail)
    # The lists may be those of 250 vectors, of which less than a quarter needs others.
    for number in range(950):
        index.remove(str(number))
    assert index.settle(30)
    assert len(trainings) == 1
    assert found(index, vectors[0]) == {str(number) for number in range(950, 1000)}
    index.close()


def test_many_changes_while_lists_are_made_leave_the_last_state() -> None:
    """An index that is changed thousands of times while lists are made ends with what a dict would hold."""
    index, vectors = VectorIndex(8, SMALL), topics(600, 8, seed=1, about=600)
    kept: dict[str, int] = {}
    for step in range(12_000):
        number = step * 7919 % 600
        entry = str(step * 31 % 400)
        if step % 3 == 2:
            assert index.remove(entry) == (kept.pop(entry, None) is not None)
        else:
            index.add(f"p{number % 2}", entry, vectors[number], LATER)
            kept[entry] = number
    assert index.settle(30)
    for partition in (0, 1):
        expected = {entry for entry, number in kept.items() if number % 2 == partition}
        assert found(index, unit(1), f"p{partition}") == expected
    index.close()
