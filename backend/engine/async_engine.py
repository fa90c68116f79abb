"""The engine for asyncio: it steps in a thread of its own and delivers outputs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass

from backend.engine.engine import Engine
from backend.engine.output_processor import Output
from backend.engine.sequence import FinishReason, Sequence
from backend.engine.stats import EngineStats, StepTimings
from backend.errors import EngineLost, QueueFull, Unavailable

logger = logging.getLogger(__name__)

_CHECK_AFTER_SECONDS = 1.0
"""Integrity is checked after so many seconds without work."""
_BROKEN_STOP_SECONDS = 15.0
"""For the thread to end when the runner is lost; it may wait in an operation of a device that nothing ends."""
NOT_RUNNING = "the engine is not running; try another server, or try again later"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, for metrics."""

    stats: EngineStats
    timings: StepTimings
    computed: bool
    """False if there was nothing to compute and requests only arrived or left."""
    seconds: float
    failed: bool
    problems: int = 0
    """What an integrity check found wrong, in this report alone."""


class Generation:
    """The outputs of one request as they arrive. The queue is bounded by the tokens that were asked for."""

    def __init__(self, sequence_ids: abc.Sequence[int]) -> None:
        self._index = {sequence_id: index for index, sequence_id in enumerate(sequence_ids)}
        self.unfinished = set(sequence_ids)
        self._arrived: list[tuple[int, Output]] = []
        self._wake = asyncio.Event()

    async def take(self) -> list[tuple[int, Output]]:
        """Waits for outputs and returns all there are: (index of the sequence in the request, output)."""
        await self._wake.wait()
        self._wake.clear()
        arrived, self._arrived = self._arrived, []
        return arrived

    def put(self, output: Output) -> None:
        """Adds one output; on the event loop."""
        self._arrived.append((self._index[output.sequence_id], output))
        if output.finish_reason is not None:
            self.unfinished.discard(output.sequence_id)
        self._wake.set()

    def fail(self) -> None:
        """Ends what is unfinished with ``FAILED``; on the event loop."""
        for sequence_id in tuple(self.unfinished):
            self.put(Output(sequence_id, "", [], [], 0, FinishReason.FAILED))


class AsyncEngine:
    """Owns the engine's thread and bounds the requests in flight.

    Args:
        max_in_flight: sequences accepted and not completely answered, at most; more are refused.
        on_step: called on the event loop after each step.
    """

    def __init__(self, engine: Engine, max_in_flight: int, on_step: Callable[[StepReport], None]) -> None:
        self.engine = engine
        self.in_flight = 0
        self._max_in_flight = max_in_flight
        self._on_step = on_step
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._generations: dict[int, Generation] = {}
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._completion_rate = CompletionRate()
        self._steps = 0
        self._unchecked = False
        self._stopping = False
        self._broken = False
        self.unavailable_because = NOT_RUNNING
        """What callers are told while it is not ``alive``."""

    def start(self) -> None:
        """Starts the thread; call it on the event loop that receives the outputs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return self._thread.is_alive() and not self._stopping and not self._broken

    def submit(self, sequences: abc.Sequence[Sequence]) -> Generation:
        """Queues the sequences of one request. Every submit is followed by one ``release``, whatever happens.

        Raises:
            QueueFull: too many sequences are in flight.
            Unavailable: the engine is stopping, or broken.
        """
        if not self.alive:
            raise Unavailable(self.unavailable_because)
        if self.in_flight + len(sequences) > self._max_in_flight:
            raise QueueFull(
                f"{self.in_flight} of at most {self._max_in_flight} answers are in flight; try again later",
                self._completion_rate.seconds_until(
                    self.in_flight + len(sequences) - self._max_in_flight, time.monotonic()
                ),
            )
        if not self.in_flight:
            self._completion_rate.begin(time.monotonic())
        self.in_flight += len(sequences)
        generation = Generation([sequence.id for sequence in sequences])
        for sequence in sequences:
            self._generations[sequence.id] = generation

        def add() -> None:
            try:
                for sequence in sequences:
                    self.engine.add(sequence)
            except ValueError:
                # The caller should have checked that they fit. Only this request fails.
                logger.exception("a request is refused that should not have been submitted")
                for sequence in sequences:
                    self.engine.abort(sequence.id)
                self._call(generation.fail)

        self._commands.put(add)
        return generation

    def release(self, sequences: abc.Sequence[Sequence], generation: Generation) -> None:
        """Ends the request: what is unfinished is aborted before the next step, and its KV blocks are freed."""
        self.in_flight -= len(sequences)
        self._completion_rate.record(len(sequences), time.monotonic())
        for sequence in sequences:
            self._generations.pop(sequence.id, None)
        unfinished = list(generation.unfinished)

        def abort() -> None:
            for sequence_id in unfinished:
                self.engine.abort(sequence_id)

        if unfinished:
            self._commands.put(abort)

    def command(self, command: Callable[[], None]) -> None:
        """Calls a function in the engine's thread between two steps; any thread may call this."""
        self._commands.put(command)

    def mark_lost(self, reason: str) -> None:
        """Refuses requests from now on: the runner is lost. Its steps raise, which ends those in flight.

        Args:
            reason: what callers are told.
        """
        self._broken, self.unavailable_because = True, reason

    async def stop(self) -> None:
        """Fails all sequences and ends the thread; their outputs arrive before this returns.

        A thread that is lost with its runner is not waited for longer than some seconds.
        """
        self._stopping = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, _BROKEN_STOP_SECONDS if self._broken else None)
        if self._thread.is_alive():
            self._fail_open()

    def _work(self) -> None:
        try:
            working = True
            while working:
                working = self._run_once()
            self._send(self.engine.fail_all(), StepReport(self.engine.stats(), StepTimings(), False, 0.0, False))
        except Exception:
            # Failing the requests failed too, so the engine's state is inconsistent. It cannot compute any more, but
            # no request may wait for ever.
            logger.exception("the engine cannot go on; every request is refused until the server is started again")
            self._broken = True
            self._call(self._fail_open)

    def _run_once(self) -> bool:
        """Runs the commands and computes a step; False: stop."""
        started = time.perf_counter()
        outputs: list[Output] = []
        timings = StepTimings()
        working = True
        failed = False
        try:
            working = self._run_commands()
            started = time.perf_counter()
            if working and self.engine.has_work:
                self._unchecked = True
                outputs, timings = self.engine.step(), self.engine.timings
        except EngineLost as error:
            logger.error("the requests are ended with an error: %s", error)
            outputs, failed = self.engine.fail_all(), True
        except Exception:
            # An error in a step concerns the whole batch.
            logger.exception("a step failed; its requests are ended with an error")
            outputs, failed = self.engine.fail_all(), True
        seconds, stats = time.perf_counter() - started, self.engine.stats()
        self._send(outputs, StepReport(stats, timings, stats.steps > self._steps, seconds, failed))
        self._steps = stats.steps
        return working

    def _run_commands(self) -> bool:
        """Runs the commands that have arrived, waiting for one if there is nothing else to do; False: stop."""
        pause = self.engine.seconds_until_work()
        while pause != 0.0 or not self._commands.empty():
            try:
                command = self._commands.get_nowait() if pause == 0.0 else self._wait(pause)
            except queue.Empty:
                return True
            if command is None:
                return False
            pause = 0.0
            command()
        return True

    def _wait(self, pause: float | None) -> Callable[[], None] | None:
        """Waits ``pause`` seconds (None: for ever) for a command, and checks integrity meanwhile."""
        if pause is None and self._unchecked:
            try:
                return self._commands.get(timeout=_CHECK_AFTER_SECONDS)
            except queue.Empty:
                self._check()
        return self._commands.get(timeout=pause)

    def _check(self) -> None:
        """Logs and counts violated invariants. Nothing is repaired."""
        self._unchecked = False
        problems = self.engine.problems()
        for problem in problems:
            logger.error("integrity check: %s", problem)
        report = StepReport(self.engine.stats(), StepTimings(), False, 0.0, False, len(problems))
        self._send([], report)

    def _send(self, outputs: list[Output], report: StepReport) -> None:
        self._call(lambda: self._deliver(outputs, report))

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _deliver(self, outputs: list[Output], report: StepReport) -> None:
        for output in outputs:
            generation = self._generations.get(output.sequence_id)
            if generation is not None and output.finish_reason is not FinishReason.ABORTED:
                generation.put(output)
        self._on_step(report)

    def _fail_open(self) -> None:
        """Fails all generations after the thread has ended; on the event loop, like every change to a generation."""
        for generation in set(self._generations.values()):
            generation.fail()


_WINDOW = 64
_LONGEST = 60


class CompletionRate:
    """Mean time between completions, over the last 64 since the server was idle; for ``Retry-After``.

    All times are ``time.monotonic()`` seconds, given by the caller.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_WINDOW)
        self._since = 0.0

    def begin(self, now: float) -> None:
        """The first request after an idle time has arrived."""
        self._ends.clear()
        self._since = now

    def record(self, answers: int, now: float) -> None:
        """Requests have completed, in whatever way."""
        for _ in range(answers):
            if len(self._ends) == _WINDOW:
                self._since = self._ends[0]
            self._ends.append(now)

    def seconds_until(self, answers: int, now: float) -> int:
        """Whole seconds until so many more requests should have completed, from 1 to 60.

        Until the first has completed, the time since it arrived is used as the mean.
        """
        between = (now - self._since) / max(1, len(self._ends))
        return max(1, min(_LONGEST, math.ceil(answers * between)))
