"""Gateways: the path of a request through a worker's memory, Redis, a flight that is under way, and a backend."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.commands.simulation.backends import View
from gateway.commands.simulation.figures import Figures
from gateway.commands.simulation.redis_nodes import RedisNodes
from gateway.commands.simulation.servers import Clock, Server
from gateway.commands.simulation.traffic import Request
from gateway.routing.strategy import RouteRequest, Strategy

Layer = Literal["memory", "redis", "semantic", "flight", "miss"]
LAYERS: tuple[Layer, ...] = ("memory", "redis", "semantic", "flight", "miss")

_RELAYED_AT_ONCE = 2e-3
"""Seconds of CPU time: so many chunks of a stream are one job of the simulation, about as long as a miss is."""
_NEWEST = 0.2
"""Of the newest value, in the average of a backend's latencies."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What has become of a request."""

    time: float
    """When it came."""
    layer: Layer | None = None
    """What has answered it."""
    first_byte: float = math.nan
    """Seconds until then."""
    total: float = math.nan
    """Seconds until its end."""
    failed: str = ""
    """Why it has failed; empty: it has not."""
    retried: bool = False


class Lru:
    """Answers, the least recently used of which leave first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[int, None] = OrderedDict()

    def has(self, identity: int) -> bool:
        if identity not in self._entries:
            return False
        self._entries.move_to_end(identity)
        return True

    def put(self, identity: int) -> None:
        self._entries[identity] = None
        self._entries.move_to_end(identity)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()


@dataclass(slots=True, eq=False)
class Worker:
    """One process of a gateway: a core, a memory tier, and routing of its own."""

    cpu: Server
    semantic: Server
    memory: Lru
    redis: RedisNodes
    views: Sequence[View]
    strategy: Strategy
    figures: Figures
    clock: Clock
    streamed: float
    """The share of answers that are streams."""
    is_similar: Callable[[], bool]
    """Whether a request that is no hit is one of the semantic cache."""
    flights: dict[int, "Flight"] = field(default_factory=dict)
    under_way: set["Exchange"] = field(default_factory=set)
    knows_dead: set[str] = field(default_factory=set)
    """Redis nodes for which it has waited in vain once."""

    def receive(self, request: Request, outcome: Outcome) -> None:
        """Take a request that comes now."""
        if self.cpu.is_dead:
            outcome.failed = "sent to a gateway that has died"
            return
        Exchange(self, request, outcome).begin()

    def die(self) -> None:
        """Lose all requests and the memory, now."""
        for exchange in list(self.under_way):
            exchange.fail("under way in a gateway that has died")
        self.memory.clear()
        self.flights.clear()

    def backend_for(self, request: Request) -> View | None:
        """The first of the strategy's order that lives: a connection that is refused costs next to nothing."""
        asked = RouteRequest("model", tuple(request.keys))
        for view in self.strategy.order(self.views, asked):
            if not view.backend.is_dead:
                self.strategy.sent(view, asked)
                return view
        return None


class Exchange:
    """One request in one worker, to its end."""

    def __init__(self, worker: Worker, request: Request, outcome: Outcome) -> None:
        self.worker = worker
        self.request = request
        self.outcome = outcome
        worker.under_way.add(self)

    def begin(self) -> None:
        worker, figures = self.worker, self.worker.figures
        if worker.memory.has(self.request.identity):
            worker.redis.note_memory_hit(self.request.identity)
            self._answer("memory", figures.gateway_hit)
            return
        # Half of what a miss takes comes before the backend is asked; a hit from Redis has taken less by then.
        self._then(worker.cpu.serve(figures.gateway_redis_hit / 2), self._look_up)

    def fail(self, reason: str) -> None:
        if self in self.worker.under_way:
            self.outcome.failed = self.outcome.failed or reason
            self.worker.under_way.discard(self)

    def _look_up(self) -> None:
        worker = self.worker
        found, answered_at = worker.redis.look_up(self.request.identity, worker.knows_dead)
        self._then(answered_at, self._hit_from_redis if found else self._missed_in_redis)

    def _hit_from_redis(self) -> None:
        self.worker.memory.put(self.request.identity)
        self._answer("redis", self.worker.figures.gateway_redis_hit / 2)

    def _missed_in_redis(self) -> None:
        worker = self.worker
        if not worker.semantic.name:
            self.share_or_ask()
            return
        similar = worker.is_similar()
        done = worker.semantic.serve(worker.figures.semantic_lookup)
        self._then(done, self._hit_by_meaning if similar else self.share_or_ask)

    def _hit_by_meaning(self) -> None:
        self._answer("semantic", self.worker.figures.gateway_hit)

    def share_or_ask(self) -> None:
        worker, identity = self.worker, self.request.identity
        flight = worker.flights.get(identity)
        if flight is not None:
            flight.joined.append(self)
            return
        flight = worker.flights[identity] = Flight(worker, self)
        before = max(0.0, worker.figures.gateway_miss - worker.figures.gateway_redis_hit) / 2
        self._then(worker.cpu.serve(before), flight.ask)

    def answer_from_flight(self, first_byte: float) -> None:
        """What another has asked for has come."""
        self.outcome.first_byte = first_byte
        self._answer("flight", self.worker.figures.gateway_hit)

    def _answer(self, layer: Layer, cpu: float) -> None:
        self._then(self.worker.cpu.serve(cpu), lambda: self.end(layer))

    def end(self, layer: Layer) -> None:
        outcome = self.outcome
        self.worker.under_way.discard(self)
        outcome.layer = layer
        outcome.total = self.worker.clock.now - outcome.time
        if math.isnan(outcome.first_byte):
            outcome.first_byte = outcome.total

    def _then(self, time: float, run: Callable[[], None]) -> None:
        self.worker.clock.at(time, lambda: run() if self in self.worker.under_way else None)


class Flight:
    """A call of a backend, which all equal requests of a worker share."""

    def __init__(self, worker: Worker, leader: Exchange) -> None:
        self._worker = worker
        self._leader = leader
        self._view: View | None = None
        self._has_begun = False
        self._sent_at = 0.0
        self.joined: list[Exchange] = []

    def ask(self) -> None:
        worker = self._worker
        view = worker.backend_for(self._leader.request)
        if view is None:
            self._end_with_failure("no backend is left")
            return
        self._view, self._sent_at = view, worker.clock.now
        view.in_flight += 1
        view.backend.send(self._leader.request, self)

    # What the backend tells: a `Caller`.

    def on_first_token(self) -> None:
        worker, view = self._worker, self._view
        assert view is not None  # noqa: S101  # it was asked
        self._has_begun = True
        waited = worker.clock.now - self._sent_at
        view.latency += (waited - view.latency) * (_NEWEST if view.latency else 1.0)
        for exchange in (self._leader, *self.joined):
            if math.isnan(exchange.outcome.first_byte):
                exchange.outcome.first_byte = worker.clock.now - exchange.outcome.time
        self._relay()

    def on_end(self) -> None:
        worker, view, figures = self._worker, self._view, self._worker.figures
        assert view is not None  # noqa: S101  # it was asked
        view.in_flight -= 1
        if worker.cpu.is_dead:
            return
        after = max(0.0, figures.gateway_miss - figures.gateway_redis_hit) / 2 + figures.gateway_redis_hit / 2
        self._worker.clock.at(worker.cpu.serve(after), self._store)

    def on_lost(self) -> None:
        view = self._view
        assert view is not None  # noqa: S101  # it was asked
        view.in_flight -= 1
        if self._worker.cpu.is_dead:
            return
        if self._has_begun and self._is_streamed:
            # Its client has a part of the answer. Who only joined asks anew, as the gateway does.
            self._worker.flights.pop(self._leader.request.identity, None)
            self._leader.fail("a stream that its backend has broken off")
            for exchange in self.joined:
                exchange.outcome.retried = True
                exchange.share_or_ask()
            return
        for exchange in (self._leader, *self.joined):
            exchange.outcome.retried = True
        self._has_begun = False
        self.ask()

    @property
    def _is_streamed(self) -> bool:
        # By the identity and not by chance: a repetition of the question is streamed as well.
        return (self._leader.request.identity * 0.6180339887498949) % 1.0 < self._worker.streamed

    def _relay(self) -> None:
        """Take the CPU time of the stream's chunks, spread over the time in which they come."""
        worker, figures = self._worker, self._worker.figures
        if not self._is_streamed:
            return
        chunks, view = self._leader.request.output_length, self._view
        jobs = math.ceil(chunks * figures.gateway_chunk / _RELAYED_AT_ONCE)
        for job in range(jobs):
            time = worker.clock.now + chunks * figures.token * job / jobs

            def relay(seconds: float = chunks * figures.gateway_chunk / jobs) -> None:
                if self._view is view and self._has_begun and not worker.cpu.is_dead:
                    worker.cpu.serve(seconds)

            worker.clock.at(time, relay)

    def _store(self) -> None:
        worker, identity = self._worker, self._leader.request.identity
        if worker.cpu.is_dead:
            return
        worker.flights.pop(identity, None)
        worker.memory.put(identity)
        worker.redis.write(identity)
        if self._leader in worker.under_way:
            self._leader.end("miss")
        for exchange in self.joined:
            if exchange in worker.under_way:
                exchange.answer_from_flight(exchange.outcome.first_byte)

    def _end_with_failure(self, reason: str) -> None:
        self._worker.flights.pop(self._leader.request.identity, None)
        for exchange in (self._leader, *self.joined):
            exchange.fail(reason)
