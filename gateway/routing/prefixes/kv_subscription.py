"""Follows the KV cache events of an engine over ZeroMQ. The only place that knows pyzmq, which is loaded here."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
import xxhash
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from gateway.routing.prefixes.block_snapshots import BlockSnapshots, Message
from gateway.routing.prefixes.event_sources import EventSource
from gateway.routing.prefixes.kv_events import BadEvents, EngineBlocks

log = logging.getLogger(__name__)

_REPLAY_DEADLINE = 2.0
"""For each message of a replay."""
_MAX_WAITING = 100_000
_HEARTBEAT = 5.0
"""Seconds between questions whether the engine is there: a machine that is gone without a word is connected anew."""
_END = (-1).to_bytes(8, "big", signed=True)


class Subscription:
    """What one engine publishes, as `blocks`.

    At each connection, and where messages are missing, the replay is asked for what follows the last known message. It
    begins with that message: another one in its place is of an engine that has started again. Where the replay lacks
    messages, what came before is forgotten.
    """

    def __init__(self, source: EventSource, snapshots: BlockSnapshots | None = None) -> None:
        self._source = source
        self._snapshots = snapshots
        self.blocks = EngineBlocks()
        self._last: Message | None = None
        """None before the first one, and after the engine has started again."""
        self._replayed: dict[int, int] = {}
        """Digests of what the replay gave, and may come once more, by their numbers."""
        self._taking = asyncio.Lock()

    async def follow(self) -> None:
        """Take events for as long as it is used; go on after a failure."""
        with zmq.asyncio.Context() as context:
            socket = context.socket(zmq.SUB)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            try:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
                socket.setsockopt(zmq.HEARTBEAT_IVL, int(_HEARTBEAT * 1000))
                socket.subscribe(b"")
                if self._last is None and self._snapshots is not None:
                    await self._restore(self._snapshots)
                socket.connect(self._source.address)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._resume_at_connections(context, monitor))
                    if self._snapshots is not None:
                        tasks.create_task(self._snapshots.keep(self._source.address, self._known))
                    while True:
                        frames = await socket.recv_multipart()
                        if len(frames) == 3 and len(frames[1]) == 8:
                            async with self._taking:
                                await self._take(context, int.from_bytes(frames[1], "big"), frames[2])
            finally:
                socket.disable_monitor()
                socket.close(linger=0)

    async def _resume_at_connections(self, context: zmq.asyncio.Context, monitor: Any) -> None:
        while True:
            event: Mapping[str, Any] = await recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                async with self._taking:
                    await self._resume(context)

    async def _take(self, context: zmq.asyncio.Context, number: int, batch: bytes) -> None:
        if number != self._next and not self._has_come(number, batch):
            await self._resume(context)
        if not self._has_come(number, batch):
            self._replayed.clear()
            self._apply(number, batch)

    def _has_come(self, number: int, batch: bytes) -> bool:
        return self._replayed.get(number) == _digest(batch)

    @property
    def _next(self) -> int:
        return 0 if self._last is None else self._last.number + 1

    async def _resume(self, context: zmq.asyncio.Context) -> None:
        if self._source.replay is not None and not await self._replay(context, self._source.replay):
            self._forget()  # the engine is another one
            await self._replay(context, self._source.replay)

    async def _replay(self, context: zmq.asyncio.Context, address: str) -> bool:
        """Take what the replay has after the last message; False if it does not know that one."""
        known, is_empty = self._last, True
        try:
            async with aclosing(_replayed(context, address, 0 if known is None else known.number)) as messages:
                async for number, batch in messages:
                    is_known = is_empty and known is not None and number == known.number
                    is_empty = False
                    if not is_known:
                        self._apply(number, batch)
                        self._replayed[number] = _digest(batch)
                    elif Message(number, _digest(batch)) != known:
                        return False
        except (TimeoutError, ValueError, zmq.ZMQError) as error:
            log.debug("%s: no replay: %s", address, error or "no answer in time")
            return True
        if is_empty and known is None:
            self.blocks.is_whole = True  # it has published nothing yet
        return not is_empty or known is None

    def _apply(self, number: int, batch: bytes) -> None:
        if number != self._next:
            if self._last is not None and number > self._next:
                log.info("%s: KV cache events were missed; its blocks are unknown", self._source.address)
            self._forget()
        if self._last is None:
            self.blocks.is_whole = number == 0
        try:
            self.blocks.apply(batch)
        except BadEvents as error:
            if self.blocks.is_whole or len(self.blocks):  # else it has been said
                log.warning(
                    "%s: KV cache events cannot be read (%s); its blocks are unknown", self._source.address, error
                )
            self.blocks.lose()
        self._last = Message(number, _digest(batch))

    def _forget(self) -> None:
        self.blocks.lose()
        self._replayed.clear()
        self._last = None

    async def _restore(self, snapshots: BlockSnapshots) -> None:
        snapshot = await snapshots.load(self._source.address)
        if snapshot is None:
            return
        try:
            await self.blocks.restore(snapshot.state, snapshot.blocks())
            self._last = snapshot.last
        except msgspec.DecodeError:
            self.blocks.lose()

    def _known(self) -> tuple[Message, EngineBlocks] | None:
        return None if self._last is None else (self._last, self.blocks)


async def _replayed(context: zmq.asyncio.Context, address: str, first: int) -> AsyncGenerator[tuple[int, bytes]]:
    """The engine's messages from the number `first` on. Raises TimeoutError, ValueError and ZMQError."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
        socket.connect(address)
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            async with asyncio.timeout(_REPLAY_DEADLINE):
                # vLLM 0.32 puts the topic before them; older versions and SGLang do not.
                *_, number, batch = await socket.recv_multipart()
            if number == _END:
                return
            yield int.from_bytes(number, "big"), batch
            await asyncio.sleep(0)  # what has arrived is received without a pause
    finally:
        socket.close(linger=0)


def _digest(batch: bytes) -> int:
    return xxhash.xxh3_64_intdigest(batch)
