"""The queue of writes to Redis: ordered, in the background, and bounded."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prefix_store.errors import IndexUnavailable
from prefix_store.index.connection import IndexConnection
from prefix_store.index.layout import joined, packed_epoch, packed_kind

log = logging.getLogger(__name__)

WriteKind = Literal["publish", "touch", "withdraw"]

_DEADLINE = 5.0
BLOCKS_AT_ONCE = 256
_MAX_BLOCKS = 65_536


class ClaimOwner(Protocol):
    """The owner of a write."""

    @property
    def epoch(self) -> int | None:
        """Its epoch when the write is sent; None if it has none, and the write is skipped."""


@dataclass(eq=False, slots=True)
class Write:
    """A write about some blocks of one owner."""

    kind: WriteKind
    owner: ClaimOwner
    keys: tuple[bytes, ...]
    tier: int = 0
    codec: int = 0
    unknown: Callable[[int], None] = field(default=lambda epoch: None, repr=False)
    """Of a publication: called with the epoch when the registry knows no such owner."""

    def joins(self, other: "Write") -> bool:
        """Whether both can be sent as one."""
        ours, theirs = ((w.kind, w.owner, w.tier, w.codec) for w in (self, other))
        return ours == theirs


class WriteQueue:
    """Writes wait here during an outage; too many are dropped and counted.

    After a loss the index may have wrong claims: `lost` is called once for each loss, so that the owners take a new
    epoch, which invalidates their earlier claims.
    """

    def __init__(self, connection: IndexConnection, claim_seconds: int, lost: Callable[[], None]) -> None:
        self._connection = connection
        self._claim_seconds = claim_seconds
        self._lost = lost
        self._waiting: deque[Write] = deque()
        self._blocks = 0
        self._has_waiting = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.dropped = 0
        """Blocks whose writes were dropped."""

    def add(self, write: Write) -> None:
        """Queue a write of at most BLOCKS_AT_ONCE blocks."""
        if self._blocks + len(write.keys) > _MAX_BLOCKS:
            self._give_up(write)
            return
        self._waiting.append(write)
        self._blocks += len(write.keys)
        self._is_empty.clear()
        self._has_waiting.set()
        if self._blocks > _MAX_BLOCKS // 2:
            self._has_room.clear()

    async def has_room(self) -> None:
        """Returns when the queue is at most half full: for large writes that can wait."""
        await self._has_room.wait()

    async def flush(self) -> None:
        """Returns when all writes were sent or lost."""
        await self._is_empty.wait()

    async def write_behind(self) -> None:
        """Sends queued writes; runs while the index is used."""
        while True:
            await self._has_waiting.wait()
            await self._connection.wait_available()
            write = self._next()
            try:
                await self._say(write)
            except IndexUnavailable as error:
                if not self._connection.is_available:
                    self._put_back(write)
                    continue
                log.warning("redis refused to %s %d blocks: %s", write.kind, len(write.keys), error)
                self.dropped += len(write.keys)
            if not self._waiting:
                self._is_empty.set()

    def _next(self) -> Write:
        """The oldest write, joined with those after it that can be."""
        write = self._waiting.popleft()
        keys = [*write.keys]
        while (
            self._waiting and write.joins(self._waiting[0]) and len(keys) + len(self._waiting[0].keys) <= BLOCKS_AT_ONCE
        ):
            keys += self._waiting.popleft().keys
        write.keys = tuple(keys)
        self._blocks -= len(keys)
        if not self._waiting:
            self._has_waiting.clear()
        if self._blocks <= _MAX_BLOCKS // 2:
            self._has_room.set()
        return write

    def _put_back(self, write: Write) -> None:
        self._waiting.appendleft(write)
        self._blocks += len(write.keys)
        self._has_waiting.set()

    async def _say(self, write: Write) -> None:
        """Raises IndexUnavailable."""
        epoch = write.owner.epoch
        if epoch is None:
            return
        epoch_bytes, keys = packed_epoch(epoch), joined(write.keys)
        match write.kind:
            case "publish":
                kind = packed_kind(write.tier, write.codec)
                known = await self._connection.ask(
                    "publish", epoch_bytes, kind, self._claim_seconds, keys, deadline=_DEADLINE
                )
                if not known:
                    write.unknown(epoch)
            case "touch":
                await self._connection.ask("touch", epoch_bytes, self._claim_seconds, keys, deadline=_DEADLINE)
            case "withdraw":
                await self._connection.ask("withdraw", epoch_bytes, keys, deadline=_DEADLINE)

    def _give_up(self, write: Write) -> None:
        self.dropped += len(write.keys) + self._blocks
        self._waiting.clear()
        self._has_waiting.clear()
        self._blocks = 0
        self._has_room.set()
        self._is_empty.set()
        self._lost()
