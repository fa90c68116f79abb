"""A gateway's connection to the process of the semantic cache, which may be slow, frozen, gone or lying."""

import asyncio
import contextlib
import itertools
from collections import deque
from pathlib import Path
from typing import TypeVar

import msgspec

from cache.errors import StoreUnavailable
from cache.semantic.messages import MAX_LINE, Note, Refused, Reply, Request, Stats, StatsRequest, from_service, line_of
from cache.stores.breaker import Breaker

R = TypeVar("R")

_PROBE_DEADLINE = 2.0
# Notes that wait for a service that is away, and bytes that wait for one that does not read.
_NOTES_KEPT = 1000
_MAX_UNREAD = 4 * 2**20


class SemanticClient:
    """Asks the service, with a deadline for each request and a breaker: an ill service costs one deadline once.

    Many requests are open at a time on one connection. `watch` must run for as long as the client is used.
    """

    def __init__(self, socket: Path, deadline: float) -> None:
        self.breaker = Breaker("the semantic cache", self._probe, (), _PROBE_DEADLINE)
        self._socket = socket
        self._deadline = deadline
        self._notes: deque[Note] = deque(maxlen=_NOTES_KEPT)
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Reply]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def ask(self, request: Request, kind: type[R], deadline: float | None = None) -> R:
        """The service's reply, of the kind that belongs to the request. Raises StoreUnavailable."""
        answer = await self.breaker.call(lambda: self._ask(request), self._deadline if deadline is None else deadline)
        if not isinstance(answer, kind):
            raise StoreUnavailable(answer.reason if isinstance(answer, Refused) else "the semantic cache: confused")
        return answer

    async def note(self, note: Note) -> None:
        """Tell the service; if it is away, when it comes back. The oldest notes are lost when too many wait."""
        self._notes.append(note)
        with contextlib.suppress(StoreUnavailable):
            await self.breaker.call(self._send_notes, self._deadline)

    async def watch(self) -> None:
        """Probe the service while it is away; runs for as long as the client is used."""
        try:
            await self.breaker.watch()
        finally:
            if self._reading is not None:
                self._reading.cancel()

    async def _probe(self) -> None:
        if not isinstance(await self._ask(StatsRequest()), Stats):
            raise StoreUnavailable("the semantic cache is not ready")
        await self._send_notes()

    async def _send_notes(self) -> None:
        writer = await self._connected()
        while self._notes:
            _send(writer, 0, self._notes[0])
            self._notes.popleft()

    async def _ask(self, request: Request) -> Reply:
        writer, number = await self._connected(), next(self._numbers)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._open[number] = reply
        try:
            _send(writer, number, request)
            return await reply
        finally:
            del self._open[number]

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self._socket, limit=MAX_LINE)
                self._reading = asyncio.create_task(self._read(reader, self._writer))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes replies on until the connection ends."""
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                number, reply = from_service(line)
                if (waiting := self._open.get(number)) is not None and not waiting.done():
                    waiting.set_result(reply)
        except (OSError, ValueError, msgspec.DecodeError):
            pass  # it is gone, or says what no service does
        finally:
            self._writer = None
            writer.close()
            for waiting in self._open.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionResetError("the semantic cache has gone"))


def _send(writer: asyncio.StreamWriter, number: int, message: Request | Note) -> None:
    """Raises ConnectionError."""
    if writer.is_closing():
        raise ConnectionResetError("the semantic cache has gone")
    if writer.transport.get_write_buffer_size() > _MAX_UNREAD:
        raise ConnectionError("the semantic cache does not read")
    writer.write(line_of(number, message))
