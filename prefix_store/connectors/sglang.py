"""The storage backend for SGLang's HiCache. In its command line:

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "keepgate",
    "module_path": "prefix_store.connectors.sglang", "class_name": "KeepgateStorage", "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": true, "disk": "/var/lib/keepgate/pages", "disk_size": "100GiB"}'

SGLang makes one in each rank and calls it in three threads, which wait for the answer: whether pages of a prompt are
stored, to fill pages of its host memory, to store some. Each wait has an end. No method raises once the engine runs:
whatever fails, pages are computed.
"""

from __future__ import annotations

import atexit
import functools
import hmac
import itertools
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.observability.metrics_collector import StorageMetrics

from prefix_store.connectors.http_api import Prompt, StoreApi, serving
from prefix_store.connectors.options import listening, read_options
from prefix_store.connectors.sglang_support import (
    HostPages,
    check_setup,
    check_version,
    fingerprint_of,
    weight_version,
    worker_number,
)
from prefix_store.connectors.store_thread import StoreThread
from prefix_store.connectors.transfers import NO_NAMESPACE, PartNames
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import ID_BYTES, BlockId
from prefix_store.frames.segments import Segments
from prefix_store.store.config import StoreConfig
from prefix_store.store.description import describe_store
from prefix_store.store.open_store import OpenStore, open_store
from prefix_store.tiers.cancellation import CancelToken

log = logging.getLogger(__name__)

T = TypeVar("T")

_EXTRA_CONFIG = "--hicache-storage-backend-extra-config"
_OF_SGLANG = (
    *("backend_name", "module_path", "class_name", "interface_v1", "hicache_storage_pass_prefix_keys"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "tp_lcm_size"),
    "file_storage_path",
)
"""Names in the extra config that are not this backend's."""
_WITHOUT = ("audit", "public_prefix")
"""Options of connectors that need what SGLang does not tell its backends."""
_NO_DIGEST = bytes(2 * ID_BYTES)
_TOKEN_SECONDS = 0.25 / 1024
"""What computing a token is assumed to take: SGLang, too, waits no longer for a stored one, by default."""
_LONGEST_LOOKUP, _LONGEST_RESTORE, _LONGEST_KEEP, _LONGEST_CLEAR = 1.0, 6.0, 32.0, 60.0
"""Seconds after which a call returns, whatever the store does; it has ends of its own, which are earlier."""
_ASK_SECONDS = 0.5
"""Within which a tier tells what it has. One that does not is not asked again until it has answered."""
_SMALL_PAGE = 16
_ONE_REQUEST_SECONDS = 30.0
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of a prompt that are filled or stored: after those with the keys ``before``."""

    before: Sequence[str]
    keys: Sequence[str]
    segments: Sequence[Segments]
    cancel: CancelToken = field(default_factory=CancelToken)


class KeepgateStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Keeps the pages of HiCache in Keepgate's prefix store.

    Raises:
        ValueError: an option is not valid, or the model, its pools or this SGLang are not supported; the message names
            it.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        check_version()
        check_setup(storage_config)
        given = storage_config.extra_config or {}
        if not given.get("interface_v1"):
            raise ValueError(f"{_EXTRA_CONFIG}: interface_v1 is missing, expected 1")
        own = {name: value for name, value in given.items() if name not in _OF_SGLANG}
        self._options = read_options(own, _EXTRA_CONFIG, _WITHOUT)
        self._worker = worker_number()
        self._store_config = self._options.config(self._worker)
        _check_store(self._store_config, storage_config)
        self._storage_config = storage_config
        self._thread: StoreThread[OpenStore] | None = None
        self._late: Future[Any] | None = None
        """A call that the store's thread has not answered."""
        self._accesses: OrderedDict[str, Access] = OrderedDict()
        self._weight_version = weight_version()
        self._is_told_of_prefix_keys = False
        self._stats = StorageMetrics()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens the store. Raises ValueError or OSError: the engine does not start without it."""
        super().register_mem_pool_host(mem_pool_host)
        self._pages = HostPages(mem_pool_host)
        if self._pages.size < _SMALL_PAGE:
            log.warning("--page-size %d: each page is stored by itself, expected 64 or so", self._pages.size)
        self._page_seconds = self._pages.size * _TOKEN_SECONDS
        self._thread = StoreThread(self._open)
        atexit.register(self.close)
        opened = self._thread.value
        log.info(
            "the prefix store of rank %d keeps pages of %d tokens and %d bytes in %s",
            *(self._worker, self._pages.size, opened.block_bytes, ", ".join(opened.store.tiers)),
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuses pools beside the one of keys and values: a page without its part there would be wrong."""
        if host_pool_name != PoolName.KV:
            raise ValueError(
                f"the model has a host pool {host_pool_name} ({type(host_pool).__name__}) beside its keys and values; "
                "expected full attention in every layer"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[OpenStore]:
        """The store of this rank's part, and its HTTP interface."""
        layout, config = self._pages.layout, self._store_config
        fingerprint = await fingerprint_of(self._storage_config, self.mem_pool_host, layout)
        namespace = fingerprint.digest
        if config.secret:  # without it nobody can compute a key
            namespace = hmac.digest(config.secret.encode(), namespace, "sha256")[:ID_BYTES]
        self._names = PartNames(namespace)
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(open_store(config, namespace, layout))
            if (at := listening(self._options, self._worker)) is not None:
                api = StoreApi(opened, self._pages.size, self._blocks_of, lambda: self._state(opened))
                await stack.enter_async_context(serving(api.application(), at))
            yield opened

    def _state(self, opened: OpenStore) -> dict[str, Any]:
        """For operators."""
        described = describe_store(opened, self._pages.size, self._page_seconds)
        return {**described, "engine": f"sglang {sglang.__version__}", "worker": self._worker}

    # Called by SGLang's threads

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages are stored and fetched sooner than computed."""
        if not keys:
            return 0
        # SGLang tells an empty prefix as none.
        before = (extra_info.prefix_keys if extra_info is not None else None) or []
        work = functools.partial(self._locate, before=before, keys=keys)
        return self._answer("a look-up", work, _LONGEST_LOOKUP, 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fills pages of the host pool, up to the first that fails. None is written after the return."""
        began = time.monotonic()
        restored = self._transfer("a fetch", self._restore, _LONGEST_RESTORE, keys, host_indices, extra_info)
        self._note(self._stats.prefetch_pgs, self._stats.prefetch_bandwidth, restored, began)
        return [place < restored for place in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores pages of the host pool. None is read after the return."""
        began = time.monotonic()
        kept = self._transfer("a write", self._keep, _LONGEST_KEEP, keys, host_indices, extra_info)
        self._note(self._stats.backup_pgs, self._stats.backup_bandwidth, kept, began)
        return [place < kept for place in range(len(keys))]

    def clear(self) -> None:
        """Empties the tiers of this process, for all engines that share them.

        Raises:
            RuntimeError: that has not ended within a minute, or the store is closed.
        """
        if self._answer("clearing", lambda opened: opened.store.clear(), _LONGEST_CLEAR, -1) < 0:
            raise RuntimeError("the prefix store was not cleared")

    def get_stats(self) -> StorageMetrics:
        """Pages since the last call, and how fast they went: GB/s."""
        stats, self._stats = self._stats, StorageMetrics()
        return stats

    def close(self) -> None:
        """Closes the store; whatever is asked then is a miss. At the process's end it is called anyway."""
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.close()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Not called with interface_v1, as the next four."""
        raise NotImplementedError("interface_v1 reads pages with batch_get_v1")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError("interface_v1 reads pages with batch_get_v1")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError("interface_v1 writes pages with batch_set_v1")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError("interface_v1 writes pages with batch_set_v1")

    def exists(self, key: str) -> bool:
        raise NotImplementedError("interface_v1 looks pages up with batch_exists")

    # In the store's thread

    async def _locate(self, opened: OpenStore, before: Sequence[str], keys: Sequence[str]) -> int:
        store, chain, first = opened.store, self._chain(before, keys), len(before)
        location = await store.locate(chain, within=_ASK_SECONDS)
        if first and any(location.leading.values()):
            # Pages that SGLang has in its own memory are used, too.
            self._begin(store.touch(chain[:first], location, self._access(before, keys)))
        plan = store.plan_fetch(first, location, self._page_seconds)
        fetched = {choice.place for choice in plan.choices if choice.fetched}
        is_probe = any(not choice.fetched and choice.place in fetched for choice in plan.choices)
        # Of a place that may have become fast again a few pages are tried. SGLang asks for none if they are too few.
        return max(0, (location.blocks if is_probe else plan.until) - first)

    async def _restore(self, opened: OpenStore, pages: _Pages) -> int:
        store, chain = opened.store, self._chain(pages.before, pages.keys)
        location = await store.locate(chain, within=_ASK_SECONDS)
        access = self._access(pages.before, pages.keys)
        return (await store.restore(chain, pages.segments, location, self._page_seconds, access, pages.cancel)).blocks

    async def _keep(self, opened: OpenStore, pages: _Pages) -> int:
        store, chain = opened.store, self._chain(pages.before, pages.keys)
        is_exact = self._store_config.lossy_codec is None
        await store.keep(chain, pages.segments, self._access(pages.before, pages.keys), is_exact, pages.cancel)
        location = await store.locate(chain, everywhere=False, within=_ASK_SECONDS)
        return max(0, max(location.leading.values(), default=0) - len(pages.before))

    def _chain(self, before: Sequence[str], keys: Sequence[str]) -> list[BlockId]:
        """The pages of a prompt from its first one on, by SGLang's keys: each a SHA-256 of the one before it and of the
        page's tokens, the first of the request's salt."""
        if (version := weight_version()) != self._weight_version:
            self._weight_version = version
            self._names.start_epoch()
        digests = [_NO_DIGEST, *map(bytes.fromhex, before), *map(bytes.fromhex, keys)]
        return [
            self._names.of(BlockId(NO_NAMESPACE, digest[:ID_BYTES], parent[:ID_BYTES], digest[ID_BYTES:]))
            for parent, digest in itertools.pairwise(digests)
        ]

    def _access(self, before: Sequence[str], keys: Sequence[str]) -> Access:
        """The use of pages by one request, as far as that shows: by calls within half a minute that begin with the same
        page, or after the last page of one."""
        now = time.monotonic()
        access = next((self._accesses[key] for key in (*before[-1:], keys[0]) if key in self._accesses), None)
        if access is None or now - access.time > _ONE_REQUEST_SECONDS:
            access = Access(now)
        for key in (keys[0], keys[-1]):
            self._accesses[key] = access
            self._accesses.move_to_end(key)
        while len(self._accesses) > _REMEMBERED:
            self._accesses.popitem(last=False)
        return access

    def _blocks_of(self, prompt: Prompt) -> list[BlockId]:
        """For the HTTP interface. A token that is none raises OverflowError."""
        key = RadixKey(array("q", prompt.tokens), cache_salt=prompt.cache_salt or None).page_aligned(self._pages.size)
        return self._chain([], get_storage_hash_str(key, None, page_size=self._pages.size)) if len(key) else []

    # Between the threads

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._thread is not None:
            self._thread.begin(work)

    def _transfer(
        self,
        what: str,
        work: Callable[[OpenStore, _Pages], Coroutine[Any, Any, int]],
        seconds: float,
        keys: Sequence[str],
        slots: Any,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> int:
        """How many of the pages at these slots were filled or stored; nothing touches them after the return."""
        before = extra_info.prefix_keys if extra_info is not None else None
        if before is None:
            if not self._is_told_of_prefix_keys:
                self._is_told_of_prefix_keys = True
                log.error(
                    "%s: no page is stored without hicache_storage_pass_prefix_keys, expected true", _EXTRA_CONFIG
                )
            return 0
        try:
            pages = _Pages(before, keys, self._pages.at(slots, len(keys)))
        except ValueError:
            log.exception("%s failed", what)
            return 0
        try:
            return self._answer(what, lambda opened: work(opened, pages), seconds, 0)
        finally:
            pages.cancel.set()

    def _answer(
        self, what: str, work: Callable[[OpenStore], Coroutine[Any, Any, T]], seconds: float, otherwise: T
    ) -> T:
        """The result of work in the store's thread; a default if that fails, or is not there in time.

        A thread that does not answer is not asked again before it has answered: that costs one wait, not one a call.
        """
        thread = self._thread
        if thread is None or not thread.is_alive or (self._late is not None and not self._late.done()):
            return otherwise
        answer: Future[T] = Future()

        async def run() -> None:
            result = otherwise
            try:
                result = await work(thread.value)
            finally:
                answer.set_result(result)

        thread.begin(run())
        try:
            return answer.result(seconds)
        except TimeoutError:
            self._late = answer
            log.warning("%s was given up after %g s; pages are computed", what, seconds)
            return otherwise

    def _note(self, pages: list[int], bandwidths: list[float], count: int, began: float) -> None:
        """For SGLang's metrics, where they are on."""
        if count and self._storage_config.enable_storage_metrics:
            pages.append(count)
            bandwidths.append(count * self._pages.layout.nbytes / (time.monotonic() - began) / 1e9)


def _check_store(store: StoreConfig, storage: HiCacheStorageConfig) -> None:
    """Checks tiers against what SGLang does not say.

    Raises:
        ValueError: names the option.
    """
    exact = [name for name, codec in store.codecs.items() if codec.is_exact]
    if store.lossy_codec is not None and exact:
        raise ValueError(
            f"{exact[0]} is {store.codecs[exact[0]].name}, expected {store.lossy_codec.name} as in the other tiers: "
            "SGLang does not tell which pages follow restored ones"
        )
    if storage.is_mla_model and storage.tp_size > 1 and not (store.disk or store.mooncake or store.index):
        raise ValueError(
            f"memory: of {storage.tp_size} ranks with the same pages only the first stores them; "
            "expected disk, mooncake or index, where the others find them"
        )
