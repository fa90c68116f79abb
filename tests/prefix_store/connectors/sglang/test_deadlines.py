"""A tier or a thread that hangs: one wait, then pages are computed; no page changes after a call."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from prefix_store.connectors.sglang import KeepgateStorage
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.tiers.tier import Tier
from tests.prefix_store.connectors.sglang.conftest import Attach
from tests.prefix_store.connectors.sglang.engine import (
    PAGE,
    after,
    files_of,
    fill,
    host_pool,
    is_equal,
    page_keys,
    random_numbers,
    rows,
    slots_of,
)

PAGES = 20
KEYS = page_keys(PAGES)
SOON = 0.15
"""Seconds of a call that waits for nothing, on a busy machine."""
DEADLINE = 0.25
"""Of a fetch of so few pages: twice the time of computing them, or this."""


@pytest.fixture
def backend(attach: Attach) -> KeepgateStorage:
    """With the pages on disk; its pool is empty."""
    backend = attach(host_pool("page_first"))
    write(backend)
    return backend


def write(backend: KeepgateStorage) -> None:
    """Stores the pages; the pool is empty then."""
    fill(backend.mem_pool_host, slots_of(0, PAGES), random_numbers(backend.mem_pool_host, PAGES * PAGE))
    assert all(backend.batch_set_v1(KEYS, slots_of(0, PAGES), after([])))
    backend.mem_pool_host.kv_buffer.zero_()


@contextmanager
def hanging(file: Path) -> Iterator[None]:
    """Whoever opens the file waits until the end of this, and reads what was there."""
    kept = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # nobody has opened it
            pipe = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, kept)
            os.close(pipe)
        again = file.with_name("again")
        again.write_bytes(kept)
        again.replace(file)


@contextmanager
def blocked_loop(backend: KeepgateStorage) -> Iterator[None]:
    """The event loop of the store stands still."""
    is_blocked, go_on = threading.Event(), threading.Event()

    async def block() -> None:
        is_blocked.set()
        go_on.wait(60)

    backend._begin(block())
    assert is_blocked.wait(10)
    try:
        yield
    finally:
        go_on.set()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is done in this takes no longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def fetched(backend: KeepgateStorage, keys: list[str] = KEYS) -> int:
    """Pages that a fetch says it has filled."""
    return sum(backend.batch_get_v1(keys, slots_of(0, len(keys)), after([])))


def wait_for_reads(backend: KeepgateStorage) -> None:
    """Reads that were given up have ended: a use is recorded by the thread that reads, after them."""
    page = backend._chain([], KEYS[:1])
    assert backend._answer("a use", lambda opened: touched(opened.store.tiers["disk"], page), 10.0, False)


async def touched(tier: Tier, chain: list[BlockId]) -> bool:
    """Records a use."""
    await tier.touch(chain, Access(0.0))
    return True


def test_a_disk_that_hangs_costs_one_deadline(backend: KeepgateStorage, disk: Path) -> None:
    """What was read before counts. Then pages are computed, until the place is tried again after a while."""
    with hanging(files_of(disk, backend, KEYS)[3]):
        with within(DEADLINE + SOON):
            assert fetched(backend) == 3
        for _ in range(3):
            with within(SOON):
                assert backend.batch_exists(KEYS, after([])) == 0
            with within(SOON):
                assert fetched(backend) == 0
            with within(SOON):
                assert backend.batch_exists(KEYS, after([])) == 0


def test_no_page_changes_after_the_call_that_was_given_up(backend: KeepgateStorage, disk: Path) -> None:
    """SGLang uses the pages for other prompts then; the read that hung goes on and writes nothing."""
    pool = backend.mem_pool_host
    with hanging(files_of(disk, backend, KEYS)[3]):
        assert fetched(backend) == 3
        other = random_numbers(pool, PAGES * PAGE, seed=9)
        fill(pool, slots_of(0, PAGES), other)
    wait_for_reads(backend)
    assert is_equal(rows(pool, slots_of(0, PAGES)), other)


def test_a_place_that_has_recovered_is_found_again(backend: KeepgateStorage, disk: Path) -> None:
    """A few pages are tried after a while; SGLang is told of all, for it fetches no small number."""
    with hanging(files_of(disk, backend, KEYS)[3]):
        assert fetched(backend) == 3
    wait_for_reads(backend)
    assert backend._thread is not None
    times = backend._thread.value.store.times["disk"]
    assert backend.batch_exists(KEYS, after([])) == 0
    times._measured_at -= 60.0
    assert backend.batch_exists(KEYS, after([])) == PAGES
    for _ in range(10):
        assert fetched(backend) >= 8
        times._measured_at -= 60.0
    assert fetched(backend) == PAGES


def test_a_thread_that_does_not_answer_costs_one_wait(backend: KeepgateStorage) -> None:
    """Of all calls together; when it answers again so do they."""
    with blocked_loop(backend):
        with within(1.0 + SOON):
            assert backend.batch_exists(KEYS, after([])) == 0
        for _ in range(3):
            with within(SOON):
                assert backend.batch_exists(KEYS, after([])) == 0
                assert fetched(backend) == 0
                assert not any(backend.batch_set_v1(KEYS, slots_of(0, PAGES), after([])))
    assert backend._late is not None
    backend._late.result(10)
    assert fetched(backend) == PAGES


def test_a_fetch_that_begins_too_late_writes_nothing(backend: KeepgateStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up while it waited for the thread."""
    monkeypatch.setattr("prefix_store.connectors.sglang._LONGEST_RESTORE", 0.1)
    with blocked_loop(backend):
        assert fetched(backend) == 0
    assert backend._late is not None
    backend._late.result(10)
    assert not backend.mem_pool_host.kv_buffer.any()


def test_calls_at_once_have_their_own_answers(backend: KeepgateStorage) -> None:
    """SGLang's three threads look up, fetch and store at the same time."""
    pool, others = backend.mem_pool_host, page_keys(PAGES, first_token=10**6)
    fill(pool, slots_of(100, PAGES), random_numbers(pool, PAGES * PAGE, seed=3))
    found: list[int] = []

    def look_up() -> None:
        found.extend(backend.batch_exists(KEYS, after([])) for _ in range(50))

    def write_others() -> None:
        found.extend(sum(backend.batch_set_v1(others, slots_of(100, PAGES), after([]))) for _ in range(50))

    threads = [threading.Thread(target=work) for work in (look_up, write_others)]
    for thread in threads:
        thread.start()
    found.extend(fetched(backend) for _ in range(50))
    for thread in threads:
        thread.join()
    assert found == [PAGES] * 150
    assert is_equal(rows(pool, slots_of(0, PAGES)), random_numbers(pool, PAGES * PAGE))


def test_after_the_end_everything_is_a_miss(backend: KeepgateStorage) -> None:
    """`POST /detach_hicache_storage_backend` while a call is on its way; closing twice is closing once."""
    backend.close()
    backend.close()
    with within(SOON):
        assert backend.batch_exists(KEYS, after([])) == 0
        assert fetched(backend) == 0
        assert not any(backend.batch_set_v1(KEYS, slots_of(0, PAGES), after([])))
    with pytest.raises(RuntimeError, match="was not cleared"):
        backend.clear()
    assert isinstance(backend.mem_pool_host.kv_buffer, torch.Tensor)
