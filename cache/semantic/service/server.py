"""The process towards the gateways: their connections, and what they are told until there is a semantic cache."""

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from cache.errors import CacheError
from cache.semantic import messages
from cache.semantic.service.config import Config
from cache.semantic.service.semantic_cache import SemanticCache
from telemetry.tracing.span import Tracing

log = logging.getLogger(__name__)

SHARE_FOR_ASKING = 0.8
"""Of the gateway's deadline: a lookup that has taken so long is refused as late. A gateway without any reply marks the
process as unavailable."""

# Notes that wait for the model, the newest; as many wait in a gateway for the process.
_MAX_EARLY = 1000
# Of one gateway: beyond it the service takes no more from its connection until some are answered.
_MAX_OPEN = 256
# Bytes of what a gateway says: a body in base64, and what else a note has.
_MAX_LINE = 2 * messages.MAX_BODY


class Service:
    """Answers gateways at a Unix socket. Until there is a semantic cache, questions are refused and notes wait."""

    def __init__(self, config: Config, tracing: Tracing) -> None:
        self.socket = Path(config.socket)
        self._model = config.model_url or config.model
        self._tracing = tracing
        self._patience = config.deadline * SHARE_FOR_ASKING
        self._cache: SemanticCache | None = None
        self._describe: Callable[[], messages.Stats | messages.Refused] = lambda: messages.Refused("")
        self._early: deque[messages.Note] = deque(maxlen=_MAX_EARLY)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Serves at the socket, in a folder that only this user can open."""
        server = await asyncio.start_unix_server(self._converse, self.socket, limit=_MAX_LINE)
        try:
            yield
        finally:
            server.close()
            server.close_clients() if hasattr(server, "close_clients") else None

    async def begin(self, cache: SemanticCache, describe: Callable[[], messages.Stats | messages.Refused]) -> None:
        """Takes the notes that waited; from then on questions are answered."""
        while self._early:
            await cache.handle(self._early.popleft())
        self._cache, self._describe = cache, describe

    def end(self) -> None:
        """From now on questions are refused."""
        self._cache = None

    async def handle(self, message: messages.Request | messages.Note) -> messages.Reply | None:
        """The reply to a question; that to a note is not sent. Raises CacheError if the cache fails."""
        if self._cache is None:
            if isinstance(message, messages.Note):
                self._early.append(message)
                return None
            return messages.Refused(f"the semantic cache is not ready: it waits for {self._model}")
        if isinstance(message, messages.StatsRequest):
            return self._describe()
        if not isinstance(message, messages.LookupRequest):
            return await self._cache.handle(message)
        with self._tracing.begin({"traceparent": message.traceparent}, "semantic_cache.lookup") as span:
            try:
                async with asyncio.timeout(self._patience if message.serve else None):
                    reply = await self._cache.ask(message)
            except TimeoutError:
                span.fail("timeout")
                return messages.Refused("the semantic cache: not in time")
            span.set({"keepgate.semantic.found": reply.layer if isinstance(reply, messages.LookupHit) else "none"})
            return reply

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Replies are sent as they are ready, not in the order of the questions."""
        slots = asyncio.Semaphore(_MAX_OPEN)

        async def answer(number: int, message: messages.Request | messages.Note) -> None:
            reply = await self._reply_to(message)
            if number and reply is not None:
                writer.write(messages.line_of(number, reply))
                await writer.drain()

        try:
            async with asyncio.TaskGroup() as tasks:
                while (line := await reader.readline()).endswith(b"\n"):  # else it has been cut, or it is the end
                    await slots.acquire()
                    answering = tasks.create_task(answer(*messages.from_gateway(line)))
                    answering.add_done_callback(lambda _: slots.release())
        except* (OSError, ValueError, msgspec.DecodeError) as errors:
            log.debug("a gateway's connection ended: %s", errors.exceptions[0])
        finally:
            writer.close()

    async def _reply_to(self, message: messages.Request | messages.Note) -> messages.Reply | None:
        try:
            return await self.handle(message)
        except CacheError as error:
            return messages.Refused(str(error))
        except Exception as fault:  # noqa: BLE001  # the last resort: it is logged, and the gateway goes on without
            # The frames only name code; the message might quote a tenant's text.
            failure = f"the semantic cache failed: {type(fault).__name__}"
            log.error("%s\n%s", failure, "".join(traceback.format_tb(fault.__traceback__)))
            return messages.Refused(failure)
