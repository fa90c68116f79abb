"""An upstream and its clients in one process: thousands of streams at once, each event numbered and checked.

The upstream answers a chat with a stream whose events carry the number of the stream and their own. It begins when all
streams of a run have been asked for, and then sends `rate` events a second on each. A client compares every byte with
what has to come next.

    python -m benchmarks.harness.stream_load PORT
    POST /run, with a StreamRun as its body, is answered with a StreamReport when the run is over.
"""

import argparse
import asyncio
import re
import statistics
from typing import cast

import msgspec
import uvloop

from benchmarks.harness.request_bodies import CHAT_PATH, chat

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb"stream number (\d+)")
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","created":1700000000,"owned_by":"bench"}]}'
_BEFORE = (
    b'data: {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": '
    b'1700000000, "model": "bench", "choices": [{"index": 0, "delta": {'
)
_AFTER = b'}, "logprobs": null, "finish_reason": null}]}\n\n'
_STOP = _AFTER.replace(b'"finish_reason": null', b'"finish_reason": "stop"')
_DONE = b"data: [DONE]\n\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_TICK = 0.001
_OPENED_AT_ONCE = 32
_PATIENCE = 60.0


class StreamRun(msgspec.Struct, frozen=True):
    """`streams` at once through the server at `port`; each has `events` events with text, `rate` a second."""

    port: int
    streams: int
    events: int
    rate: float
    occasion: str


class StreamReport(msgspec.Struct, frozen=True):
    """`faults` says for each stream that did not arrive as it was sent what was wrong with it.

    `writes` counts the HTTP chunks in which the `events` arrived. A delay is the time in seconds from when an event was
    due at the upstream to its arrival at the client.
    """

    faults: list[str]
    events: int
    writes: int
    seconds: float
    delay_p50: float
    delay_p99: float


def stream_event(stream: int, number: int, events: int) -> bytes:
    """An event of about 230 bytes with its numbers in the text; after `events` of them the finish reason and [DONE]."""
    if number < events:
        return b'%b"content": "%d of %d "%b' % (_BEFORE, number, stream, _AFTER)
    return _BEFORE + _STOP if number == events else _DONE


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class _Peer(asyncio.Protocol):
    """One end of a connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)


class Load:
    """One run at a time: what its upstream sends, and what its clients read."""

    def __init__(self) -> None:
        self._asked: dict[int, UpstreamConnection] = {}
        self._all_asked = asyncio.Event()
        self._streams = 0

    def ask(self, stream: int, connection: "UpstreamConnection") -> None:
        """A stream has been asked for."""
        self._asked[stream] = connection
        if len(self._asked) == self._streams:
            self._all_asked.set()

    async def perform(self, run: StreamRun) -> StreamReport:
        """Open all streams, send them, and compare what arrives."""
        self._streams = run.streams
        self._asked.clear()
        self._all_asked.clear()
        loop = asyncio.get_running_loop()
        clients = [StreamClient(run, number) for number in range(run.streams)]
        for first in range(0, len(clients), _OPENED_AT_ONCE):
            opened = clients[first : first + _OPENED_AT_ONCE]
            await asyncio.gather(*(loop.create_connection(client.itself, "127.0.0.1", run.port) for client in opened))
        async with asyncio.timeout(_PATIENCE):
            await self._all_asked.wait()
        began = loop.time()
        for client in clients:
            client.began = began
        await self._send(run, began)
        await asyncio.wait([client.ended for client in clients], timeout=_PATIENCE)
        seconds = loop.time() - began
        for client in clients:
            client.close()
        delays = statistics.quantiles((delay for client in clients for delay in client.delays or [0.0]), n=100)
        return StreamReport(
            faults=[f"stream {client.stream}: {client.fault}" for client in clients if client.fault],
            events=sum(client.next for client in clients),
            writes=sum(client.writes for client in clients),
            seconds=seconds,
            delay_p50=delays[49],
            delay_p99=delays[98],
        )

    async def _send(self, run: StreamRun, began: float) -> None:
        loop = asyncio.get_running_loop()
        # By the clock, so that lateness does not add up: events in the order in which they are due.
        for number in range(run.events + 2):
            for stream, connection in sorted(self._asked.items()):
                due = began + (number + stream / run.streams) / run.rate
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(max(_TICK, wait))
                connection.write(_chunk(stream_event(stream, number, run.events)))
        for connection in self._asked.values():
            connection.write(_chunk(b""))


class UpstreamConnection(_Peer):
    """One kept-alive connection without pipelining. HTTP is read only as far as the subject needs it."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load = load
        self._running: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, blank, body = self.received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not blank or (length is not None and len(body) < int(length[1])):
            return
        self.received = b""
        if head.startswith(b"POST /run "):
            self._running = asyncio.get_running_loop().create_task(self._run(body))
        elif (found := _STREAM.search(body)) is not None:
            self.write(_STREAM_HEAD)
            self._load.ask(int(found[1]), self)
        elif head.startswith(b"GET"):
            self.write(_response(_MODELS))
        else:
            self.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    async def _run(self, body: bytes) -> None:
        report = await self._load.perform(msgspec.json.decode(body, type=StreamRun))
        self.write(_response(msgspec.json.encode(report)))


class StreamClient(_Peer):
    """Asks for a stream and checks that it is the one that was sent, event after event."""

    def __init__(self, run: StreamRun, stream: int) -> None:
        super().__init__()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stream = stream
        self.began = 0.0
        self.next = 0
        self.writes = 0
        self.delays: list[float] = []
        self.fault = "it did not end"
        self._run = run
        self._is_begun = False

    def itself(self) -> "StreamClient":
        return self

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        body = chat(f"{self._run.occasion}, stream number {self.stream}", stream=True)
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.write(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end(self.fault)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self._is_begun:
            head, blank, rest = self.received.partition(b"\r\n\r\n")
            if not blank:
                return
            if not head.startswith(b"HTTP/1.1 200 ") or b"x-keepgate-cache: hit" in head:
                self._end(f"it began with {head.splitlines()[0]!r}, or came from a cache")
            self._is_begun, self.received = True, rest
        at = 0
        while not self.ended.done():
            line = self.received.find(b"\r\n", at)
            end = line + 2 + int(self.received[at:line], 16) + 2 if line >= 0 else len(self.received) + 1
            if end > len(self.received):
                break
            self._take(self.received[line + 2 : end - 2])
            at = end
        self.received = self.received[at:]

    def _take(self, events: bytes) -> None:
        if not events:
            missing = self._run.events + 2 - self.next
            self._end(f"{missing} events are missing" if missing else "")
            return
        self.writes += 1
        self.delays.append(
            asyncio.get_running_loop().time()
            - self.began
            - (self.next + self.stream / self._run.streams) / self._run.rate
        )
        at = 0
        while at < len(events):
            expected = stream_event(self.stream, self.next, self._run.events)
            if not events.startswith(expected, at):
                self._end(f"event {self.next} is not the one that was sent")
                return
            at += len(expected)
            self.next += 1

    def _end(self, fault: str) -> None:
        if not self.ended.done():
            self.fault = fault
            self.ended.set_result(None)


async def _serve(port: int) -> None:
    load = Load()
    server = await asyncio.get_running_loop().create_server(
        lambda: UpstreamConnection(load), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.stream_load")
    parser.add_argument("port", type=int)
    uvloop.run(_serve(parser.parse_args().port))
