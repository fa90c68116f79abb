"""SGLang's UnifiedRadixCache with HiCache, from the engine's memory through the backend and back.

Only the copy between device and host is not SGLang's: its kernels exist for GPUs alone.
"""

import json
import os
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from prefix_store.connectors.sglang import KeepgateStorage
from tests.prefix_store.connectors.sglang.engine import (
    CLASS,
    MHA_LAYOUTS,
    PAGE,
    SLOTS,
    device_pool,
    files_of,
    fill,
    group,
    is_equal,
    page_keys,
    prompt_key,
    rows,
    start_engine,
)

PAGES = 20


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the tensors of a device and a host pool, both on the CPU."""

    def backup(host: Any, pool: Any, to: torch.Tensor, slots: torch.Tensor, backend: str) -> None:
        keys, values = (
            torch.stack([buffer[slots] for buffer in buffers], dim=1)
            for buffers in (host.device_k_buffers, host.device_v_buffers)
        )
        fill(host, to, torch.stack([keys, values], dim=1))

    def load(
        host: Any, pool: Any, at: torch.Tensor, slots: torch.Tensor, layer: int, backend: str, *, is_draft: bool = False
    ) -> None:
        keys_and_values = rows(host, at)
        for part, buffers in enumerate((host.device_k_buffers, host.device_v_buffers)):
            buffers[layer][slots] = keys_and_values[:, part, layer]

    monkeypatch.setattr(MHATokenToKVPoolHost, "backup_from_device_all_layer", backup)
    monkeypatch.setattr(MHATokenToKVPoolHost, "load_to_device_per_layer", load)
    monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda stream: None, raising=False)
    monkeypatch.setattr("sglang.srt.mem_cache.pool_host.common._cuda_host_register", lambda *a, **k: None)
    monkeypatch.setattr("sglang.srt.mem_cache.pool_host.common._cuda_host_unregister", lambda *a, **k: None)


@dataclass
class Engine:
    """A radix cache, the engine's memory and the backend."""

    cache: UnifiedRadixCache
    device: MHATokenToKVPool
    allocator: PagedTokenToKVPoolAllocator

    @property
    def backend(self) -> KeepgateStorage:
        """The one that SGLang has made."""
        backend: KeepgateStorage = self.cache.cache_controller.storage_backend
        return backend

    def settle(self, done: Callable[[], bool]) -> None:
        """Does what SGLang's scheduler does in each step until then."""
        end = time.monotonic() + 20
        while not done():
            assert time.monotonic() < end
            self.cache.check_hicache_events()

    def compute(self, key: RadixKey) -> torch.Tensor:
        """Has a prompt computed, and waits until it is stored; returns its keys and values."""
        slots = self.allocator.alloc(len(key))
        for buffer in (*self.device.k_buffer, *self.device.v_buffer):
            buffer[slots] = torch.randn(buffer[slots].shape).to(buffer.dtype)
        self.cache.insert(InsertParams(key=key, value=slots))
        pages = self.backend.get_stats
        stored = 0

        def is_stored() -> bool:
            nonlocal stored
            stored += sum(pages().backup_pgs)
            return stored >= len(key) // PAGE and not self.cache.ongoing_backup

        self.settle(is_stored)
        return self.numbers(slots)

    def numbers(self, slots: torch.Tensor) -> torch.Tensor:
        """What the engine's memory has at these slots."""
        return torch.stack([buffer[slots] for buffer in (*self.device.k_buffer, *self.device.v_buffer)])

    def prefetch(self, key: RadixKey) -> int:
        """A request with this prompt comes: the tokens that are in host memory when it is admitted."""
        handle = CacheRequestHandle("request", 0)
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        assert found.device_prefix_len == 0
        tokens = array("q", key.token_ids)
        self.cache.prefetch_from_storage(
            handle,
            found.last_host_node,
            tokens,
            None,
            [],
            matched_prefix_tokens=array("q"),
            cache_salt=key.cache_salt,
        )
        self.settle(lambda: self.cache.check_prefetch_progress(handle))
        return int(self.cache.match_prefix(MatchPrefixParams(key=key)).host_hit_length)

    def load_back(self, key: RadixKey) -> torch.Tensor:
        """Brings a prompt from host memory into the engine's; returns its keys and values there."""
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        root = self.cache.match_prefix(MatchPrefixParams(key=prompt_key(1, "nobody"))).last_device_node
        assert self.cache.load_back(found.best_match_node)
        self.cache.ready_to_load_host_cache()
        self.settle(lambda: not self.cache.cache_controller.ack_load_queue)
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        return self.numbers(self.cache.tree_core.collect_full_device_indices(found.last_device_node, root))


@contextmanager
def engine(model: Path, layout: str, disk: Path, policy: str = "wait_complete") -> Iterator[Engine]:
    """SGLang's cache as its scheduler makes it."""
    extra = {
        **CLASS,
        "disk": str(disk),
        "disk_size": "1GiB",
        "prefetch_threshold": PAGE,
        "hicache_storage_pass_prefix_keys": True,
    }
    args = start_engine(
        model,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_io_backend="direct" if layout in ("layer_first", "page_first_direct") else "kernel",
        hicache_mem_layout=layout,
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_storage_prefetch_policy=policy,
        hicache_storage_backend_extra_config=json.dumps(extra),
        enable_metrics=True,
    )
    device = device_pool()
    allocator = PagedTokenToKVPoolAllocator(
        SLOTS, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=device, need_sort=False
    )
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(size=4, max_context_len=SLOTS, device="cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        tp_cache_group=group(),
        tree_components=(ComponentType.FULL,),
    )
    cache = UnifiedRadixCache(params)
    cache.init_hicache(args, params)
    made = Engine(cache, device, allocator)
    made.backend._storage_config.enable_storage_metrics = True
    assert cache.cache_controller.storage_host_pool.layout == layout
    try:
        yield made
    finally:
        cache.shutdown()


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_a_prompt_returns_to_an_engine_that_was_started_later(model: Path, disk: Path, layout: str) -> None:
    """Bit for bit, over the same folder; a request with another salt finds nothing."""
    key = prompt_key(PAGES, "a")
    with engine(model, layout, disk) as first:
        computed = first.compute(key)
    with engine(model, layout, disk) as later:
        assert later.prefetch(prompt_key(PAGES, "b")) == 0
        assert later.prefetch(prompt_key(PAGES)) == 0
        assert later.prefetch(key) == PAGES * PAGE
        assert is_equal(later.load_back(key), computed)


def test_a_damaged_page_is_computed(model: Path, disk: Path) -> None:
    """And so is what follows it: the engine has the pages before it."""
    key = prompt_key(PAGES, "a")
    with engine(model, "page_first", disk) as first:
        computed = first.compute(key)
        file = files_of(disk, first.backend, page_keys(PAGES, "a"))[12]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with engine(model, "page_first", disk) as later:
        assert later.prefetch(key) == 12 * PAGE
        assert is_equal(later.load_back(prompt_key(12, "a")), computed[:, : 12 * PAGE])


def test_a_disk_that_hangs_holds_nobody_and_no_memory(model: Path, disk: Path) -> None:
    """A request is admitted after a deadline, the next ones at once, and SGLang has all its host memory back."""
    key = prompt_key(PAGES, "a")
    with engine(model, "page_first", disk) as first:
        first.compute(key)
        file = files_of(disk, first.backend, page_keys(PAGES, "a"))[0]
    file.unlink()
    os.mkfifo(file)
    with engine(model, "page_first", disk) as later:
        pool = later.cache.cache_controller.storage_host_pool
        free = pool.available_size()
        waits = []
        for _ in range(4):
            began = time.monotonic()
            assert later.prefetch(key) == 0
            waits.append(time.monotonic() - began)
        assert waits[0] < 5.0
        assert sum(seconds >= 0.3 for seconds in waits[1:]) <= 1  # a busy machine's
        later.settle(lambda: pool.available_size() == free)
        os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))


def test_without_prefix_keys_nothing_is_found(model: Path, disk: Path) -> None:
    """The engine computes, as without a backend."""
    with engine(model, "page_first", disk) as sglang:
        sglang.cache.hicache_storage_pass_prefix_keys = False
        slots = sglang.allocator.alloc(PAGES * PAGE)
        sglang.cache.insert(InsertParams(key=prompt_key(PAGES, "a"), value=slots))
        sglang.settle(lambda: sglang.backend._is_told_of_prefix_keys and not sglang.cache.ongoing_backup)
        sglang.cache.reset()
        sglang.allocator.clear()
        assert sglang.prefetch(prompt_key(PAGES, "a")) == 0
