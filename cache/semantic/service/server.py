"""The server for the gateways' connections."""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from cache.errors import CacheError
from cache.semantic.messages import Note, Refused, Reply, Request, frame, from_gateway, read_frame

log = logging.getLogger(__name__)

Handler = Callable[[Request | Note], Awaitable[Reply | None]]

# Of one gateway: beyond it the service reads no more from it until some are answered.
_MAX_OPEN = 256


@asynccontextmanager
async def serving(socket: Path, handle: Handler) -> AsyncIterator[None]:
    """Serves gateways at a Unix socket, in a folder that only this user can open."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer_all(handle, reader, writer)
        except* (OSError, ValueError, msgspec.DecodeError) as errors:
            log.debug("a gateway's line ended: %s", errors.exceptions[0])
        finally:
            writer.close()

    server = await asyncio.start_unix_server(converse, socket)
    try:
        yield
    finally:
        server.close()
        server.close_clients() if hasattr(server, "close_clients") else None


async def _answer_all(handle: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Replies are sent as they are ready, not in the order of the questions."""
    slots = asyncio.Semaphore(_MAX_OPEN)

    async def answer(number: int, message: Request | Note) -> None:
        try:
            reply = await _reply_to(handle, message)
            if number and reply is not None:
                writer.write(frame(number, reply))
                await writer.drain()
        finally:
            slots.release()

    async with asyncio.TaskGroup() as tasks:
        while (payload := await read_frame(reader)) is not None:
            await slots.acquire()
            tasks.create_task(answer(*from_gateway(payload)))


async def _reply_to(handle: Handler, message: Request | Note) -> Reply | None:
    try:
        return await handle(message)
    except CacheError as error:
        return Refused(str(error))
    except Exception as fault:  # noqa: BLE001  # the last resort: it is logged, and the gateway goes on without
        # The frames only name code; the message might quote a tenant's text.
        failure = f"the semantic cache failed: {type(fault).__name__}"
        log.error("%s\n%s", failure, "".join(traceback.format_tb(fault.__traceback__)))
        return Refused(failure)
