"""SGLang's HiCacheController with its threads, over the backend."""

from pathlib import Path

import pytest
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.radix_cache import RadixKey

from tests.prefix_store.connectors.sglang.engine import (
    MHA_LAYOUTS,
    PAGE,
    controller,
    files_of,
    fill,
    is_equal,
    page_keys,
    prompt_key,
    random_numbers,
    rows,
)

PAGES = 150
"""More than SGLang gives to a call."""


def write(sglang: HiCacheController, key: RadixKey, seed: int = 0) -> None:
    """Has a prompt's pages in host memory, and waits until they are stored."""
    pool = sglang.storage_host_pool
    slots = pool.alloc(len(key))
    fill(pool, slots, random_numbers(pool, len(key), seed))
    sglang.write_storage(slots, key.token_ids, page_keys(PAGES, key.cache_salt), prefix_keys=[])
    assert sglang.ack_backup_queue.get(timeout=20).completed_tokens == len(key)
    pool.kv_buffer.zero_()
    pool.free(slots)


def prefetch(sglang: HiCacheController, key: RadixKey) -> tuple[int, int]:
    """Prefetches a prompt; returns the pages that are said to be stored, and those that came. Checks their bits."""
    pool = sglang.storage_host_pool
    operation = sglang.prefetch("request", key, None, [])
    assert sglang.prefetch_hit_queue.get(timeout=20) is operation
    found = operation.storage_hit_count
    if not found:
        return 0, 0
    operation.host_indices = sglang.alloc_prefetch_host_buffers(operation, found)
    sglang.prefetch_buffer.put(operation)
    completed = 0
    while not (ack := sglang.ack_prefetch_queue.get(timeout=20)).completed_req:
        completed = ack.completed_tokens
    expected = random_numbers(pool, len(key))[:completed]
    assert is_equal(rows(pool, operation.host_indices[:completed]), expected)
    assert not rows(pool, operation.host_indices[completed:]).any()
    pool.free(operation.host_indices)
    pool.kv_buffer.zero_()
    return found // PAGE, completed // PAGE


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_a_prompt_is_written_and_prefetched(disk: Path, layout: str) -> None:
    """Bit for bit, also by an engine that is started later over the same folder; nobody else's requests find it."""
    key = prompt_key(PAGES, "tenant")
    with controller(layout, disk) as sglang:
        write(sglang, key)
        assert prefetch(sglang, key) == (PAGES, PAGES)
        assert prefetch(sglang, prompt_key(PAGES, "other")) == (0, 0)
        assert prefetch(sglang, prompt_key(PAGES)) == (0, 0)
        assert prefetch(sglang, prompt_key(PAGES, "tenant", "adapter")) == (0, 0)
    with controller(layout, disk) as sglang:
        assert prefetch(sglang, key) == (PAGES, PAGES)


def test_a_damaged_page_ends_a_prefetch(disk: Path) -> None:
    """SGLang uses those before it."""
    key = prompt_key(PAGES, "tenant")
    with controller("page_first", disk) as sglang:
        write(sglang, key)
        file = files_of(disk, sglang.storage_backend, page_keys(PAGES, "tenant"))[140]
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        assert prefetch(sglang, key) == (PAGES, 140)
