"""Follows the KV cache events of an engine over ZeroMQ. The only place that knows pyzmq, which is loaded here."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from gateway.routing.prefixes.kv_events import BadEvents, EngineBlocks

log = logging.getLogger(__name__)

_REPLAY_DEADLINE = 2.0
_MAX_WAITING = 100_000
_HEARTBEAT = 5.0
"""Seconds between questions whether the engine is there: a machine that is gone without a word is connected anew."""
_END = (-1).to_bytes(8, "big", signed=True)


class Subscription:
    """What one engine publishes at `address`, as `blocks`.

    Missed events are asked for at the port after it, where vLLM's and SGLang's examples have `replay_endpoint`. Where
    they cannot be had, all blocks are forgotten.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.blocks = EngineBlocks()
        self._next: int | None = None
        """The number of the next message; None before the first one."""

    async def follow(self) -> None:
        """Take events for as long as it is used; start again after a failure."""
        with zmq.asyncio.Context() as context:
            socket = context.socket(zmq.SUB)
            try:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
                socket.setsockopt(zmq.HEARTBEAT_IVL, int(_HEARTBEAT * 1000))
                socket.subscribe(b"")
                socket.connect(self._address)
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) == 3 and len(frames[1]) == 8:
                        await self._take(context, int.from_bytes(frames[1], "big"), frames[2])
            finally:
                socket.close(linger=0)

    async def _take(self, context: zmq.asyncio.Context, number: int, batch: bytes) -> None:
        if self._next is None or number < self._next:  # the gateway or the engine has just started
            self.blocks.lose()
            self._next = 0
            self.blocks.is_whole = True
        if number > self._next and not await self._catch_up(context, number):
            log.info("%s: KV cache events were missed; its blocks are unknown", self._address)
            self.blocks.lose()
        self._apply(batch)
        self._next = number + 1

    async def _catch_up(self, context: zmq.asyncio.Context, until: int) -> bool:
        """Take the messages before `until` from the replay; False unless it has all of them."""
        assert self._next is not None  # noqa: S101  # the caller has set it
        try:
            async with (
                asyncio.timeout(_REPLAY_DEADLINE),
                aclosing(_replayed(context, self._address, self._next)) as replayed,
            ):
                async for number, batch in replayed:
                    if number >= until:
                        break
                    if number != self._next:
                        return False
                    self._apply(batch)
                    self._next += 1
        except (TimeoutError, ValueError, zmq.ZMQError) as error:
            log.debug("%s: no replay: %s", self._address, error or "no answer in time")
        return self._next == until

    def _apply(self, batch: bytes) -> None:
        try:
            self.blocks.apply(batch)
        except BadEvents as error:
            if self.blocks.is_whole or len(self.blocks):  # else it has been said
                log.warning("%s: KV cache events cannot be read (%s); its blocks are unknown", self._address, error)
            self.blocks.lose()


async def _replayed(context: zmq.asyncio.Context, address: str, first: int) -> AsyncGenerator[tuple[int, bytes]]:
    parts = urlsplit(address)
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{parts.netloc.rpartition(':')[0]}:{(parts.port or 0) + 1}")
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            # vLLM 0.32 puts the topic before them; older versions and SGLang do not.
            *_, number, batch = await socket.recv_multipart()
            if number == _END:
                return
            yield int.from_bytes(number, "big"), batch
    finally:
        socket.close(linger=0)
