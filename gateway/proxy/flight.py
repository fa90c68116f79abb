"""One call to an upstream, shared by identical requests in flight.

A flight is a task of its own, owned by no request. Each client reads it through a `Subscriber`, from the first chunk
on, at its own pace. The flight finishes when the upstream's answer is complete, and is cancelled when its last
subscriber leaves before that.

    chunks:   [ 0 | 1 | 2 | 3 | 4 ]──► more to come from the upstream
                    ▲       ▲   ▲
    subscribers:     slow    │   first (all caught up)
                            joined late, replaying

While a client keeps up, the flight's task writes to it as chunks arrive. A client that does not, or has joined late, is
written to by its own task until it has caught up. Events of a stream that all have read are kept compressed for those
who join later.
"""

import asyncio
import functools
import logging
import time
import traceback
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

from multidict import CIMultiDict

from cache.entries.entry import Tag
from cache.errors import UnstorableAnswer
from gateway.costs.machine import MachineShare
from gateway.costs.pricing import Charge
from gateway.errors import GatewayError, InternalError, ShuttingDown, UpstreamDisconnected, UpstreamError
from gateway.http.background_tasks import BackgroundTasks
from gateway.http.response_writer import ResponseWriter
from gateway.http.sse import NotAnEvent, splitter_of
from gateway.proxy.deadlines import outlasts, wait_until
from gateway.proxy.inference_request import USAGE_OF_STREAMS
from gateway.proxy.predictions.usage import PredictionTokens, without_prediction_tokens
from gateway.proxy.recorder import Recording, has_usage_alone, record_response, recorder_of
from gateway.surfaces.openai import CHAT
from gateway.surfaces.registry import BY_FAMILY
from gateway.surfaces.surface import AnswerForm
from gateway.upstreams.upstream import Upstream, UpstreamResponse
from telemetry.tracing.span import NO_SPAN, Span

log = logging.getLogger(__name__)

_LARGE_BODY = 2**18
# For the end of a connection after the end of what it carried.
_TRAILER_TIMEOUT = 1.0

# Events that have been read are compressed when they are this share of the stream, or at least and at most these bytes.
_PACKED_SHARE = 16
_LEAST_PACKED = 2**12
_MOST_PACKED = 2**16
_LONGEST_SAMPLE = 2**10

_NO_USAGE = b',"usage":null'


class UsageChunk(bytes):
    """An event that carries only usage: it goes only to clients that asked for usage."""

    __slots__ = ()


class _Signal:
    """asyncio.Event without the queue of waiters, which takes most of a kilobyte while empty; a list takes 56 B."""

    __slots__ = ("_waiters", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: tuple[asyncio.Future[None], ...] = ()

    def set(self) -> None:
        self.is_set = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return at once if it is set, else when it has been set, though it may have been cleared since."""
        if self.is_set:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters += (waiter,)
        try:
            await waiter
        finally:
            self._waiters = tuple(other for other in self._waiters if other is not waiter)


@dataclass(slots=True, eq=False)
class Flight:
    """The state of one upstream call; `recording` is set once it finished with a complete answer that may be stored.

    At most `keep_bytes` of the body are held. A longer answer takes no new subscribers, is not recorded, and is read
    no faster than the slowest subscriber reads, so a flight's memory is bounded. An answer of fewer than `choices`
    choices is not recorded. With `asks_usage` the request asks for the usage of a stream on its client's behalf.
    `deadline` is that of the request, a time of the event loop; None if it has none.
    """

    keep_bytes: int
    choices: int
    asks_usage: bool = False
    deadline: float | None = None
    _chunks: list[bytes] = field(init=False, default_factory=list)
    generation: str = ""
    """The purge state of its namespace and model when it began, `tags` those of its names, `purges` how many there had
    been in all.
    """
    tags: tuple[Tag, ...] = ()
    purges: int = 0
    _first: int = field(init=False, default=0)
    """Number of the chunk at `_chunks[0]`."""
    _size: int = field(init=False, default=0)
    """Bytes in all, of which `_loose` are in `_chunks`."""
    _loose: int = field(init=False, default=0)
    _packed: dict[int, tuple[int, bytes]] = field(init=False, default_factory=dict)
    """Events before those in `_chunks`, by the number of the first: that of the next, and their bytes."""
    _sample: bytes = field(init=False, default=b"")
    """Of the events, which each of the packed ones would have to repeat."""
    _subscribers: "set[Subscriber]" = field(init=False, default_factory=set)
    _drained: _Signal = field(init=False, default_factory=_Signal)
    _started: _Signal = field(init=False, default_factory=_Signal)
    _settled: _Signal = field(init=False, default_factory=_Signal)
    """Finished, or known to be too long to wait for."""
    _finished: _Signal = field(init=False, default_factory=_Signal)
    _began: float = field(init=False, default_factory=time.monotonic)
    task: asyncio.Task[None] | None = field(init=False, default=None)
    background: bool = field(init=False, default=False)
    oversized: bool = field(init=False, default=False)
    abandoned: bool = field(init=False, default=False)
    complete: bool = field(init=False, default=False)
    """The body is complete; only the end of the connection is still to come."""
    upstream: str = field(init=False, default="")
    """Its label in the metrics."""
    source: Upstream | None = field(init=False, default=None)
    share: MachineShare | None = field(init=False, default=None)
    model: str | None = field(init=False, default=None)
    """Which model answers: a fallback, or the one that was asked for."""
    prediction: str = field(init=False, default="")
    """Where the prediction came from that the gateway has sent along; "" where it has sent none. It is set before the
    answer begins, and what became of it is withheld from clients.
    """
    prediction_tokens: PredictionTokens = field(init=False, default=PredictionTokens())
    span: Span = field(init=False, default=NO_SPAN)
    """Of the request to the upstream."""
    charge: Charge | None = field(init=False, default=None)
    """What it cost, once it has finished."""
    status: int = field(init=False, default=0)
    headers: CIMultiDict[str] = field(init=False, default_factory=CIMultiDict)
    form: AnswerForm = field(init=False, default=CHAT)
    """The form of API in which the upstream answers."""
    is_stream: bool = field(init=False, default=False)
    first_byte_seconds: float = field(init=False, default=0.0)
    error: GatewayError | None = field(init=False, default=None)
    recording: Recording | None = field(init=False, default=None)
    unstorable: str | None = field(init=False, default=None)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def output_tokens(self) -> int:
        """An estimate of the tokens that came: one for each event of a stream."""
        return self._first + len(self._chunks) if self.is_stream else self._size // 4

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "")

    @property
    def finished(self) -> bool:
        return self._finished.is_set

    @property
    def joinable(self) -> bool:
        return not (self.finished or self.oversized or self.abandoned)

    async def run(self, request: Awaitable[UpstreamResponse]) -> None:
        """Make the call and read its answer; every failure ends up in `error`."""
        try:
            with await request as answer:
                self._start(answer)
                if self.is_stream and self.status == 200:
                    await self._take_events(answer)
                else:
                    await self._take_body(answer)
        except GatewayError as error:
            self.error = error
        except asyncio.CancelledError:
            self.error = ShuttingDown("The gateway is shutting down.")
            raise
        except Exception as fault:  # noqa: BLE001  # the last resort; it is logged and becomes the flight's error
            frames = "".join(traceback.format_tb(fault.__traceback__))
            log.error("a call to an upstream failed: %s\n%s", type(fault).__name__, frames)
            self.error = InternalError("The gateway failed while relaying the answer.")
        finally:
            self._started.set()
            self._settled.set()
            self._finished.set()
            for subscriber in self._subscribers:
                subscriber.wake.set()

    def _start(self, answer: UpstreamResponse) -> None:
        self.first_byte_seconds = self.seconds
        self.upstream = answer.upstream.label
        self.source = answer.upstream
        self.share = answer.share
        self.model = answer.model
        self.status = answer.status
        self.headers = answer.headers
        if answer.attempt is not None:
            self.form = BY_FAMILY[answer.attempt.family]
            self.asks_usage = self.asks_usage or answer.attempt.needs == USAGE_OF_STREAMS
        self.is_stream = answer.content_type == self.form.stream_type
        self._started.set()

    async def _take_events(self, answer: UpstreamResponse) -> None:
        splitter = splitter_of(self.form.stream_type)
        recorder = recorder_of(self.form, self.choices, splitter.check)
        try:
            async with asyncio.timeout(None) as rest:
                while data := await answer.chunk():
                    for event in splitter.feed(data):
                        if self.prediction:
                            event = self._without_prediction(event)
                        if self.oversized:
                            splitter.check(event)
                            is_usage = self.asks_usage and has_usage_alone(event)
                        else:
                            is_usage = recorder.add(event) and self.asks_usage
                        self._append(UsageChunk(event) if is_usage else event)
                    if len(splitter) > self.keep_bytes:  # an event without an end is not buffered without limit
                        self._append(splitter.flush())
                    if recorder.done and not self.complete:
                        self.complete = True
                        rest.reschedule(asyncio.get_running_loop().time() + _TRAILER_TIMEOUT)
                    self._announce()
                    if self.oversized:
                        await self._wait_for_slowest()
                    elif self._loose > _LEAST_PACKED:
                        self._pack()
        except (UpstreamError, TimeoutError):
            if not recorder.done:  # else the answer is complete, however the connection ends
                raise
        except NotAnEvent as fault:
            splitter.flush()
            self._announce()
            if not recorder.done:
                answer.upstream.breaker.failed()
                raise UpstreamDisconnected(
                    f"{answer.upstream.title} sent something else than events within its stream."
                ) from fault
        if splitter.rest:
            self._append(splitter.rest)
            self._announce()
        if splitter.rest.strip():
            self.unstorable = "the stream ended within an event"
        elif not self.oversized:
            await self._record(recorder.finish)

    async def _take_body(self, answer: UpstreamResponse) -> None:
        while data := await answer.chunk():
            self._append(data)
            self._announce()
            if self.oversized:
                await self._wait_for_slowest()
        self.complete = True
        if self.status == 200 and not self.oversized:
            body = b"".join(self._chunks)
            if self.prediction:  # nobody reads a JSON text that can be held before it is whole
                body = self._without_prediction(body)
                self._chunks = [body]
            await self._record(functools.partial(record_response, self.form, self.content_type, body, self.choices))

    def _without_prediction(self, text: bytes) -> bytes:
        shown, tokens = without_prediction_tokens(text)
        if tokens is not None:
            self.prediction_tokens = tokens
        return shown

    async def _record(self, finish: Callable[[], Recording]) -> None:
        try:
            # Encoding a long answer takes milliseconds: it leaves the event loop.
            self.recording = await asyncio.to_thread(finish) if self._size > _LARGE_BODY else finish()
        except UnstorableAnswer as reason:
            self.unstorable = str(reason)

    def _append(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        self._loose += len(chunk)
        if self._size > self.keep_bytes and not self.oversized:
            self.oversized = True
            self.unstorable = f"the answer is longer than {self.keep_bytes} bytes"
            self._settled.set()

    def _announce(self) -> None:
        for subscriber in self._subscribers:
            subscriber.hear()

    async def _wait_for_slowest(self) -> None:
        end = self._first + len(self._chunks)
        while any(subscriber.reads and subscriber.position < end for subscriber in self._subscribers):
            self._drained.is_set = False
            await self._drained.wait()
        self._chunks.clear()
        self._packed.clear()
        self._first = end

    def _pack(self) -> None:
        """Compress the events that all subscribers have read: they repeat one another, and take a twentieth then."""
        if self._loose <= min(self._size // _PACKED_SHARE, _MOST_PACKED):
            return
        end = self._first + len(self._chunks)
        read = min((subscriber.position for subscriber in self._subscribers if subscriber.reads), default=end)
        if read - self._first <= len(self._chunks) // 2:  # few at a time would be large again
            return
        events = self._chunks[: read - self._first]
        if any(isinstance(event, UsageChunk) for event in events):
            return
        data = b"".join(events)
        self._sample = self._sample or events[-1][-_LONGEST_SAMPLE:]
        packer = zlib.compressobj(1, zdict=self._sample)
        self._packed[self._first] = (read, packer.compress(data) + packer.flush())
        self._loose -= len(data)
        del self._chunks[: len(events)]
        self._first = read

    def subscribe(self, deadline: float | None = None) -> "Subscriber":
        """With a `deadline`, a time of the event loop, the subscriber waits until then at most."""
        return Subscriber(self, deadline)


class Subscriber:
    """One client's position in a flight. A context manager: a flight is cancelled when its last subscriber exits."""

    __slots__ = ("_deadline", "_with_usage", "_writer", "flight", "position", "reads", "wake")

    def __init__(self, flight: Flight, deadline: float | None) -> None:
        self.flight = flight
        self._deadline = deadline
        self.position = 0
        self.reads = True
        self.wake = _Signal()
        self._with_usage = False
        self._writer: ResponseWriter | None = None  # while it has everything, and this subscriber's task waits

    def __enter__(self) -> "Subscriber":
        self.flight._subscribers.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        flight = self.flight
        flight._subscribers.discard(self)
        flight._drained.set()
        if not flight._subscribers and not flight.background and not flight.complete and flight.task:
            flight.abandoned = True
            flight.task.cancel()

    async def started(self) -> None:
        """Wait until the upstream has begun to answer, or has failed to: then raises that GatewayError."""
        await wait_until(self._deadline, self.flight._started.wait())
        if self.flight.error and not self.flight.status:
            raise self.flight.error

    async def finished(self) -> None:
        """Wait for the end of the answer without reading it. Raises the GatewayError that ended it early."""
        self.reads = False
        self.flight._drained.set()
        await wait_until(self._deadline, self.flight._finished.wait())
        if self.flight.error:
            raise self.flight.error

    async def chunks(self, with_usage: bool) -> AsyncIterator[bytes]:
        """The body from its beginning; what arrived since the last read is joined into one chunk.

        Raises the GatewayError that ended the flight early, after everything that came before it.
        """
        self._with_usage = with_usage
        while not (self._has_all and self.flight.finished):
            if self._has_all:
                await self._wait()
            else:
                yield self._take()
        if self.flight.error:
            raise self.flight.error

    async def send_to(self, writer: ResponseWriter, with_usage: bool) -> None:
        """Write what `chunks` gives, in the task of the flight while the client keeps up. Raises what both raise."""
        self._with_usage = with_usage
        while not (self._has_all and self.flight.finished):
            if self._has_all:
                self._writer = writer
                try:
                    await self._wait()
                finally:
                    self._writer = None
            elif data := self._take():
                await writer.send(data)
        if self.flight.error:
            raise self.flight.error

    def hear(self) -> None:
        """Write new chunks to the client, or wake its task if that would have to wait for the client."""
        if self._writer is not None:
            position, data = self.position, self._take()
            if not data or self._writer.offer(data):
                return
            self.position = position
        self.wake.set()

    @property
    def _has_all(self) -> bool:
        """All that has arrived so far."""
        return self.position == self.flight._first + len(self.flight._chunks)

    def _take(self) -> bytes:
        flight = self.flight
        if self.position < flight._first:
            self.position, packed = flight._packed[self.position]
            news = [zlib.decompressobj(zdict=flight._sample).decompress(packed)]
        else:
            news = flight._chunks[self.position - flight._first :]
            self.position += len(news)
        flight._drained.set()
        if self._with_usage:
            return news[0] if len(news) == 1 else b"".join(news)
        data = b"".join([chunk for chunk in news if type(chunk) is not UsageChunk])
        # Servers that are asked for usage put a null into every chunk. In a string the quotes would be escaped.
        return data.replace(_NO_USAGE, b"") if flight.asks_usage else data

    async def _wait(self) -> None:
        self.wake.is_set = False
        await wait_until(self._deadline, self.wake.wait())

    async def body(self) -> bytes | None:
        """The whole body; None if it is too long to be held and has to be read in chunks.

        Raises the GatewayError that ended the flight early.
        """
        flight = self.flight
        await wait_until(self._deadline, flight._settled.wait())
        if flight.oversized:
            return None
        if flight.error:
            raise flight.error
        return b"".join(flight._chunks)


class FlightTable:
    """The running flights that may be joined, by the name of their answer. Owns the tasks of all flights."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        self._joinable: dict[str, Flight] = {}
        self._running: set[Flight] = set()

    def find(self, names: tuple[str, ...], deadline: float | None = None) -> Flight | None:
        """The flight that a request with this deadline may join."""
        for name in names:
            flight = self._joinable.get(name)
            if flight and flight.joinable and outlasts(flight.deadline, deadline):
                return flight
        return None

    def start(self, flight: Flight, run: Coroutine[None, None, None], name: str | None) -> None:
        """Start the flight; `name` makes it joinable."""
        task = flight.task = self._tasks.start_isolated(run)
        self._running.add(flight)
        task.add_done_callback(lambda _: self._running.discard(flight))
        if name is None:
            return
        self._joinable[name] = flight

        def forget(_: asyncio.Task[None]) -> None:
            if self._joinable.get(name) is flight:
                del self._joinable[name]

        task.add_done_callback(forget)

    def interrupt(self) -> None:
        """End all flights now: their subscribers get ShuttingDown, after what has come."""
        for flight in self._running:
            if flight.task is not None:
                flight.task.cancel()

    def __len__(self) -> int:
        return len(self._joinable)
