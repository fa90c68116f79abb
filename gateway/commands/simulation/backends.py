"""Backends: each computes prompts one after the other, and answers side by side in a number of slots.

A prompt takes `prefill_speed` without the tokens of blocks that the backend holds; an answer's tokens follow at a
constant speed. Blocks enter its KV cache when the prompt is begun. This is the model of `keepgate route` with slots.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gateway.commands.route_simulation import Cache
from gateway.commands.simulation.figures import Figures
from gateway.commands.simulation.servers import Clock, Server, Window
from gateway.commands.simulation.traffic import Request


class Caller(Protocol):
    """Who has sent a request to a backend."""

    def on_first_token(self) -> None: ...
    def on_end(self) -> None: ...
    def on_lost(self) -> None:
        """The backend has died with the request."""


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    caller: Caller
    ended: bool = False


@dataclass(slots=True, eq=False)
class Backend:
    """One backend. Its prefills are a `Server`."""

    name: str
    prefill: Server
    cache: Cache
    figures: Figures
    block_tokens: int
    clock: Clock
    window: Window
    blocks: int = 0
    hits: int = 0
    """Blocks of prompts that were found in its KV cache."""
    computed: int = 0
    """Tokens of prompts that were not."""
    slot_seconds: float = 0.0
    """Of answers under way within the window, summed over slots."""
    waits: list[float] = field(default_factory=list)
    """Seconds that each request has waited for a slot."""
    _running: set[_Job] = field(default_factory=set)
    _waiting: deque[tuple[float, _Job]] = field(default_factory=deque)

    @property
    def is_dead(self) -> bool:
        return self.prefill.is_dead

    @property
    def utilisation(self) -> float:
        """Of what it has least of: time to compute prompts, or slots."""
        return max(self.prefill.utilisation, self.slots_used)

    @property
    def slots_used(self) -> float:
        """The mean share of slots with an answer."""
        return self.slot_seconds / (self.window.end - self.window.start) / self.figures.slots

    def send(self, request: Request, caller: Caller) -> None:
        """Take a request that comes now."""
        self._waiting.append((self.clock.now, _Job(request, caller)))
        self._begin_waiting()

    def die(self) -> None:
        """Lose all requests, now."""
        lost = [*self._running, *(job for _, job in self._waiting)]
        self._running.clear()
        self._waiting.clear()
        for job in lost:
            job.ended = True
            job.caller.on_lost()

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._running) < self.figures.slots:
            since, job = self._waiting.popleft()
            self._begin(job, since)

    def _begin(self, job: _Job, since: float) -> None:
        now, request = self.clock.now, job.request
        self._running.add(job)
        found = self.cache.use(request.keys, now)
        computed = max(0, request.input_length - found * self.block_tokens)
        if self.window.start <= now <= self.window.end:
            self.waits.append(now - since)
            self.blocks += len(request.keys)
            self.hits += found
            self.computed += computed
        first_token = self.prefill.serve(computed / self.figures.prefill_speed) + self.figures.token
        end = first_token + max(0, request.output_length - 1) * self.figures.token
        self.slot_seconds += self.window.overlap(now, end)
        self._later(first_token, job, job.caller.on_first_token)
        self._later(end, job, lambda: self._end(job))

    def _later(self, time: float, job: _Job, run: Callable[[], None]) -> None:
        self.clock.at(time, lambda: None if job.ended else run())

    def _end(self, job: _Job) -> None:
        job.ended = True
        self._running.discard(job)
        self._begin_waiting()
        job.caller.on_end()


@dataclass(slots=True, eq=False)
class View:
    """A backend as one worker's routing strategy sees it (a `Candidate`): by what this worker has sent."""

    backend: Backend
    name: str
    in_flight: int = 0
    latency: float = 0.0
    weight: float = 1.0
    loaded: None = None
