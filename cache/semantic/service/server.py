"""The server for the gateways' connections."""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from cache.errors import CacheError
from cache.semantic.messages import Frames, Note, Question, Refused, Reply, frame, from_gateway

log = logging.getLogger(__name__)

Handler = Callable[[Question | Note], Awaitable[Reply | None]]

_READ_BYTES = 2**16
# Of one gateway: beyond it the service reads no more from it until some are answered.
_MAX_OPEN = 256


@asynccontextmanager
async def serving(socket: Path, handle: Handler) -> AsyncIterator[None]:
    """Serves gateways at a Unix socket, in a folder that only this user can open."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _Conversation(handle, reader, writer).run()
        except* (ConnectionError, ValueError, msgspec.DecodeError) as errors:
            log.debug("a gateway's line ended: %s", errors.exceptions[0])
        finally:
            writer.close()

    server = await asyncio.start_unix_server(converse, socket)
    try:
        yield
    finally:
        server.close()
        server.close_clients() if hasattr(server, "close_clients") else None


class _Conversation:
    """One connection. Replies are sent as they are ready, not in the order of the questions."""

    def __init__(self, handle: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handle = handle
        self._reader = reader
        self._writer = writer
        self._slots = asyncio.Semaphore(_MAX_OPEN)

    async def run(self) -> None:
        frames = Frames()
        async with asyncio.TaskGroup() as tasks:
            while data := await self._reader.read(_READ_BYTES):
                for payload in frames.feed(data):
                    number, message = from_gateway(payload)
                    await self._slots.acquire()
                    tasks.create_task(self._answer(number, message))

    async def _answer(self, number: int, message: Question | Note) -> None:
        try:
            try:
                reply = await self._handle(message)
            except CacheError as error:
                reply = Refused(str(error))
            except Exception as fault:  # noqa: BLE001  # the last resort: it is logged, and the gateway goes on without
                # The frames only name code; the message might quote a tenant's text.
                frames = "".join(traceback.format_tb(fault.__traceback__))
                log.error("the semantic cache failed: %s\n%s", type(fault).__name__, frames)
                reply = Refused(f"the semantic cache failed: {type(fault).__name__}")
            if number and reply is not None:
                self._writer.write(frame(number, reply))
                await self._writer.drain()
        finally:
            self._slots.release()
