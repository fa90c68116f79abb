"""The places beyond one engine's memory: searched together, read by plan, written in the background.

locate ─► plan_fetch ─► restore: memory ─► disk ─► peers ─► the rest is computed
keep ─► memory ─► disk ─► index
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from prefix_store.codecs.frame_format import BlockSource
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.segments import Segments
from prefix_store.store.fetch_plan import PEERS, FetchDecision, FetchPlan, FetchStep, plan_fetch
from prefix_store.store.location import Location
from prefix_store.store.owners import Owners
from prefix_store.store.peer_reader import PeerReader
from prefix_store.store.transfer_time import TransferTime
from prefix_store.tiers.cancellation import CancelToken
from prefix_store.tiers.host_memory import HostMemory
from prefix_store.tiers.tier import Tier

log = logging.getLogger(__name__)

T = TypeVar("T")

_SHORTEST_RESTORE, _LONGEST_RESTORE = 0.25, 5.0
_LONGEST_KEEP, _TRAILER_TIMEOUT = 10.0, 60.0
_LONGEST_TOUCH = 1.0
_ASK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore's result."""

    blocks: int
    lossy_from: int | None = None
    """The first block of the chain that was restored from a lossy form; None: none was."""


class PrefixStore:
    """Stores blocks in tiers, the fastest first, and finds them there and at peers. One event loop uses it.

    No method raises for a fault of a place: blocks that come too late are computed.

    Args:
        tiers: of this process, by name.
        owners: publishes them to the index; None: there is no index.
        peers: other engines; None if there are none.
    """

    def __init__(
        self, tiers: Mapping[str, Tier], owners: Owners | None = None, peers: PeerReader | None = None
    ) -> None:
        self.tiers = dict(tiers)
        self.owners = owners
        self.peers = peers
        self.figures = StoreFigures()
        self._resting: dict[str, float] = {}
        """Until when writes skip a tier that hung."""
        self._unanswered: dict[str, asyncio.Task[int]] = {}
        """Look-ups that tiers did not answer in time."""
        self.times = {name: TransferTime() for name in (*tiers, PEERS)}

    async def locate(self, chain: Sequence[BlockId], everywhere: bool = True, within: float = _ASK_SECONDS) -> Location:
        """Where the first blocks of a chain are; searches every place once, all at the same time.

        Args:
            everywhere: whether to search peers, too.
            within: seconds. A place that has not answered by then counts as empty, and is skipped until it has
                answered: one that hangs delays one request, and no other.
        """
        if not chain:
            return Location(dict.fromkeys(self.tiers, 0))
        asked = {
            name: asyncio.create_task(tier.lookup(chain))
            for name, tier in self.tiers.items()
            if name not in self._unanswered
        }
        peers = asyncio.create_task(self.peers.find(chain)) if everywhere and self.peers is not None else None
        if waited := [*asked.values(), *([peers] if peers else [])]:
            await asyncio.wait(waited, timeout=within)
        leading = {name: self._lookup(name, asked.get(name)) for name in self.tiers}
        return Location(leading, _given(peers, ()) if peers is not None else ())

    def _lookup(self, name: str, asked: asyncio.Task[int] | None) -> int:
        """A tier's answer, if it is there."""
        if asked is None:
            return 0
        if asked.done():
            return asked.result()
        self._unanswered[name] = asked
        asked.add_done_callback(lambda task: self._unanswered.pop(name, None))
        return 0

    def plan_fetch(self, first: int, location: Location, block_seconds: float | None) -> FetchPlan:
        """Plans the fetches from block ``first`` on; see `fetch_plan.plan_fetch`."""
        return plan_fetch(first, location, self.times, block_seconds, time.monotonic())

    async def restore(
        self,
        chain: Sequence[BlockId],
        into: Sequence[Segments],
        location: Location,
        block_seconds: float | None,
        access: Access,
        cancel: CancelToken,
    ) -> Restored:
        """Restores the last ``len(into)`` blocks of a chain, in order, up to the first that fails.

        Takes at most twice the time of computing them (0.25 s to 5 s; 5 s if that is unknown).

        Args:
            block_seconds: time to compute one of them; None: unknown.
            cancel: frees the memory, see `Tier.read`.
        """
        first = len(chain) - len(into)
        limit = _LONGEST_RESTORE if block_seconds is None else 2 * block_seconds * len(into)
        limit = min(max(limit, _SHORTEST_RESTORE), _LONGEST_RESTORE)
        failed: set[str] = set()
        done, lossy_from = first, None
        way = self.plan_fetch(first, location, block_seconds)
        self.figures.note(way.choices)
        with _ended_after(limit, cancel) as end:
            while way.steps and done < len(chain) and not end.cancel.is_set:
                step = way.steps[0]
                until = min(step.until, len(chain))
                got = await self._read(step, chain[:until], into[done - first : until - first], access, end)
                if got and not self._is_exact(step) and lossy_from is None:
                    lossy_from = done
                done += got
                self.figures.restored[step.place] += got
                if done < until:
                    failed.add(step.place)
                way = plan_fetch(done, location, self.times, block_seconds, time.monotonic(), failed)
        return Restored(done - first, lossy_from)

    async def keep(
        self, chain: Sequence[BlockId], sources: Sequence[Segments], access: Access, exact: bool, cancel: CancelToken
    ) -> None:
        """Stores the last ``len(sources)`` blocks of a chain in the tiers, and publishes them to the index.

        A tier that takes more than 10 s for that is skipped for a minute.

        Args:
            exact: whether the model computed them; if not, only lossy tiers store them.
        """
        self.figures.offered += len(sources)
        offered: Sequence[BlockSource] = sources
        with ExitStack() as lent:
            for name, tier in self.tiers.items():
                if not exact and tier.format.codec.is_exact:
                    continue
                if time.monotonic() < self._resting.get(name, 0.0):
                    continue
                with _ended_after(_LONGEST_KEEP, cancel) as end:
                    kept = await tier.write(chain, offered, access, end.cancel)
                if isinstance(tier, HostMemory):  # the next tiers need not encode what memory has now
                    offered = lent.enter_context(tier.lend(chain, sources))
                if end.is_late:
                    self._resting[name] = time.monotonic() + _TRAILER_TIMEOUT
                    log.warning("keeping %d blocks in %s was ended after %g s", len(sources), name, _LONGEST_KEEP)
                self.figures.kept[name] += kept
                if kept and self.owners is not None:
                    first = len(chain) - len(sources)
                    keys = [tier.format.stored_key(block.key) for block in chain[first : first + kept]]
                    await self.owners.publish(name, keys)

    async def touch(self, chain: Sequence[BlockId], location: Location, access: Access) -> None:
        """Records a use of a chain in the tiers, so that they keep blocks that another tier serves.

        Skips tiers that hang; ends after a second.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_TOUCH):
                for name, tier in self.tiers.items():
                    if name not in self._unanswered and (leading := location.leading.get(name, 0)):
                        await tier.touch(chain[:leading], access)

    async def pin(self, chain: Sequence[BlockId]) -> dict[str, int]:
        """Pins a chain until it is unpinned; returns the pinned leading blocks, by tier."""
        return {name: await tier.pin(chain) for name, tier in self.tiers.items()}

    async def unpin(self, chain: Sequence[BlockId]) -> dict[str, int]:
        """Removes a chain's pins; returns the leading blocks they kept, by tier."""
        return {name: await tier.unpin(chain) for name, tier in self.tiers.items()}

    async def discard(self, chain: Sequence[BlockId]) -> int:
        """Removes a chain and its descendants from every tier; returns the number of blocks."""
        return sum([await tier.discard(chain, 0) for tier in self.tiers.values()])

    async def clear(self) -> int:
        """Empties every tier of this process; returns the number of blocks."""
        return sum([await tier.clear() for tier in self.tiers.values()])

    async def _read(
        self, step: FetchStep, chain: Sequence[BlockId], into: Sequence[Segments], access: Access, end: _End
    ) -> int:
        """Runs one step of a plan; returns the restored blocks."""
        began = time.monotonic()
        if step.run is None:
            got = await self.tiers[step.place].read(chain, into, access, end.cancel)
        elif self.peers is not None:
            wanted = chain[len(chain) - len(into) :]
            got = await self.peers.read(step.run, wanted, into, end.deadline - began, end.cancel)
        else:
            got = 0
        now = time.monotonic()
        if got < len(into) and end.is_late:
            self.figures.late += 1
            log.warning("restoring %d blocks from %s was ended after %.2f s", len(into), step.place, now - began)
            # A place that gave nothing is assumed to need that time for one block.
            self.times[step.place].note_late(max(1, got), now - began, now)
        elif got:
            self.times[step.place].note(got, now - began, now)
        return got

    def _is_exact(self, step: FetchStep) -> bool:
        frame_format = self.tiers[step.place].format if step.run is None else step.run.format
        return frame_format.codec.is_exact


@dataclass(slots=True)
class _End:
    """The end of a restore: its deadline, or the caller's cancellation."""

    deadline: float
    cancel: CancelToken = field(default_factory=CancelToken)
    is_late: bool = False
    """Whether the deadline came first."""

    def expire(self) -> None:
        """The deadline passed."""
        self.is_late = not self.cancel.is_set
        self.cancel.set()


@contextmanager
def _ended_after(seconds: float, cancel: CancelToken) -> Iterator[_End]:
    """Sets a token after `seconds`: unlike a cancelled task, the work returns its result."""
    end = _End(time.monotonic() + seconds)
    timer = asyncio.get_running_loop().call_later(seconds, end.expire)
    try:
        with cancel.on_cancel(end.cancel.set):
            yield end
    finally:
        timer.cancel()


def _given(task: asyncio.Task[T], nothing: T) -> T:
    """The result of a task that is done, else a default; a late task goes on in the background."""
    if task.done():
        return task.result()
    task.cancel()
    return nothing


@dataclass(slots=True)
class StoreFigures:
    """Counts since the start, of blocks by place unless the name says otherwise."""

    restored: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)
    """Decided to be fetched, whether or not that worked."""
    computed: Counter[str] = field(default_factory=Counter)
    """Found, but computing them was expected to be faster."""
    late: int = 0
    """Fetches that were ended by their deadline."""
    offered: int = 0
    kept: Counter[str] = field(default_factory=Counter)

    def note(self, choices: tuple[FetchDecision, ...]) -> None:
        """Counts decisions."""
        for choice in choices:
            (self.fetched if choice.fetched else self.computed)[choice.place] += choice.blocks
