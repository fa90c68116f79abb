"""The router's memory of prompts, shared by the workers of all hosts through Redis.

Every worker appends what it has sent to a bounded stream, and follows what others append; a new one begins with all
that is still there. While Redis is away, a worker remembers what it has sent itself.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from cache.errors import StoreUnavailable
from gateway.routing.prefixes.history import PrefixHistory

log = logging.getLogger(__name__)

_STREAM = "keepgate:routed"
_MAX_ENTRIES = 2_000
_MAX_BLOCKS = 1_024
"""Of an entry: some 8 KB, so that the stream has 16 MB at most, and an entry is read in a fraction of a millisecond."""
_MAX_UNSENT = 4_096
"""Prompts that wait for Redis; while it is away the oldest are dropped."""
_MAX_READ = 20
_INTERVAL = 0.2
_DEADLINE = 2.0
_BLOCK_BYTES = 8

_Sent = tuple[str, bytes]
"""An upstream, and the blocks of a prompt."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Sent]).decode


class Commands(Protocol):
    """What is needed of `RedisStore`."""

    async def command(self, command: tuple[str | bytes | int, ...], deadline: float | None = None) -> Any:
        """The reply to a command. Raises StoreUnavailable."""


class SharedPrefixHistory(PrefixHistory):
    """A history that other workers add to. `share` and `follow` run for as long as it is used."""

    def __init__(self, capacity: int, max_upstreams: int = 1_000) -> None:
        super().__init__(capacity)
        self._max_upstreams = max_upstreams
        self._worker = secrets.token_bytes(8)
        self._unsent: deque[tuple[str, Sequence[int]]] = deque(maxlen=_MAX_UNSENT)
        self._has_unsent = asyncio.Event()
        self._position: str | bytes = "0"

    def sent(self, upstream: str, blocks: Sequence[int]) -> None:
        super().sent(upstream, blocks)
        if blocks:
            self._unsent.append((upstream, blocks))
            self._has_unsent.set()

    async def share(self, store: Commands) -> None:
        """Append what this worker sends."""
        while True:
            await self._has_unsent.wait()
            await asyncio.sleep(_INTERVAL)  # gathers what a busy worker sends into one entry
            try:
                await self._append(store)
            except StoreUnavailable as error:
                log.debug("what was sent is not shared: %s", error)

    async def follow(self, store: Commands) -> None:
        """Read what others append, a moment later."""
        while True:
            try:
                is_behind = await self._read(store)
            except StoreUnavailable as error:
                is_behind = False
                log.debug("what others have sent is unknown: %s", error)
            await asyncio.sleep(0 if is_behind else _INTERVAL)

    async def _append(self, store: Commands) -> None:
        while self._unsent:
            batch = list(self._next_batch())
            await store.command(
                ("XADD", _STREAM, "MAXLEN", "~", _MAX_ENTRIES, "*", "worker", self._worker, "sent", _encode(batch)),
                _DEADLINE,
            )
        self._has_unsent.clear()

    def _next_batch(self) -> Iterator[_Sent]:
        """The oldest prompts that wait, at least one."""
        size = 0
        while self._unsent and (not size or size + len(self._unsent[0][1]) <= _MAX_BLOCKS):
            upstream, blocks = self._unsent.popleft()
            size += len(blocks)
            yield upstream, b"".join(block.to_bytes(_BLOCK_BYTES, "little") for block in blocks)

    async def _read(self, store: Commands) -> bool:
        """Whether there were entries."""
        entries = await store.command(("XRANGE", _STREAM, self._position, "+", "COUNT", _MAX_READ), _DEADLINE)
        for entry_id, fields in entries:
            self._position = b"(" + entry_id
            values = dict(zip(fields[::2], fields[1::2], strict=True))
            if values.get(b"worker") != self._worker:
                self._take(values.get(b"sent", b""))
                await asyncio.sleep(0)
        return bool(entries)

    def _take(self, data: bytes) -> None:
        try:
            batch = _decode(data)
        except msgspec.DecodeError:  # not written by this version
            return
        for upstream, packed in batch:
            blocks = [
                int.from_bytes(packed[at : at + _BLOCK_BYTES], "little") for at in range(0, len(packed), _BLOCK_BYTES)
            ]
            if upstream in self._held or len(self._held) < self._max_upstreams:
                super().sent(upstream, blocks)
