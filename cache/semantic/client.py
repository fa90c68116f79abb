"""A gateway's line to the process of the semantic cache, which may be slow, frozen, gone or lying."""

import asyncio
import itertools
from collections import deque
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from cache.errors import StoreUnavailable
from cache.semantic.messages import (
    Frames,
    Note,
    Question,
    Refused,
    Reply,
    Stats,
    StatsRequest,
    frame,
    from_service,
)
from cache.stores.breaker import Breaker

R = TypeVar("R")

_PROBE_DEADLINE = 2.0
# Notes that wait for a service that is away, and bytes that wait for one that does not read.
_NOTES_KEPT = 1000
_MAX_UNREAD = 4 * 2**20


class SemanticClient:
    """Asks the service, with a deadline for each question and a breaker: an ill service costs one deadline once.

    `watch` must run for as long as the client is used.
    """

    def __init__(self, socket: Path, deadline: float) -> None:
        self._socket = socket
        self._deadline = deadline
        self._line: _Line | None = None
        self._connecting = asyncio.Lock()
        self._notes: deque[Note] = deque(maxlen=_NOTES_KEPT)
        self.breaker = Breaker("the semantic cache", self._probe, (), _PROBE_DEADLINE)

    async def ask(self, question: Question, kind: type[R], deadline: float | None = None) -> R:
        """The service's reply, of the kind that belongs to the question. Raises StoreUnavailable."""
        due = self._deadline if deadline is None else deadline

        async def ask() -> Reply:
            return await (await self._connected()).ask(question)

        answer = await self.breaker.call(ask, due)
        if not isinstance(answer, kind):
            raise StoreUnavailable(answer.reason if isinstance(answer, Refused) else "the semantic cache: confused")
        return answer

    async def note(self, note: Note) -> None:
        """Tell the service; if it is away, when it comes back. The oldest notes are lost when too many wait."""
        self._notes.append(note)
        if not self.breaker.is_open:
            try:
                await self.breaker.call(self._send_notes, self._deadline)
            except StoreUnavailable:
                return

    async def watch(self) -> None:
        """Probe the service while it is away; runs for as long as the client is used."""
        try:
            await self.breaker.watch()
        finally:
            if self._line is not None:
                self._line.close()

    async def _probe(self) -> None:
        reply = await (await self._connected()).ask(StatsRequest())
        if not isinstance(reply, Stats):
            raise StoreUnavailable("the semantic cache is not ready")
        await self._send_notes()

    async def _send_notes(self) -> None:
        line = await self._connected()
        while self._notes:
            line.send(0, self._notes[0])
            self._notes.popleft()

    async def _connected(self) -> "_Line":
        if self._line is None or self._line.closed:
            async with self._connecting:
                if self._line is None or self._line.closed:
                    loop = asyncio.get_running_loop()
                    _, self._line = await loop.create_unix_connection(_Line, str(self._socket))
        return self._line


class _Line(asyncio.Protocol):
    """One connection, on which many questions are open at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._frames = Frames()
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Reply]] = {}
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's own class is none of asyncio's

    async def ask(self, question: Question) -> Reply:
        number = next(self._numbers)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._open[number] = reply
        try:
            self.send(number, question)
            return await reply
        finally:
            self._open.pop(number, None)

    def send(self, number: int, message: Question | Note) -> None:
        """Raises ConnectionError."""
        if self.closed or self._transport is None:
            raise ConnectionResetError("the semantic cache has gone")
        if self._transport.get_write_buffer_size() > _MAX_UNREAD:
            raise ConnectionError("the semantic cache does not read")
        self._transport.write(frame(number, message))

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                number, reply = from_service(payload)
                waiting = self._open.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (ValueError, msgspec.DecodeError):
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("the semantic cache has gone"))

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()
