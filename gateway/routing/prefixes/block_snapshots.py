"""What is known of engines' blocks, kept in Redis for workers that start later.

An engine replays its last 10,000 messages, which may be those of minutes. A worker that starts later knows older blocks
from a snapshot, and what has changed since then from the replay, which begins with the snapshot's last message: one of
another engine at the same address is told by that. A snapshot that is missing, old or wrong costs hits only.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from cache.errors import StoreUnavailable
from gateway.routing.prefixes.kv_events import BlocksState, EngineBlocks, HeldBlock
from gateway.routing.prefixes.shared_history import Commands

log = logging.getLogger(__name__)

_KEY = "keepgate:kv-blocks:"
_MAX_BLOCKS = 100_000
"""Some 30 bytes each; of blocks of 16 tokens they are 1.6 million tokens."""
_PART = 1_000
_INTERVAL = 30.0
"""Seconds between two snapshots of an engine, by whichever worker."""
_KEPT = 3600
_DEADLINE = 2.0


class Message(NamedTuple):
    """A message of an engine: its number, and the hash of its batch."""

    number: int
    digest: int


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """What is known after the message `last`; `parts` are blocks in msgpack, which take a moment each to be read."""

    last: Message
    state: BlocksState
    parts: list[bytes]

    def blocks(self) -> Iterator[list[HeldBlock]]:
        """Those of each part. Raises DecodeError."""
        return map(_decode_part, self.parts)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode
_decode_part = msgspec.msgpack.Decoder(list[HeldBlock]).decode


class BlockSnapshots:
    """Snapshots by the address where an engine publishes."""

    def __init__(self, store: Commands) -> None:
        self._store = store

    async def load(self, address: str) -> Snapshot | None:
        """The newest one, if Redis gives it in two seconds."""
        try:
            data = await self._store.command(("GET", _KEY + address), _DEADLINE)
            return None if data is None else _decode(data)
        except (StoreUnavailable, msgspec.DecodeError) as error:  # or not written by this version
            log.debug("%s: no snapshot of its blocks: %s", address, error)
            return None

    async def keep(self, address: str, known: Callable[[], tuple[Message, EngineBlocks] | None]) -> None:
        """Write what is known after which message, now and then; of all workers one does."""
        while True:
            await asyncio.sleep(_INTERVAL)
            try:
                turn = ("SET", f"{_KEY}{address}:turn", "1", "NX", "PX", int(_INTERVAL * 900))
                if (found := known()) is not None and await self._store.command(turn, _DEADLINE) is not None:
                    last, blocks = found
                    data = await asyncio.to_thread(_encoded, last, *blocks.state(_MAX_BLOCKS))
                    await self._store.command(("SET", _KEY + address, data, "EX", _KEPT), _DEADLINE)
            except StoreUnavailable as error:
                log.debug("%s: its blocks are not kept: %s", address, error)


def _encoded(last: Message, state: BlocksState, blocks: Sequence[HeldBlock]) -> bytes:
    parts = [_encode(blocks[first : first + _PART]) for first in range(0, len(blocks), _PART)]
    return _encode(Snapshot(last, state, parts))
