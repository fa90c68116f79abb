"""One call to an upstream, shared by everyone who asks the same at the same time.

A flight is a task of its own: it belongs to no request. Each client reads it through a `Passenger`, from the first
piece on, at its own pace. The flight lands when the upstream has said everything, and is cancelled when the last
passenger leaves before that.

    pieces:   [ 0 | 1 | 2 | 3 | 4 ]──► more to come from the upstream
                    ▲       ▲   ▲
    passengers:     slow    │   first (all caught up)
                            joined late, replaying
"""

import asyncio
import functools
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

from multidict import CIMultiDict

from cache.errors import UnstorableAnswer
from gateway.errors import GatewayError, InternalError, UpstreamError
from gateway.http.sse import EventSplitter
from gateway.http.tasks import Tasks
from gateway.proxy.recorder import Recording, StreamRecorder, record_response
from gateway.upstreams.upstream import USAGE_HEADER, UpstreamAnswer

log = logging.getLogger(__name__)

_LARGE_BODY = 2**18
# For the end of a connection after the end of what it carried.
_REST_SECONDS = 1.0


class Piece(bytes):
    """A piece of a body; an event that carries usage alone is not for every client."""

    __slots__ = ()
    usage_only = False


class UsagePiece(Piece):
    __slots__ = ()
    usage_only = True


class Flight:
    """The state of one upstream call; `recording` is there once a whole answer that may be kept has landed.

    At most `keep_bytes` of the body are remembered. Beyond that the flight takes no new passengers, is not recorded,
    and goes no faster than its slowest passenger, so a flight's memory is bounded. An answer of fewer than `choices`
    choices is not recorded.
    """

    def __init__(self, keep_bytes: int, choices: int) -> None:
        self._choices = choices
        self._keep_bytes = keep_bytes
        self._pieces: list[Piece] = []
        self._first = 0  # number of the piece at _pieces[0]
        self._size = 0
        self._passengers: set[Passenger] = set()
        self._drained = asyncio.Event()
        self._started = asyncio.Event()
        self._settled = asyncio.Event()  # it has landed, or it is known to be too long to wait for
        self._landed = asyncio.Event()
        self._began = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        self.background = False
        self.oversized = False
        self.abandoned = False
        self.complete = False  # all has been said, and only the end of the connection is still to come
        self.upstream = ""  # its label in figures
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.is_event_stream = False
        self.first_byte_seconds = 0.0
        self.error: GatewayError | None = None
        self.recording: Recording | None = None
        self.unstorable: str | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def landed(self) -> bool:
        return self._landed.is_set()

    @property
    def joinable(self) -> bool:
        return not (self.landed or self.oversized or self.abandoned)

    async def fly(self, request: Awaitable[UpstreamAnswer]) -> None:
        """Make the call and take in its answer; every failure ends up in `error`."""
        try:
            with await request as answer:
                self._start(answer)
                if self.is_event_stream and self.status == 200:
                    await self._take_events(answer)
                else:
                    await self._take_body(answer)
        except UpstreamError as error:
            self.error = error
        except asyncio.CancelledError:
            self.error = InternalError("The gateway is shutting down.")
            raise
        except Exception as fault:  # noqa: BLE001  # the last resort; it is logged and becomes the flight's error
            frames = "".join(traceback.format_tb(fault.__traceback__))
            log.error("a call to an upstream failed: %s\n%s", type(fault).__name__, frames)
            self.error = InternalError("The gateway failed while relaying the answer.")
        finally:
            self._started.set()
            self._settled.set()
            self._landed.set()
            self._wake_all()

    def _start(self, answer: UpstreamAnswer) -> None:
        self.first_byte_seconds = self.seconds
        self.upstream = answer.upstream.label
        self.status = answer.status
        self.headers = answer.headers
        self.is_event_stream = answer.is_event_stream
        self._started.set()

    async def _take_events(self, answer: UpstreamAnswer) -> None:
        splitter = EventSplitter()
        recorder = StreamRecorder(self._choices)
        usage_was_added = self.headers.pop(USAGE_HEADER, None) == "added"
        try:
            async with asyncio.timeout(None) as rest:
                async for data in answer.pieces():
                    for event in splitter.feed(data):
                        is_usage = not self.oversized and recorder.add(event)
                        await self._add(UsagePiece(event) if is_usage and usage_was_added else Piece(event))
                    if len(splitter) > self._keep_bytes:  # whatever it is, it is not gathered without limit
                        await self._add(Piece(splitter.flush()))
                    if recorder.done and not self.complete:
                        self.complete = True
                        rest.reschedule(asyncio.get_running_loop().time() + _REST_SECONDS)
        except (UpstreamError, TimeoutError):
            if not recorder.done:  # else all has been said, however the connection ends
                raise
        if splitter.rest:
            await self._add(Piece(splitter.rest))
        if splitter.rest.strip():
            self.unstorable = "the stream ended within an event"
        elif not self.oversized:
            await self._record(recorder.finish)

    async def _take_body(self, answer: UpstreamAnswer) -> None:
        async for data in answer.pieces():
            await self._add(Piece(data))
        self.complete = True
        if self.status == 200 and not self.oversized:
            await self._record(functools.partial(record_response, b"".join(self._pieces), self._choices))

    async def _record(self, finish: Callable[[], Recording]) -> None:
        try:
            # A long answer takes more than a moment to encode: other requests do not wait for it.
            self.recording = await asyncio.to_thread(finish) if self._size > _LARGE_BODY else finish()
        except UnstorableAnswer as reason:
            self.unstorable = str(reason)

    async def _add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        for passenger in self._passengers:
            passenger.wake.set()
        if self._size > self._keep_bytes:
            self.oversized = True
            self.unstorable = f"the answer is longer than {self._keep_bytes} bytes"
            self._settled.set()
            await self._wait_for_slowest()

    async def _wait_for_slowest(self) -> None:
        end = self._first + len(self._pieces)
        while any(passenger.reads and passenger.position < end for passenger in self._passengers):
            self._drained.clear()
            await self._drained.wait()
        self._pieces.clear()
        self._first = end

    def _wake_all(self) -> None:
        for passenger in self._passengers:
            passenger.wake.set()

    def board(self) -> "Passenger":
        return Passenger(self)


class Passenger:
    """One client's way through a flight. Use as a context manager: leaving is how a flight learns it is alone."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.position = 0
        self.reads = True
        self.wake = asyncio.Event()

    def __enter__(self) -> "Passenger":
        self.flight._passengers.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        flight = self.flight
        flight._passengers.discard(self)
        flight._drained.set()
        if not flight._passengers and not flight.background and not flight.complete and flight.task:
            flight.abandoned = True
            flight.task.cancel()

    async def started(self) -> None:
        """Wait until the upstream has begun to answer, or has failed to: then raises that GatewayError."""
        await self.flight._started.wait()
        if self.flight.error and not self.flight.status:
            raise self.flight.error

    async def landed(self) -> None:
        """Wait until everything has been said, reading none of it. Raises the GatewayError that ended it early."""
        self.reads = False
        self.flight._drained.set()
        await self.flight._landed.wait()
        if self.flight.error:
            raise self.flight.error

    async def pieces(self, with_usage: bool) -> AsyncIterator[bytes]:
        """The body from its beginning, joined into as few pieces as the reader's pace allows.

        Raises the GatewayError that ended the flight early, after everything that came before it.
        """
        flight = self.flight
        while True:
            news = flight._pieces[self.position - flight._first :]
            if news:
                self.position += len(news)
                flight._drained.set()
                yield b"".join(piece for piece in news if with_usage or not piece.usage_only)
            elif flight.landed:
                if flight.error:
                    raise flight.error
                return
            else:
                self.wake.clear()
                await self.wake.wait()

    async def body(self) -> bytes | None:
        """The whole body; None, at its first piece, where it is too long to be held and has to be read in pieces.

        Raises the GatewayError that ended the flight early.
        """
        flight = self.flight
        await flight._settled.wait()
        if flight.oversized:
            return None
        if flight.error:
            raise flight.error
        return b"".join(flight._pieces)


class FlightTable:
    """The flights under way that may be joined, by what they carry. Owns the tasks of all flights."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._joinable: dict[str, Flight] = {}

    def find(self, names: tuple[str, ...]) -> Flight | None:
        for name in names:
            flight = self._joinable.get(name)
            if flight and flight.joinable:
                return flight
        return None

    def launch(self, flight: Flight, run: Coroutine[None, None, None], name: str | None) -> None:
        """Start the flight; `name` makes it joinable."""
        task = flight.task = self._tasks.start_alone(run)
        if name is None:
            return
        self._joinable[name] = flight

        def forget(_: asyncio.Task[None]) -> None:
            if self._joinable.get(name) is flight:
                del self._joinable[name]

        task.add_done_callback(forget)

    def __len__(self) -> int:
        return len(self._joinable)
