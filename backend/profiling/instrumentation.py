"""Times the engine from outside: for as long as a profile lasts, functions of the engine are replaced by timed ones.

The engine itself has no switch, no branch and no clock for this: its functions are looked up by name at each call, so
replacing the names is enough, and what is put back afterwards is what was there. While it lasts, a step costs some 15
pairs of clock readings and as many entries of a list, some 50 µs beside steps of milliseconds. It concerns all engines
of the process, so one profile runs at a time.

The names that are replaced are listed in ``TIMED``; two threads call them, the engine's and the event loop's, and
each entry says which.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from backend.engine import engine as engine_module
from backend.engine import step as step_module
from backend.engine.async_engine import AsyncEngine
from backend.engine.block_manager import BlockManager
from backend.engine.block_pool import BlockPool
from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner, StepInput, StepOutput
from backend.engine.scheduler import Chunk, Scheduler
from backend.engine.step import InFlightStep
from backend.prefixes.sharing import PrefixSharing
from prefix_store.store.store import PrefixStore

Kind = Literal["prefill", "decode", "mixed"]
KINDS: tuple[Kind, ...] = ("prefill", "decode", "mixed")
clock = time.monotonic
"""Seconds; the clock of the engine's own times."""

WAITING = "waiting"
"""The engine's thread has nothing to compute."""
BOOKKEEPING = "bookkeeping"
"""A step without what is named in it: the engine's own Python."""
TIMED: tuple[tuple[Any, str, str], ...] = (
    (AsyncEngine, "_wait", WAITING),
    (Engine, "add", BOOKKEEPING),
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "schedule_ahead", "schedule"),
    (BlockManager, "match", "prefix lookup"),
    (engine_module, "build_step", "build inputs"),
    (engine_module, "build_next_step", "build inputs"),
    (engine_module, "sample_independently", "sampling"),
    (step_module, "sample", "sampling"),
    (engine_module, "process_token", "detokenise"),
)
"""Called by the engine's thread: owner, name, and the part of the time that it is. A name that is gone is an error."""
_TIMED_ON_LOOP: tuple[tuple[Any, str, str], ...] = (
    (AsyncEngine, "_deliver", "deliver"),
    (PrefixSharing, "ask", "prefix store"),
    (PrefixStore, "restore", "prefix store"),
)


class Span(NamedTuple):
    """Time from ``start`` to ``end``, in seconds of ``clock``."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(slots=True)
class StepRecord:
    """One step of the engine: what it computed and how long it took."""

    kind: Kind
    chunks: tuple[tuple[int, int], ...]
    """(first position, tokens) of each sequence."""
    prefill_rows: int
    """Rows that are tokens of prompts."""
    logits_rows: int
    padding: int
    start: float
    """When it was launched."""
    model_seconds: float
    """In the runner, or of its device."""
    step_seconds: float = 0.0
    """All of the engine's step in which its result was collected, Python included; 0: it was not."""

    @property
    def sequences(self) -> int:
        """The batch."""
        return len(self.chunks)

    @property
    def rows(self) -> int:
        """Tokens computed."""
        return sum(count for _, count in self.chunks)


@dataclass(slots=True)
class Recorder:
    """What was timed, in the order of the ends."""

    engine: list[Span] = field(default_factory=list)
    """Of the engine's thread; spans nest."""
    loop: list[Span] = field(default_factory=list)
    """Of the event loop; the spans of requests may overlap where they wait for something."""
    steps: list[StepRecord] = field(default_factory=list)
    most_held: int = 0
    """KV blocks that sequences held at the same time, at most."""
    _pool: BlockPool | None = None
    _device_free: float = 0.0
    _chunks: list[Chunk] = field(default_factory=list)
    _launched: dict[int, StepRecord] = field(default_factory=dict)
    _collected: list[StepRecord] = field(default_factory=list)

    @contextmanager
    def on_loop(self, name: str) -> Iterator[None]:
        """Times the block, which the event loop runs."""
        start = clock()
        try:
            yield
        finally:
            self.loop.append(Span(name, start, clock()))

    def run_step(self, run: Callable[..., StepOutput], runner: ModelRunner, step: StepInput) -> StepOutput:
        """Calls the runner; the chunks are those that the scheduler has just returned."""
        chunks, start = self._chunks, clock()
        output = run(runner, step)
        end = clock()
        prefill_rows = sum(max(0, min(c.start + c.count, c.sequence.num_prompt) - c.start) for c in chunks)
        rows = len(step.token_ids)
        kind: Kind = "decode" if not prefill_rows else "prefill" if prefill_rows == rows else "mixed"
        spans = tuple((chunk.start, chunk.count) for chunk in chunks)
        record = StepRecord(kind, spans, prefill_rows, len(step.logits_rows), output.padding_rows, start, end - start)
        self.engine.append(Span(kind, start, end))
        self.steps.append(record)
        if self._pool is not None:
            self.most_held = max(self.most_held, self._pool.num_held)
        self._launched[id(output)] = record
        return output

    def schedule(self, schedule: Callable[..., list[Chunk]], *arguments: Any) -> list[Chunk]:
        """Keeps what the scheduler returns for the next call of the runner."""
        self._chunks = schedule(*arguments)
        return self._chunks

    def collect(self, collect: Callable[..., Any], step: InFlightStep, *arguments: Any) -> Any:
        """Waits for a step: for a device that counts as the step's own time, on the host as sampling."""
        start = clock()
        try:
            return collect(step, *arguments)
        finally:
            end = clock()
            record = self._launched.pop(id(step.output), None)
            on_device = isinstance(step.output, StepOutput) and step.output.unfinished
            name = record.kind if record is not None and on_device else "sampling"
            self.engine.append(Span(name, start, end))
            if record is not None:
                if on_device:
                    # It computes one step after the other, also while the host does something else.
                    record.model_seconds = end - max(record.start, self._device_free)
                    self._device_free = end
                self._collected.append(record)

    def step(self, step: Callable[..., Any], engine: Engine) -> Any:
        """One step of the engine, to which all steps belong that were collected in it."""
        self._pool, start = engine.pool, clock()
        try:
            return step(engine)
        finally:
            end = clock()
            self.engine.append(Span(BOOKKEEPING, start, end))
            for record in self._collected:
                record.step_seconds = end - start
            self._collected.clear()


@contextmanager
def instrumented(runner: ModelRunner) -> Iterator[Recorder]:
    """Times all that the engine does with this runner while the block lasts."""
    recorder = Recorder()
    with ExitStack() as stack:
        for timed, spans in ((TIMED, recorder.engine), (_TIMED_ON_LOOP, recorder.loop)):
            for owner, name, part in timed:
                stack.enter_context(replaced(owner, name, partial(_timed, part, spans)))
        for owner, name, record in (
            (Scheduler, "schedule", recorder.schedule),
            (Scheduler, "schedule_ahead", recorder.schedule),
            (Engine, "step", recorder.step),
            (engine_module, "collect_result", recorder.collect),
            (runner_class(runner), "run", recorder.run_step),
        ):
            stack.enter_context(replaced(owner, name, partial(_through, record)))
        yield recorder


def runner_class(runner: ModelRunner) -> type:
    """The class that has a runner's ``run``."""
    return next(kind for kind in type(runner).__mro__ if "run" in vars(kind))


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a function of a class or module by another around it, while the block lasts."""
    original = vars(owner)[name]
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _through(record: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def recording(*arguments: Any) -> Any:
        return record(function, *arguments)

    return recording


def _timed(part: str, spans: list[Span], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which adds a span at each call; also one that is a coroutine."""
    if inspect.iscoroutinefunction(function):

        async def timed_coroutine(*arguments: Any, **named: Any) -> Any:
            start = clock()
            try:
                return await function(*arguments, **named)
            finally:
                spans.append(Span(part, start, clock()))

        return timed_coroutine

    def timed(*arguments: Any, **named: Any) -> Any:
        start = clock()
        try:
            return function(*arguments, **named)
        finally:
            spans.append(Span(part, start, clock()))

    return timed
