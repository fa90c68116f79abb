"""What is known of engines' blocks, kept in Redis for workers that start later.

An engine replays its last 10,000 messages, which may be those of minutes. A worker that starts later knows older blocks
from a snapshot, and what has changed since then from the replay, which begins with the snapshot's last message: one of
another engine at the same address is told by that. A snapshot that is missing, old or wrong costs hits only.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from cache.errors import StoreUnavailable
from gateway.routing.prefixes.kv_events import BlocksState
from gateway.routing.prefixes.shared_history import Commands

log = logging.getLogger(__name__)

_KEY = "keepgate:kv-blocks:"
_MAX_BLOCKS = 100_000
"""Some 30 bytes each; of blocks of 16 tokens they are 1.6 million tokens."""
_INTERVAL = 30.0
"""Seconds between two snapshots of an engine, by whichever worker."""
_KEPT = 3600
_DEADLINE = 2.0


class Message(NamedTuple):
    """A message of an engine: its number, and the hash of its batch."""

    number: int
    digest: int


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """What is known after the message `last`."""

    last: Message
    state: BlocksState


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode


class BlockSnapshots:
    """Snapshots by the address where an engine publishes."""

    def __init__(self, store: Commands) -> None:
        self._store = store

    async def load(self, address: str) -> Snapshot | None:
        """The newest one, if Redis gives it in two seconds."""
        try:
            data = await self._store.command(("GET", _KEY + address), _DEADLINE)
            return None if data is None else await asyncio.to_thread(_decode, data)
        except (StoreUnavailable, msgspec.DecodeError) as error:  # or not written by this version
            log.debug("%s: no snapshot of its blocks: %s", address, error)
            return None

    async def keep(self, address: str, take: Callable[[int], Snapshot | None]) -> None:
        """Write what `take` gives, for at most so many blocks, now and then; one worker of all does."""
        written: Message | None = None
        while True:
            await asyncio.sleep(_INTERVAL)
            snapshot = take(_MAX_BLOCKS)
            if snapshot is None or snapshot.last == written:
                continue
            try:
                turn = ("SET", f"{_KEY}{address}:turn", "1", "NX", "PX", int(_INTERVAL * 900))
                if await self._store.command(turn, _DEADLINE) is not None:
                    data = await asyncio.to_thread(_encode, snapshot)
                    await self._store.command(("SET", _KEY + address, data, "EX", _KEPT), _DEADLINE)
                    written = snapshot.last
            except StoreUnavailable as error:
                log.debug("%s: its blocks are not kept: %s", address, error)
