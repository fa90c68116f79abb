"""The simulation: a fleet, the requests of a trace, and nodes that die meanwhile."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.commands.route_simulation import Cache
from gateway.commands.simulation.backends import Backend, View
from gateway.commands.simulation.figures import Figures, Fleet
from gateway.commands.simulation.gateways import LAYERS, Lru, Outcome, Worker
from gateway.commands.simulation.redis_nodes import RedisNodes
from gateway.commands.simulation.servers import Clock, Server, Window
from gateway.commands.simulation.traffic import Request
from gateway.routing.strategy import Strategy

Kind = Literal["gateway", "redis", "backend", "semantic"]
Mortal = Literal["gateway", "redis", "backend"]
_FROM_A_CACHE = ("memory", "redis", "semantic")


@dataclass(frozen=True, slots=True)
class Death:
    """A node that dies, and does not come back."""

    kind: Mortal
    number: int
    """Of the node, from 0."""
    time: float
    """Seconds since the start."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a kind of node has had to do."""

    mean: float
    """The share of the window in which nodes worked, on average."""
    most: float
    """Of the busiest node."""
    wait: float
    """Seconds that jobs have waited, on average."""
    waits: tuple[float, float]
    """The same: median, and 99th percentile."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The time until the next node dies."""

    start: float
    end: float
    requests: int
    hits: float
    """The share that came from memory, Redis or the semantic cache."""
    failed: int
    first_byte: tuple[float, float]
    """Seconds: median, and 99th percentile."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a fleet has done with traffic, within the window."""

    requests: int
    rate: float
    """Requests a second."""
    layers: dict[str, float]
    """The share of requests that each layer has answered."""
    failed: dict[str, int]
    """Requests that have failed, by why."""
    retried: int
    first_byte: tuple[float, float]
    """Seconds: median, and 99th percentile."""
    hit: tuple[float, float]
    """Seconds until the end of a hit: median, and 99th percentile."""
    total: tuple[float, float]
    """Seconds until the end of any answer: median, and 99th percentile."""
    loads: dict[Kind, Load]
    block_hits: float
    """The share of blocks of prompts that backends held."""
    computed_tokens: float
    """Tokens of the prompt that a backend computed, on average over misses."""
    prompt_tokens: float
    """Tokens of a prompt, on average over all requests."""
    answer_tokens: float
    """Tokens of an answer, on average over all requests."""
    missed_answer_tokens: float
    """The same over misses."""
    slots_used: float
    """The mean share of the backends' slots with an answer."""
    phases: tuple[Phase, ...]
    """The window, divided where nodes die."""

    @property
    def bottleneck(self) -> Kind:
        """The kind of node of which one is busiest."""
        return max(self.loads, key=lambda kind: self.loads[kind].most)

    @property
    def saturation(self) -> float:
        """Requests a second at which that one would work all the time."""
        most = self.loads[self.bottleneck].most
        return self.rate / most if most else math.inf


@dataclass(frozen=True, slots=True)
class Options:
    """What is not about how many nodes there are and what they take."""

    streamed: float = 1.0
    """The share of answers that are streams."""
    similar: float = 0.0
    """The share of requests beyond the exact cache that the semantic cache answers; with 0 there is none."""
    warm_up: float = 0.2
    """The share of the time in which caches are filled and nothing is measured."""
    seed: int = 1


def simulate(
    arrivals: Iterable[Request],
    block_tokens: int,
    fleet: Fleet,
    figures: Figures,
    make_strategy: Callable[[], Strategy],
    make_cache: Callable[[], Cache],
    options: Options = Options(),  # frozen
    deaths: Sequence[Death] = (),
) -> Result:
    """Sends the requests to the fleet. The same in every run. Raises ValueError for no requests, or a death of none."""
    requests = list(arrivals)
    if not requests:
        raise ValueError("there are no requests")
    end = requests[-1].time or 1.0
    simulation = _Simulation(
        fleet, figures, make_strategy, make_cache, options, block_tokens, Window(options.warm_up * end, end)
    )
    for death in deaths:
        simulation.plan(death)
    return simulation.run(requests)


class _Simulation:
    def __init__(
        self,
        fleet: Fleet,
        figures: Figures,
        make_strategy: Callable[[], Strategy],
        make_cache: Callable[[], Cache],
        options: Options,
        block_tokens: int,
        window: Window,
    ) -> None:
        self._clock = clock = Clock()
        self._window = window
        self._figures = figures
        self._fleet = fleet
        self._random = random.Random(options.seed)  # noqa: S311  # a simulation, which is to be repeatable
        self._redis = RedisNodes(
            [Server(f"redis {number}", clock, window) for number in range(fleet.redis)],
            fleet.redis_entries,
            figures,
            clock,
        )
        self._backends = [
            Backend(
                f"backend {number}",
                Server(f"prefill {number}", clock, window),
                make_cache(),
                figures,
                block_tokens,
                clock,
                window,
            )
            for number in range(fleet.backends)
        ]
        # One process of the semantic cache for all workers of a gateway; without a name there is none.
        semantic = [Server("semantic" if options.similar else "", clock, window) for _ in range(fleet.gateways)]
        self._semantic = semantic if options.similar else []
        self._workers = [
            Worker(
                Server(f"gateway {number // fleet.workers}", clock, window),
                semantic[number // fleet.workers],
                Lru(fleet.memory_entries),
                self._redis,
                [View(backend, backend.name) for backend in self._backends],
                make_strategy(),
                figures,
                clock,
                options.streamed,
                lambda: self._random.random() < options.similar,
            )
            for number in range(fleet.gateways * fleet.workers)
        ]
        self._reachable = list(self._workers)
        self._deaths: list[float] = []

    def plan(self, death: Death) -> None:
        count = {"gateway": self._fleet.gateways, "redis": self._fleet.redis, "backend": self._fleet.backends}
        if death.number >= count[death.kind]:
            raise ValueError(f"there is no {death.kind} {death.number}: there are {count[death.kind]}, from 0 on")
        self._deaths.append(death.time)
        self._clock.at(death.time, lambda: self._die(death))

    def run(self, requests: Sequence[Request]) -> Result:
        self._upkeep(0.0, requests[-1].time)
        outcomes: list[Outcome] = []
        for request in requests:
            self._clock.run_until(request.time)
            outcome = Outcome(request.time)
            outcomes.append(outcome)
            if self._reachable:
                # A connection belongs to one worker, and an app's requests to its connections, by chance.
                self._random.choice(self._reachable).receive(request, outcome)
            else:
                outcome.failed = "no gateway is left"
        self._clock.run()
        return self._result(requests, outcomes)

    def _upkeep(self, time: float, end: float) -> None:
        """Let each worker take its time of the first Redis node, once a second until then."""
        if not self._redis.nodes or time > end:
            return
        alive = sum(not worker.cpu.is_dead for worker in self._workers)
        for number in range(alive):
            self._clock.at(time + number / alive, self._redis.keep_up)
        self._clock.at(time + 1.0, lambda: self._upkeep(time + 1.0, end))

    def _die(self, death: Death) -> None:
        now = self._clock.now
        if death.kind == "redis":
            self._redis.nodes[death.number].died_at = now
        elif death.kind == "backend":
            backend = self._backends[death.number]
            backend.prefill.died_at = now
            backend.die()
        else:
            first = death.number * self._fleet.workers
            dead = self._workers[first : first + self._fleet.workers]
            for worker in dead:
                worker.cpu.died_at = now
                worker.die()
            self._clock.at(now + self._figures.noticed_after, lambda: self._notice(dead))

    def _notice(self, dead: Sequence[Worker]) -> None:
        self._reachable = [worker for worker in self._reachable if worker not in dead]

    def _result(self, requests: Sequence[Request], all_outcomes: Sequence[Outcome]) -> Result:
        window = self._window
        measured = [
            (request, outcome)
            for request, outcome in zip(requests, all_outcomes, strict=True)
            if window.start <= outcome.time <= window.end
        ]
        outcomes = [outcome for _, outcome in measured]
        answered = [outcome for outcome in outcomes if not outcome.failed and outcome.layer is not None]
        layers = Counter(outcome.layer for outcome in answered)
        misses = [request for request, outcome in measured if outcome.layer == "miss"]
        loads: dict[Kind, Load] = {"gateway": _load([worker.cpu for worker in self._workers])}
        if self._redis.nodes:
            loads["redis"] = _load(self._redis.nodes)
        if self._semantic:
            loads["semantic"] = _load(self._semantic)
        loads["backend"] = _backend_load(self._backends)
        blocks = sum(backend.blocks for backend in self._backends)
        hits = [outcome.total for outcome in answered if outcome.layer in _FROM_A_CACHE]
        return Result(
            requests=len(measured),
            rate=len(measured) / (window.end - window.start),
            layers={layer: layers[layer] / len(measured) if measured else 0.0 for layer in LAYERS},
            failed=dict(Counter(outcome.failed for outcome in outcomes if outcome.failed)),
            retried=sum(outcome.retried for outcome in outcomes),
            first_byte=percentiles([outcome.first_byte for outcome in answered]),
            hit=percentiles(hits),
            total=percentiles([outcome.total for outcome in answered]),
            loads=loads,
            block_hits=sum(backend.hits for backend in self._backends) / blocks if blocks else 0.0,
            computed_tokens=sum(backend.computed for backend in self._backends) / max(1, len(misses)),
            prompt_tokens=_mean([request.input_length for request, _ in measured]),
            answer_tokens=_mean([request.output_length for request, _ in measured]),
            missed_answer_tokens=_mean([request.output_length for request in misses]),
            slots_used=_mean([backend.slots_used for backend in self._backends]),
            phases=self._phases(outcomes),
        )

    def _phases(self, outcomes: Sequence[Outcome]) -> tuple[Phase, ...]:
        window = self._window
        # The last request comes at the very end of the window.
        deaths = sorted({time for time in self._deaths if window.start < time < window.end})
        return tuple(
            _phase(start, end, [outcome for outcome in outcomes if start <= outcome.time < end])
            for start, end in itertools.pairwise([window.start, *deaths, math.nextafter(window.end, math.inf)])
        )


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile; 0 for none."""
    if not values:
        return 0.0, 0.0
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _phase(start: float, end: float, outcomes: Sequence[Outcome]) -> Phase:
    hits = sum(outcome.layer in _FROM_A_CACHE for outcome in outcomes)
    return Phase(
        start=start,
        end=end,
        requests=len(outcomes),
        hits=hits / len(outcomes) if outcomes else 0.0,
        failed=sum(bool(outcome.failed) for outcome in outcomes),
        first_byte=percentiles([outcome.first_byte for outcome in outcomes if not outcome.failed]),
    )


def _load(servers: Sequence[Server]) -> Load:
    return _load_of([server.utilisation for server in servers], [wait for server in servers for wait in server.waits])


def _backend_load(backends: Sequence[Backend]) -> Load:
    waits = [wait for backend in backends for wait in (*backend.prefill.waits, *backend.waits)]
    return _load_of([backend.utilisation for backend in backends], waits)


def _load_of(shares: Sequence[float], waits: Sequence[float]) -> Load:
    return Load(_mean(shares), max(shares), _mean(waits), percentiles(waits))
