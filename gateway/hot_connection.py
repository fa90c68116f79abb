"""A connection that answers, before HTTP is parsed, the bytes of a request that was answered before.

    socket ──► HotConnection ──► aiohttp's RequestHandler ──► FastLane ──► application
                     │ the very bytes of an earlier hit
                     └──────────► the ready answer

Bytes are compared whole, head and body, so they mean what they meant the first time, provided that a request begins
with the first of them. HotConnection therefore keeps account of where requests begin and end, by what aiohttp says it
has read. What arrives in several pieces is counted and takes the ordinary way; a client that does not wait for its
answers (pipelining) takes it for good.
"""

import asyncio
import weakref
from collections.abc import Callable

from aiohttp import HttpVersion11, web

AnswerTo = Callable[[bytes], bytes | None]


class HotConnection(asyncio.Protocol):
    """Takes the place of `inner` on `transport`; `answer_to` maps the bytes of a request to a whole response.

    Made while the connection's first request is being handled, by that request's task.
    """

    def __init__(self, inner: web.RequestHandler, transport: asyncio.Transport, answer_to: AnswerTo) -> None:
        self._inner = inner
        self._transport = transport
        self._answer_to = answer_to
        self._loop = asyncio.get_running_loop()
        self._task = _current_task()
        self._is_plain = False
        self._first: bytes | None = None  # the piece with which the next request begins, until aiohttp has read it
        self._received = 0  # bytes since and with that piece
        self._missing = 0  # bytes of the present request's body that are still to come
        self._is_proven = False  # whether `_missing` is known
        self._is_writable = True
        self._inner_saw_data = self._loop.time()

    def data_received(self, data: bytes) -> None:
        if self._first is not None:
            self._received += len(data)
        elif self._missing:
            self._is_plain = self._is_plain or len(data) > self._missing
            self._missing -= len(data)
        elif not self._is_answered():
            self._is_plain = True
        elif not self._is_plain:
            if self._is_proven and self._is_writable and not self._is_due():
                answer = self._answer_to(data)
                if answer is not None:
                    self._transport.write(answer)
                    return
            self._first, self._received = data, len(data)
        self._inner_saw_data = self._loop.time()
        self._inner.data_received(data)

    def bytes_of(self, request: web.BaseRequest) -> bytes | None:
        """All bytes of a request that `inner` has begun to handle, None unless they came alone and in one piece.

        To be called once for every request after the first, by the request's task.
        """
        first, self._first = self._first, None
        self._task = _current_task()
        size = None if first is None else _size(first, request)
        if self._is_plain or first is None or size is None or size < self._received:
            self._is_plain = True
            return None
        self._is_proven = True
        self._missing = size - self._received
        return first if len(first) == size else None

    def _is_answered(self) -> bool:
        """Whether the last request's response is written: its task ends with that."""
        task = self._task()
        return task is None or task.done()

    def _is_due(self) -> bool:
        # `inner` closes a connection on which it has seen nothing for its keep-alive timeout.
        return self._loop.time() - self._inner_saw_data > self._inner.keepalive_timeout / 2

    def pause_writing(self) -> None:
        self._is_writable = False
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._inner.resume_writing()

    def eof_received(self) -> None:
        self._inner.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._inner.connection_lost(exc)


def take_over(request: web.BaseRequest, answer_to: AnswerTo) -> bytes | None:
    """All bytes of a request that arrived in one piece, and with nothing else, on a connection that waits for answers.

    To be called once for every request, by its task. The first of a connection makes the connection a hot one.
    """
    transport, inner = request.transport, request.protocol
    if transport is None:
        return None
    current = transport.get_protocol()
    if isinstance(current, HotConnection):
        return current.bytes_of(request)
    # Private, for want of a public way to ask: a request that is queued already came with bytes nobody has counted.
    if current is inner and not getattr(inner, "_messages", True):
        transport.set_protocol(HotConnection(inner, transport, answer_to))
    return None


def is_plain(request: web.BaseRequest) -> bool:
    """Whether aiohttp would do nothing for the request but answer it, and keep the connection."""
    headers = request.headers
    return (
        request.version == HttpVersion11
        and request.keep_alive
        and "Expect" not in headers
        and "Upgrade" not in headers
        and "Transfer-Encoding" not in headers
    )


def _size(first: bytes, request: web.BaseRequest) -> int | None:
    """Bytes of a request whose head is in `first`; None if the request does not begin there, or its size is unknown."""
    end = first.find(b"\r\n\r\n")
    begins_here = (
        end >= 0
        # Had the request begun earlier, its first line or the number of its headers would not be the ones here.
        and first.startswith(f"{request.method} {request.raw_path} HTTP/".encode("utf-8", "surrogateescape"))
        and first.count(b"\r\n", 0, end) == len(request.raw_headers)
    )
    if not begins_here or "Transfer-Encoding" in request.headers or "Upgrade" in request.headers:
        return None
    return end + 4 + (request.content_length or 0)


def _current_task() -> "weakref.ref[asyncio.Task[object]]":
    """Weakly: a task that is done holds its response, and a connection may be idle for long."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101  # requests are handled by tasks
    return weakref.ref(task)
