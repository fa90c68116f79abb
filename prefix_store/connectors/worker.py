"""The side of a connector that lives with an engine's worker: carries out the scheduler side's plans with the store.

The engine's thread calls it around each step and never waits for the store; the store's thread answers through a queue
that is read at the end of a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefix_store.connectors import lookup_sockets
from prefix_store.connectors.kv_memory import Incoming, KvMemory, Outgoing, largest_error
from prefix_store.connectors.store_thread import StoreThread
from prefix_store.connectors.transfers import Audit, Found, Load, Lookup, PartNames, Save, StepPlan, StepReport
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.store.location import Location
from prefix_store.store.open_store import OpenStore
from prefix_store.store.store import Restored
from prefix_store.tiers.cancellation import Cancelled, CancelToken

log = logging.getLogger(__name__)

_SHORTEST_LOOKUP, _LONGEST_LOOKUP = 0.1, 0.5
_LONGEST_LOAD = 10.0
"""Seconds after which a load counts as failed, whatever the store says: twice what a restore may take."""
_LONGEST_SAVE = 60.0
"""Seconds after which a save or an audit is given up, so that the engine has its blocks again."""
_IDLE_WAIT = 0.002
"""Seconds that an engine without other work waits for the store, instead of asking it again and again."""
_SHARE_WAITING = 4
"""At most one in so many of the engine's blocks waits to be saved; the next ones are not saved."""
_MAX_ERROR = 0.05
"""Relative error of an audited block up to which two computations of one thing count as the same."""


@dataclass(slots=True, eq=False)
class _Job:
    """Work of the store with an engine's blocks."""

    blocks: int = 0
    began: float = field(default_factory=time.monotonic)
    cancel: CancelToken = field(default_factory=CancelToken)


@dataclass(slots=True)
class _Held:
    """What a worker knows of a request."""

    access: Access
    chain: list[BlockId]
    lookup: int
    """The number of the look-up."""
    location: Location = field(default_factory=lambda: Location({}))
    found: Found | None = None
    """The answer to the look-up."""
    load: tuple[Load, _Job] | None = None
    jobs: set[_Job] = field(default_factory=set)
    """Saves and audits."""
    is_over: bool = False
    is_awaited: bool = False
    """Whether the end of its saves is to be reported, once it is over."""


@dataclass(slots=True)
class ConnectorFigures:
    """Counts since the start; of blocks unless the name says otherwise."""

    dropped: int = 0
    """Not saved, because too many were waiting."""
    failed_loads: int = 0
    """Announced and not loaded."""
    audited: int = 0
    """Prefixes that were computed and compared."""
    drifted: int = 0
    """Of these, those that were not what is computed, and were removed."""
    void: int = 0
    """Of these, those that could not be compared: peers have them, or nobody any more."""
    largest_error: float = 0.0


class WorkerSide:
    """One worker's part of the blocks.

    Args:
        memory: the engine's blocks.
        num_blocks: how many there are.
        thread: has the store of this worker's part.
        names: of its blocks.
    """

    def __init__(self, memory: KvMemory, num_blocks: int, thread: StoreThread[OpenStore], names: PartNames) -> None:
        self.figures = ConnectorFigures()
        self._memory = memory
        self._most_waiting = max(1, num_blocks // _SHARE_WAITING)
        self._thread = thread
        self._names = names
        self._requests: dict[str, _Held] = {}
        self._ahead: dict[str, _Held] = {}
        """Requests that were asked about ahead of their step."""
        self._asked: socket.socket | None = None
        self._lookup_address: bytes = b""
        """Of the scheduler's socket, to which it has connected or tried to."""
        self._last_lookup = 0
        """With a step."""
        self._waiting = 0
        """Blocks of saves that are not done."""
        self._saving = asyncio.Lock()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What the store's thread has to say, to be called in the engine's."""
        self._report = StepReport()
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self.block_seconds: float | None = None
        """What computing a block takes; None: unknown."""

    @property
    def opened(self) -> OpenStore:
        """The store."""
        return self._thread.value

    def before_step(self, plan: StepPlan) -> None:
        """Before the engine computes: nothing reads or writes blocks of preempted requests when this returns."""
        for request_id in plan.preempted:
            if (held := self._requests.get(request_id)) is not None:
                self._cancel(held, held.jobs)
        if plan.preempted:
            self._memory.fence()

    def begin(self, plan: StepPlan) -> None:
        """Begins the look-ups, which go on while the engine computes."""
        self._report.step = plan.step
        self.block_seconds = plan.block_seconds
        if plan.starts_epoch:
            self._names.start_epoch()
            self._ahead.clear()  # these have the old names
        if plan.lookup_address and plan.lookup_address != self._lookup_address:
            self._lookup_address = plan.lookup_address
            self._asked = lookup_sockets.connect(plan.lookup_address)
            if self._asked is not None:
                self._thread.begin(lookup_sockets.receive(self._asked, self._look_up_ahead))
        self._take_results()
        for lookup in plan.lookups:
            try:
                self._look_up(lookup)
            except Exception:
                log.exception("a look-up did not begin; its prompt is computed")
                self._report.found[lookup.request_id] = Found(lookup.number)

    def load(self, plan: StepPlan) -> None:
        """Begins to load blocks. The engine has queued nothing more that writes them."""
        for load in plan.loads:
            self._load(load)
        for request_id in plan.aborted:
            if (held := self._requests.get(request_id)) is not None and held.load is not None:
                held.load[1].cancel.set()

    def save(self, plan: StepPlan) -> None:
        """Begins to save blocks, which the engine has computed or will have when its queue is empty."""
        for save in plan.saves:
            try:
                self._save(save)
            except Exception:
                log.exception("a save did not begin; nothing more of its request is stored")
                if (held := self._requests.pop(save.request_id, None)) is not None:
                    self._cancel(held, held.jobs)
        for audit in plan.audits:
            self._audit(audit)
        for request_id, (is_awaited, answer) in plan.ended.items():
            held = self._requests.get(request_id)
            if held is None:
                if is_awaited:
                    self._sent.add(request_id)
                continue
            held.access.end(answer)
            held.is_over, held.is_awaited = True, is_awaited
            self._settle(request_id, held)

    def collect(self, is_idle: bool) -> tuple[set[str], set[str]]:
        """The requests whose saves and whose loads have ended since the last call.

        Args:
            is_idle: whether the engine has nothing else to do than to wait a little.
        """
        try:
            if is_idle and self._is_awaited():
                self._done.get(timeout=_IDLE_WAIT)()
        except queue.Empty:
            pass
        self._take_results()
        self._give_up_late_work()
        sent, received = self._sent, self._received
        self._sent, self._received = set(), set()
        return sent, received

    def failed_blocks(self) -> set[int]:
        """The engine's blocks that were to be loaded and were not, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> StepReport:
        """For the scheduler's side."""
        report, self._report = self._report, StepReport()
        return report

    def audits(self) -> dict[str, float]:
        """What audits have found, for operators."""
        figures = self.figures
        return {name: getattr(figures, name) for name in ("audited", "drifted", "void", "largest_error")}

    def close(self) -> None:
        """Frees the engine's memory, and closes the store."""
        for held in self._requests.values():
            self._cancel(held, held.jobs)
        if self._asked is not None:
            lookup_sockets.shut_down(self._asked)
        self._thread.close()
        if self._asked is not None:
            self._asked.close()

    # Look-ups

    def _look_up(self, lookup: Lookup) -> None:
        self._last_lookup = lookup.number
        held = self._ahead.pop(lookup.request_id, None)
        if held is not None and held.lookup == lookup.number:
            self._requests[lookup.request_id] = held
            if held.found is not None:
                self._report.found[lookup.request_id] = held.found
            return
        held = self._requests[lookup.request_id] = self._held(lookup)
        if not self._thread.is_alive:
            self._report.found[lookup.request_id] = held.found = Found(lookup.number)
            return
        self._thread.begin(self._locate(lookup.request_id, held, tuple(held.chain)))

    def _held(self, lookup: Lookup) -> _Held:
        chain = [self._names.of(block) for block in lookup.blocks]
        return _Held(Access(time.monotonic()), chain, lookup.number)

    def _look_up_ahead(self, lookup: Lookup, asked: socket.socket) -> None:
        """In the store's thread. Its step comes later, or is here already: then the answer is not needed."""
        epoch, held = self._names.epoch, self._held(lookup)
        self._done.put(lambda: self._note_ahead(lookup.request_id, held, epoch))
        self._thread.begin(self._answer_ahead(lookup.request_id, held, asked))

    def _note_ahead(self, request_id: str, held: _Held, epoch: bytes) -> None:
        if held.lookup > self._last_lookup and epoch == self._names.epoch:
            self._ahead[request_id] = held

    async def _answer_ahead(self, request_id: str, held: _Held, asked: socket.socket) -> None:
        found = await self._locate(request_id, held, tuple(held.chain))
        await lookup_sockets.send(asked, request_id, found)

    async def _locate(self, request_id: str, held: _Held, chain: Sequence[BlockId]) -> Found:
        store, block_seconds = self.opened.store, self.block_seconds
        location, until = Location({}), 0
        try:
            location = await store.locate(chain, within=self._lookup_seconds(len(chain), block_seconds))
            if any(location.leading.values()):
                self._thread.begin(store.touch(chain, location, held.access))
            until = store.plan_fetch(0, location, block_seconds).until
        finally:
            found = Found(held.lookup, until, location.kept)
            self._done.put(lambda: self._located(request_id, held, location, found))
        return found

    def _lookup_seconds(self, blocks: int, block_seconds: float | None) -> float:
        """A quarter of what computing so many blocks takes, within bounds."""
        if block_seconds is None:
            return _LONGEST_LOOKUP
        return min(max(_SHORTEST_LOOKUP, 0.25 * blocks * block_seconds), _LONGEST_LOOKUP)

    def _located(self, request_id: str, held: _Held, location: Location, found: Found) -> None:
        held.location, held.found = location, found
        if self._requests.get(request_id) is held:
            self._report.found[request_id] = found

    # Loads

    def _load(self, load: Load) -> None:
        held, job = self._requests.get(load.request_id), _Job(len(load.block_ids))
        if held is None or not self._thread.is_alive:
            self._end_load(load, 0)
            return
        held.load = load, job
        try:
            incoming = self._memory.incoming(load.block_ids)
            chain = tuple(held.chain[: load.first + len(load.block_ids)])
            self._thread.begin(self._restore(load, job, held, chain, incoming, self.block_seconds))
        except Exception:
            log.exception("a load did not begin; its blocks are computed")
            self._loaded(load, job, held, Restored(0))

    async def _restore(
        self,
        load: Load,
        job: _Job,
        held: _Held,
        chain: Sequence[BlockId],
        incoming: Incoming,
        block_seconds: float | None,
    ) -> None:
        restored = Restored(0)
        try:
            restored = await self.opened.store.restore(
                chain, incoming.segments, held.location, block_seconds, held.access, job.cancel
            )
            if not self._memory.is_on_host:
                restored = await asyncio.to_thread(_finish, incoming, restored, job.cancel)
        except BaseException:
            job.cancel.set()
            restored = Restored(0)
            raise
        finally:
            self._done.put(lambda: self._loaded(load, job, held, restored))

    def _loaded(self, load: Load, job: _Job, held: _Held, restored: Restored) -> None:
        if held.load is None or held.load[1] is not job:  # it was given up
            return
        held.load = None
        self._end_load(load, restored.blocks)
        self._settle(load.request_id, held)

    def _end_load(self, load: Load, restored: int) -> None:
        """Reports the end of a load, and the blocks that were not loaded."""
        failed = load.block_ids[restored:]
        self._failed_blocks.update(failed)
        self.figures.failed_loads += len(failed)
        self._received.add(load.request_id)

    # Saves

    def _save(self, save: Save) -> None:
        held = self._requests.get(save.request_id)
        if held is None:
            return
        held.chain += tuple(self._names.of(block) for block in save.blocks)
        room = self._most_waiting - self._waiting if self._thread.is_alive else 0
        block_ids = save.block_ids[: max(0, room)]
        self.figures.dropped += len(save.block_ids) - len(block_ids)
        if not block_ids:
            return
        outgoing = self._memory.outgoing(block_ids)
        job = self._begin_job(held, len(block_ids))
        chain = tuple(held.chain[: save.first + len(block_ids)])
        self._thread.begin(self._keep(save.request_id, held, job, chain, outgoing))

    async def _keep(
        self, request_id: str, held: _Held, job: _Job, chain: Sequence[BlockId], outgoing: Outgoing
    ) -> None:
        try:
            async with self._saving:  # in order: a block is stored after its parent
                if not job.cancel.is_set:
                    sources = outgoing.ready() if self._memory.is_on_host else await asyncio.to_thread(outgoing.ready)
                    await self.opened.store.keep(chain, sources, held.access, exact=True, cancel=job.cancel)
        finally:
            self._done.put(lambda: self._job_done(request_id, held, job))

    # Audits

    def _audit(self, audit: Audit) -> None:
        held = self._requests.get(audit.request_id)
        if held is None or not self._thread.is_alive:
            return
        try:
            outgoing = self._memory.outgoing(audit.block_ids)
        except Exception:
            log.exception("an audit did not begin")
            return
        job = self._begin_job(held, 0)
        chain = tuple(held.chain[: audit.first + len(audit.block_ids)])
        self._thread.begin(self._compare(audit, held, job, chain, outgoing))

    async def _compare(
        self, audit: Audit, held: _Held, job: _Job, chain: Sequence[BlockId], outgoing: Outgoing
    ) -> None:
        """Reads what is stored of a chain, and compares it with what was computed."""
        store, figures, count = self.opened.store, self.figures, len(audit.block_ids)
        try:
            stored = np.empty((count, self.opened.block_bytes), np.uint8)
            read = 0
            for name, tier in store.tiers.items():
                if not read and held.location.leading.get(name, 0) >= len(chain):
                    read = await tier.read(chain, [[block] for block in stored], held.access, job.cancel)
            sources = await asyncio.to_thread(outgoing.ready)
            error = await asyncio.to_thread(largest_error, self._memory.layout, stored[:read], sources, job.cancel)
            figures.audited += 1
            if error is None:
                figures.void += 1
                return
            figures.largest_error = max(figures.largest_error, error)
            if error > _MAX_ERROR:
                figures.drifted += 1
                log.error(
                    "a stored prefix of %d blocks is not what the engine computes: its numbers differ by %.3g of the "
                    "largest; it is removed",
                    *(read, error),
                )
                await store.discard(chain)
        finally:
            self._done.put(lambda: self._job_done(audit.request_id, held, job))

    def _begin_job(self, held: _Held, blocks: int) -> _Job:
        job = _Job(blocks)
        held.jobs.add(job)
        self._waiting += blocks
        return job

    def _job_done(self, request_id: str, held: _Held, job: _Job) -> None:
        if job in held.jobs:
            held.jobs.discard(job)
            self._waiting -= job.blocks
            self._settle(request_id, held)

    def _settle(self, request_id: str, held: _Held) -> None:
        """Forgets a request once it is over and so is the work for it; reports that if it is waited for."""
        if held.is_over and not held.jobs and held.load is None and self._requests.get(request_id) is held:
            del self._requests[request_id]
            if held.is_awaited:
                self._sent.add(request_id)

    def _cancel(self, held: _Held, jobs: Iterable[_Job]) -> None:
        """Ends saves and audits of a request: nothing touches their blocks any more."""
        for job in list(jobs):
            job.cancel.set()
            self._waiting -= job.blocks
            held.jobs.discard(job)

    def _is_awaited(self) -> bool:
        return any(held.load is not None or held.is_over or held.found is None for held in self._requests.values())

    def _take_results(self) -> None:
        """Runs what the store's thread has put into the queue."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._done.get_nowait()()

    def _give_up_late_work(self) -> None:
        """Ends what the store does not end, and all work if its thread has died."""
        now, is_alive = time.monotonic(), self._thread.is_alive
        for request_id, held in list(self._requests.items()):
            if held.load is not None:
                load, job = held.load
                if not is_alive or now - job.began > _LONGEST_LOAD:
                    job.cancel.set()
                    held.load = None
                    self._end_load(load, 0)
            self._cancel(held, [job for job in held.jobs if not is_alive or now - job.began > _LONGEST_SAVE])
            self._settle(request_id, held)


def _finish(incoming: Incoming, restored: Restored, cancel: CancelToken) -> Restored:
    """Copies restored blocks to the engine's memory, unless it was taken back."""
    try:
        with cancel:
            incoming.finish(restored.blocks)
    except Cancelled:
        return Restored(0)
    return restored
