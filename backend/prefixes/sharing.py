"""Between the engine and the prefix store: asks before a request is queued, fetches and keeps while steps go on."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from collections.abc import Sequence as Many
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from backend.engine.async_engine import NOT_RUNNING, StepReport
from backend.engine.block_pool import BlockPool
from backend.engine.engine import Engine
from backend.engine.kv_connector import LoadRequest, SaveRequest, StoredPrefix
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.sequence import Sequence
from backend.errors import Unavailable
from backend.prefixes.audit import AuditFigures, PrefixAuditor
from prefix_store.eviction.access import Access
from prefix_store.identity.keys import KeyChain
from prefix_store.store.chain import Chain
from prefix_store.store.location import Location
from prefix_store.store.prefill_rate import PrefillRate
from prefix_store.store.store import PrefixStore, Restored
from telemetry.tracing.span import NO_SPAN, Span

logger = logging.getLogger(__name__)

_LONG_PROMPT = 2_048
"""Hashing so many tokens is too much work for the event loop."""
_LAST_SECONDS = 2.0
_SHORTEST_ASK, _LONGEST_ASK = 0.1, 0.5


@dataclass(frozen=True, slots=True)
class PrefixLocation:
    """Where the blocks of a prompt are."""

    chain: Chain
    in_pool: int
    """Leading blocks in the engine's own memory."""
    location: Location


class PrefixSharing:
    """A ``KvConnector`` over a store, for one engine.

    One event loop uses it, but for ``fetch`` and ``keep``, which the engine's thread calls. What they ask for is done
    on the event loop and its threads, and answered by a command to the engine's thread.

    Args:
        command: has the engine's thread call something between two steps.
    """

    def __init__(self, command: Callable[[Callable[[], None]], None]) -> None:
        self.rate = PrefillRate(BLOCK_SIZE)
        self._command = command
        self._engine: Engine | None = None
        self._auditor: PrefixAuditor | None = None
        self._store: PrefixStore | None = None
        self._namespace = bytes(16)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._keeps: asyncio.Queue[SaveRequest] = asyncio.Queue()
        self._totals = (0, 0)

    @asynccontextmanager
    async def over(
        self, store: PrefixStore, namespace: bytes, engine: Engine, auditor: PrefixAuditor
    ) -> AsyncIterator[None]:
        """Uses a store for as long as the block lasts; the engine must have ended by then."""
        self._store, self._namespace, self._engine, self._auditor = store, namespace, engine, auditor
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            keeping = tasks.create_task(self._keep_all(store))
            yield
            self._store = None
            try:
                async with asyncio.timeout(_LAST_SECONDS):
                    await self._keeps.join()
            except TimeoutError:
                logger.warning("%d pieces of prefixes were not kept in time", self._keeps.qsize())
            keeping.cancel()

    async def ask(self, sequences: Many[Sequence], one_shot: bool, span: Span = NO_SPAN) -> None:
        """Finds out where the beginnings of a request's sequences are, before they are queued.

        Args:
            one_shot: what they compute is kept only when it is used a second time.
            span: of the request.
        """
        store, engine = self._store, self._engine
        if store is None or engine is None:
            return
        access = Access(asyncio.get_running_loop().time(), one_shot)
        sharing = [sequence for sequence in sequences if engine.scheduler.may_share(sequence)]
        prompts = [list(alike) for _, alike in itertools.groupby(sharing, key=lambda sequence: sequence.tokens)]
        with span.span("prefix_store.lookup") as lookup:
            await asyncio.gather(*(self._ask(alike, store, engine.pool, access, span) for alike in prompts))
            found = [sequence.prefix for sequence in sharing if sequence.prefix is not None]
            lookup.set(
                {
                    "keepgate.prefix.stored_blocks": max((p.location.kept for p in found), default=0),
                    "keepgate.prefix.blocks_to_load": max((p.blocks_to_load for p in found), default=0),
                }
            )

    def ended(self, sequences: Many[Sequence]) -> None:
        """The request is over, so its length is known."""
        length = sum(sequence.num_generated for sequence in sequences)
        for sequence in sequences:
            prefix = sequence.prefix
            if prefix is None:
                continue
            prefix.access.end(length)
            if prefix.restored and self._auditor is not None and self._auditor.is_due():
                self._begin(self._auditor.audit(sequence, prefix), "a restored prefix could not be audited")

    @property
    def audits(self) -> AuditFigures:
        """What looking at restored prefixes has found."""
        return AuditFigures() if self._auditor is None else self._auditor.figures

    async def where(self, tokens: list[int], chain_keys: KeyChain) -> PrefixLocation:
        """Where the full blocks of a prompt are, for people.

        Raises:
            Unavailable: there is no store, or none any more.
        """
        store, engine = self._store, self._engine
        if store is None or engine is None:
            raise Unavailable(NOT_RUNNING)
        keys, chain = await asyncio.to_thread(self._hashed, tokens, chain_keys)
        in_pool = next((place for place, key in enumerate(keys) if engine.pool.find(key) is None), len(keys))
        return PrefixLocation(chain, in_pool, await store.locate(chain.blocks))

    async def settled(self) -> None:
        """Returns when all that has been handed over so far is kept, or given up."""
        await self._keeps.join()

    def record_step(self, report: StepReport) -> None:
        """Learns how fast the engine computes."""
        stats, (rows, prompt_rows) = report.stats, self._totals
        self._totals = stats.computed_rows, stats.prompt_tokens
        if report.computed:
            self.rate.note(stats.computed_rows - rows, stats.prompt_tokens - prompt_rows, report.seconds)

    def fetch(self, fetch: LoadRequest) -> None:
        """See ``KvConnector.fetch``."""
        self._call(lambda: self._begin_fetch(fetch))

    def keep(self, keep: SaveRequest) -> None:
        """See ``KvConnector.keep``."""
        self._call(lambda: self._keeps.put_nowait(keep))

    async def _ask(
        self, alike: Many[Sequence], store: PrefixStore, pool: BlockPool, access: Access, span: Span
    ) -> None:
        """Asks for the first of some sequences with one prompt, which is also the one that hands its blocks over."""
        first, *others = alike
        found = first.prefix = await self._prefix_of(first, store, pool, access)
        found.span = span
        for sequence in others:
            sequence.block_keys = list(first.block_keys)
            chain = found.chain.copy()
            sequence.prefix = StoredPrefix(
                chain, found.location, access, found.blocks_to_load, kept=len(chain.blocks), span=span
            )

    async def _prefix_of(self, sequence: Sequence, store: PrefixStore, pool: BlockPool, access: Access) -> StoredPrefix:
        if len(sequence.tokens) > _LONG_PROMPT:
            keys, chain = await asyncio.to_thread(self._hashed, sequence.tokens, sequence.keys)
        else:
            keys, chain = self._hashed(sequence.tokens, sequence.keys)
        sequence.block_keys = keys
        findable = keys[: (len(sequence.tokens) - 1) // BLOCK_SIZE]
        in_pool = next((place for place, key in enumerate(findable) if pool.find(key) is None), len(findable))
        location = await store.locate(
            chain.blocks, everywhere=in_pool < len(findable), within=self._lookup_timeout(len(findable) - in_pool)
        )
        if any(location.leading.values()):
            self._begin(store.touch(chain.blocks, location, access), "a use of a prefix could not be noted")
        blocks_to_load = store.plan_fetch(in_pool, location, self.rate.block_seconds).until
        return StoredPrefix(
            chain, location, access, blocks_to_load=min(blocks_to_load, len(findable)), kept=location.kept
        )

    def _lookup_timeout(self, blocks: int) -> float:
        """Seconds that an answer is waited for: a quarter of what computing so many blocks takes, within bounds."""
        each = self.rate.block_seconds
        return _LONGEST_ASK if each is None else min(max(_SHORTEST_ASK, 0.25 * blocks * each), _LONGEST_ASK)

    def _hashed(self, tokens: list[int], chain_keys: KeyChain) -> tuple[list[bytes], Chain]:
        """Keys of the prompt's full blocks, and the blocks themselves."""
        ids = np.asarray(tokens, dtype=np.int32)
        keys = chain_keys.keys_of(ids)
        chain = Chain(self._namespace, chain_keys.root, BLOCK_SIZE)
        chain.extend(keys, ids[: len(keys) * BLOCK_SIZE])
        return keys, chain

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _begin(self, work: Coroutine[None, None, None], failure: str) -> None:
        """Runs work in the background; its failure is logged and affects nothing else."""

        async def contained() -> None:
            try:
                await work
            except Exception:
                logger.exception(failure)

        if self._tasks is not None and self._store is not None:
            self._tasks.create_task(contained())
        else:
            work.close()

    def _begin_fetch(self, fetch: LoadRequest) -> None:
        if self._tasks is None or self._store is None:
            self._fetched(fetch, Restored(0))
        else:
            self._tasks.create_task(self._fetch(fetch, self._store))

    async def _fetch(self, fetch: LoadRequest, store: PrefixStore) -> None:
        restored = Restored(0)
        prefix = fetch.prefix
        try:
            with prefix.span.span("prefix_store.restore", {"keepgate.prefix.blocks": len(fetch.blocks)}) as restoring:
                restored = await store.restore(
                    prefix.chain.blocks[: fetch.first + len(fetch.blocks)],
                    fetch.incoming.segments,
                    prefix.location,
                    self.rate.block_seconds,
                    prefix.access,
                    fetch.cancel,
                )
                restoring.set({"keepgate.prefix.restored_blocks": restored.blocks})
            if restored.blocks:
                prefix.restored, prefix.lossy = fetch.first + restored.blocks, restored.lossy_from is not None
        except Exception:
            logger.exception("a prefix could not be restored and is computed")
        finally:
            self._fetched(fetch, restored)

    def _fetched(self, fetch: LoadRequest, restored: Restored) -> None:
        engine = self._engine
        if engine is not None:
            self._command(lambda: engine.fetched(fetch, restored.blocks, restored.lossy_from))

    async def _keep_all(self, store: PrefixStore) -> None:
        while True:
            keep = await self._keeps.get()
            try:
                await self._keep(keep, store)
            except Exception:
                logger.exception("a prefix could not be kept")
            finally:
                self._kept(keep)
                self._keeps.task_done()

    async def _keep(self, keep: SaveRequest, store: PrefixStore) -> None:
        chain = keep.prefix.chain
        known = len(chain.blocks) - keep.first
        if known < 0 or keep.cancel.is_set:  # an earlier block was not stored, or the work was cancelled
            return
        chain.extend(keep.keys[known:], keep.tokens[known * BLOCK_SIZE :])
        sources = await asyncio.to_thread(keep.outgoing.ready)
        blocks = chain.blocks[: keep.first + len(keep.blocks)]
        with keep.prefix.span.span("prefix_store.offload", {"keepgate.prefix.blocks": len(keep.blocks)}):
            await store.keep(blocks, sources, keep.prefix.access, keep.exact, keep.cancel)

    def _kept(self, keep: SaveRequest) -> None:
        engine = self._engine
        if engine is not None:
            self._command(lambda: engine.kept(keep))
