"""Pages through the backend's interface, as SGLang's controller calls it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController

from prefix_store.connectors.sglang import KeepgateStorage
from tests.prefix_store.connectors.sglang.conftest import Attach
from tests.prefix_store.connectors.sglang.engine import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE,
    after,
    files_of,
    fill,
    host_pool,
    is_equal,
    mla_pool,
    page_keys,
    random_numbers,
    rows,
    slots_of,
)

PAGES = 6
KEYS = page_keys(PAGES)
OPERATION = SimpleNamespace(request_id="r", is_terminated=lambda: False)


def store(backend: KeepgateStorage, seed: int = 0, first_page: int = 0) -> torch.Tensor:
    """Fills pages of the backend's pool and has SGLang store them; returns their numbers."""
    pool = backend.mem_pool_host
    numbers = random_numbers(pool, PAGES * PAGE, seed)
    fill(pool, slots_of(first_page, PAGES), numbers)
    sglang = SimpleNamespace(storage_backend=backend)
    assert HiCacheController._page_set_zero_copy(sglang, KEYS, slots_of(first_page, PAGES), after([]))
    return numbers


def fetch(backend: KeepgateStorage, first_page: int = 0) -> int:
    """Has SGLang fetch the pages into an empty pool; returns how many it has then."""
    backend.mem_pool_host.kv_buffer.zero_()
    sglang = SimpleNamespace(storage_backend=backend)
    slots = slots_of(first_page, PAGES)
    return int(HiCacheController._page_get_zero_copy(sglang, OPERATION, KEYS, slots, after([])))


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_pages_return_bit_for_bit_in_every_layout(attach: Attach, layout: str) -> None:
    """Whatever layout they were written in, and at other places of the pool."""
    numbers = store(attach(host_pool(layout)))
    for other in MHA_LAYOUTS:
        backend = attach(host_pool(other))
        assert backend.batch_exists(KEYS, after(None)) == PAGES
        assert fetch(backend, first_page=20) == PAGES
        assert is_equal(rows(backend.mem_pool_host, slots_of(20, PAGES)), numbers)
        assert not rows(backend.mem_pool_host, slots_of(0, 20)).any()
        assert not rows(backend.mem_pool_host, slots_of(26, 20)).any()


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
def test_pages_of_latent_attention_return_too(attach: Attach, layout: str) -> None:
    """The first rank writes, the others find the same pages."""
    numbers = store(attach(mla_pool(layout), {"tp_size": 2, "is_mla_model": True}))
    for other in MLA_LAYOUTS:
        backend = attach(mla_pool(other), {"tp_rank": 1, "tp_size": 2, "is_mla_model": True})
        assert fetch(backend, first_page=20) == PAGES
        assert is_equal(rows(backend.mem_pool_host, slots_of(20, PAGES)), numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_pages_of_every_dtype_return(attach: Attach, dtype: torch.dtype) -> None:
    """Also those of eight bits, which SGLang has as bytes."""
    backend = attach(host_pool("page_first", dtype))
    numbers = store(backend)
    assert fetch(backend) == PAGES
    assert is_equal(rows(backend.mem_pool_host, slots_of(0, PAGES)), numbers)


def test_pages_are_kept_in_host_memory(attach: Attach) -> None:
    """Without a folder."""
    backend = attach(host_pool("layer_first"), memory="64MiB")
    numbers = store(backend)
    assert fetch(backend) == PAGES
    assert is_equal(rows(backend.mem_pool_host, slots_of(0, PAGES)), numbers)


def test_a_lossy_codec_is_one_of_all_tiers(attach: Attach, disk: Path) -> None:
    """Pages that follow restored ones are not told apart, so that an exact tier has none of either."""
    with pytest.raises(ValueError, match="memory_codec is plain, expected int8 as in the other tiers"):
        attach(host_pool("layer_first"), memory="64MiB", disk=str(disk), disk_codec="int8")
    backend = attach(host_pool("layer_first"), memory="64MiB", memory_codec="int8", disk=str(disk), disk_codec="int8")
    numbers = store(backend)
    assert fetch(backend) == PAGES
    torch.testing.assert_close(rows(backend.mem_pool_host, slots_of(0, PAGES)), numbers, atol=0.02, rtol=0.02)


def test_a_damaged_page_is_not_used_and_neither_are_those_after_it(attach: Attach, disk: Path) -> None:
    """The damage is in the numbers. Nothing is written to the pages from there on; what is computed is stored again."""
    backend = attach(host_pool("page_first"))
    numbers = store(backend)
    file = files_of(disk, backend, KEYS)[2]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fetch(backend) == 2
    assert is_equal(rows(backend.mem_pool_host, slots_of(0, 2)), numbers[: 2 * PAGE])
    assert not rows(backend.mem_pool_host, slots_of(2, PAGES - 2)).any()
    store(backend)
    assert fetch(backend) == PAGES


@pytest.mark.parametrize("content", [b"", b"\x7f" * 8192])
def test_a_file_of_another_size_is_a_miss_not_an_overrun(attach: Attach, disk: Path, content: bytes) -> None:
    """As in SGLang's own tests of its backends."""
    backend = attach(host_pool("page_first"))
    store(backend)
    files_of(disk, backend, KEYS)[0].write_bytes(content)
    assert fetch(backend) == 0
    assert not backend.mem_pool_host.kv_buffer.any()


def test_a_page_that_is_gone_ends_the_prefix(attach: Attach, disk: Path) -> None:
    """A look-up may promise more: it tries some of the pages, and no page is read."""
    backend = attach(host_pool("page_first"))
    store(backend)
    files_of(disk, backend, KEYS)[2].unlink()
    assert fetch(backend) == 2


def test_a_call_goes_on_after_the_pages_that_sglang_has(attach: Attach) -> None:
    """Of a long prompt SGLang asks in parts, each with the keys before it."""
    backend = attach(host_pool("page_first"))
    numbers = store(backend)
    backend.mem_pool_host.kv_buffer.zero_()
    assert backend.batch_exists(KEYS[2:], after(KEYS[:2])) == PAGES - 2
    assert backend.batch_get_v1(KEYS[2:], slots_of(2, PAGES - 2), after(KEYS[:2])) == [True] * (PAGES - 2)
    assert is_equal(rows(backend.mem_pool_host, slots_of(2, PAGES - 2)), numbers[2 * PAGE :])


def test_a_page_without_its_prefix_is_not_stored(attach: Attach) -> None:
    """It could not be restored."""
    backend = attach(host_pool("page_first"))
    assert backend.batch_set_v1(KEYS[2:], slots_of(2, PAGES - 2), after(KEYS[:2])) == [False] * (PAGES - 2)


def test_without_prefix_keys_nothing_is_stored_and_the_option_is_named(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: a page's parent is unknown then."""
    backend = attach(host_pool("page_first"))
    for _ in range(2):
        assert backend.batch_set_v1(KEYS, slots_of(0, PAGES), after(None)) == [False] * PAGES
        assert backend.batch_get_v1(KEYS, slots_of(0, PAGES), None) == [False] * PAGES
    assert [record.message.count("hicache_storage_pass_prefix_keys") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    "slots", [slots_of(0, 1), slots_of(0, PAGES) + 1, slots_of(0, PAGES) - PAGE, slots_of(10**6, PAGES)]
)
def test_slots_that_are_no_pages_are_refused(attach: Attach, slots: torch.Tensor) -> None:
    """Nothing is read or written."""
    backend = attach(host_pool("page_first"))
    assert backend.batch_set_v1(KEYS, slots, after([])) == [False] * PAGES
    assert backend.batch_exists(KEYS, after([])) == 0


@pytest.mark.parametrize(
    "rank",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ],
    ids=lambda rank: next(iter(rank)),
)
def test_ranks_do_not_share_pages(attach: Attach, rank: dict[str, Any]) -> None:
    """Each has another part of a page, in one folder; what one clears of its own is for all."""
    (name, _), (size, _) = rank.items()
    first, second = attach(host_pool("page_first"), {size: 2}), attach(host_pool("page_first"), rank)
    numbers = [store(first, seed=1), store(second, seed=2)]
    for backend, own in zip((first, second), numbers, strict=True):
        assert fetch(backend) == PAGES
        assert is_equal(rows(backend.mem_pool_host, slots_of(0, PAGES)), own)
    assert name in rank


def test_tenants_do_not_share_pages(attach: Attach) -> None:
    """Nor do adapters: SGLang's keys are of other salts then."""
    backend = attach(host_pool("page_first"))
    store(backend)
    assert backend.batch_exists(page_keys(PAGES, salt="a"), after([])) == 0
    assert backend.batch_exists(page_keys(PAGES, adapter="a"), after([])) == 0


def test_statistics_are_those_since_the_last_call(attach: Attach) -> None:
    """SGLang asks for them if its metrics are on."""
    backend = attach(host_pool("page_first"))
    store(backend)
    fetch(backend)
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([PAGES], [PAGES])
    assert stats.backup_bandwidth[0] > 0
    assert stats.prefetch_bandwidth[0] > 0
    assert backend.get_stats().prefetch_pgs == []


def test_clearing_empties_the_store(attach: Attach) -> None:
    """`POST /clear_hicache_storage_backend` of SGLang."""
    backend = attach(host_pool("page_first"))
    store(backend)
    backend.clear()
    assert backend.batch_exists(KEYS, after([])) == 0
    store(backend)
    assert backend.batch_exists(KEYS, after([])) == PAGES
