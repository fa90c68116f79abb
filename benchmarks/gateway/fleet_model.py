"""`keepgate simulate` beside the real thing: one gateway, one Redis node and an upstream, under the same arrivals."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.client import Answer, Client
from benchmarks.harness.everything import EVERYTHING, gateway_with_everything
from benchmarks.harness.measurement import RATIO, Figure, Row
from benchmarks.harness.processes import CannotMeasure, Server, cores, upstream
from benchmarks.harness.request_bodies import NUMBER_DIGITS, distinct_parts
from benchmarks.harness.valkey import valkey_server
from gateway.commands.route import LruCache
from gateway.commands.simulation.capacity import Workload, utilisations
from gateway.commands.simulation.figures import Figures, Fleet
from gateway.commands.simulation.run import Options, Result, percentiles, simulate
from gateway.commands.simulation.traffic import Request
from gateway.routing.strategies.load import LeastConnections

_SERVICE_TIME = 0.05
_CONNECTIONS = 64
_QUESTIONS = 2_000
_ONE = Fleet(gateways=1, workers=1, redis=1, backends=1)
_WHOLE = Options(streamed=0.0, warm_up=0.0)
_METHOD = f"""\
Chats of 300 B come at random moments (a Poisson process), whether or not earlier ones are answered; each asks one of
{_QUESTIONS:,} questions, so that more and more of them are hits. The upstream takes 50 ms. The same arrivals go to a
gateway with one worker, a Valkey over TCP and an upstream, and through the simulation. What a hit and a miss take of
the gateway and of Valkey is measured right before, with hits alone and with misses alone at the same rate; nothing else
is fitted. A figure is what was measured, against what the simulation foretold. The client is a Python program on the
core of the upstream and of Valkey, whose delays are part of what is measured. {EVERYTHING}"""


@dataclass(frozen=True, slots=True)
class _Run:
    """What the gateway has done with arrivals."""

    answers: Sequence[Answer]
    seconds: float
    gateway_cpu: float
    node_cpu: float

    @property
    def hits(self) -> float:
        return sum(_is_hit(answer) for answer in self.answers) / len(self.answers)


async def measure(quick: bool) -> Figure:
    rounds, seconds = (1, 3.0) if quick else (3, 10.0)
    rows: list[Row] = []
    for rate in (100.0, 300.0):
        beside = [await _round(rate, seconds, number) for number in range(rounds)]
        name = f"{rate:g} requests/s"
        rows += [
            Row(what=f"{what}, {name}", unit=RATIO, rounds=tuple(each[key] for each in beside), beside=tuple(details))
            for what, key, details in (
                ("CPU of the gateway", "gateway", [_only(each, "cores") for each in beside]),
                ("CPU of Redis", "redis", ()),
                ("share of hits", "hits", [_only(each, "hits,") for each in beside]),
                ("p50 of all answers", "p50", [_only(each, "p50") for each in beside]),
                ("p99 of all answers", "p99", [_only(each, "p99") for each in beside]),
            )
        ]
    return Figure(figure="fleet_model", title="The simulated fleet beside a real one", method=_METHOD, rows=tuple(rows))


def _only(round_: dict[str, float], word: str) -> dict[str, float]:
    return {name: value for name, value in round_.items() if " " in name and word in name}


async def _round(rate: float, seconds: float, number: int) -> dict[str, float]:
    """One measurement with servers of its own: what was measured, in what was simulated."""
    async with upstream(service_time=_SERVICE_TIME) as origin, valkey_server() as node:
        url = f"redis://127.0.0.1:{node.port}/0"
        async with gateway_with_everything(origin.url, on=cores().subject, redis=url) as subject:
            # Other questions than the arrivals': what they leave in the cache is of no use to these.
            hot, others = range(10**9, 10**9 + 1), range(2 * 10**9, 3 * 10**9)
            await _send(subject, node, [Request(0.0, hot[0], 60, 1, ()), *_arrivals(rate, 1.0, number, others)])
            misses = await _send(subject, node, _arrivals(rate, seconds / 2, number + 1, others))
            hits = await _send(subject, node, _arrivals(rate, seconds / 2, number, hot))
            arrivals = _arrivals(rate, seconds, number, range(_QUESTIONS))
            real = await _send(subject, node, arrivals)
    if misses.hits > 0.01 or hits.hits < 0.98:
        raise CannotMeasure(f"Of misses {misses.hits:.1%} were hits, of hits {hits.hits:.1%}.")
    simulated = _simulated(arrivals, _figures(hits, misses))
    computed = utilisations(simulated.rate, Workload.of(simulated, 0.0), _figures(hits, misses), _ONE)
    hits_foretold = 1 - simulated.layers["miss"] - simulated.layers["flight"]
    p50, p99 = percentiles([answer.seconds for answer in real.answers])
    cores_used, node_used = real.gateway_cpu / real.seconds, real.node_cpu / real.seconds
    return {
        "gateway": cores_used / simulated.loads["gateway"].mean,
        "redis": node_used / simulated.loads["redis"].mean,
        "hits": real.hits / hits_foretold,
        "p50": p50 / simulated.total[0],
        "p99": p99 / simulated.total[1],
        "cores, measured": cores_used,
        "cores, simulated": simulated.loads["gateway"].mean,
        "cores, computed": computed["gateway"],
        "hits, measured": real.hits,
        "hits, simulated": hits_foretold,
        "p50 ms, measured": p50 * 1e3,
        "p50 ms, simulated": simulated.total[0] * 1e3,
        "p99 ms, measured": p99 * 1e3,
        "p99 ms, simulated": simulated.total[1] * 1e3,
    }


def _figures(hits: _Run, misses: _Run) -> Figures:
    """What was measured with hits alone and with misses alone."""
    miss, node_miss = (spent / len(misses.answers) for spent in (misses.gateway_cpu, misses.node_cpu))
    return replace(
        Figures(),
        gateway_hit=hits.gateway_cpu / len(hits.answers),
        gateway_miss=miss,
        # A lookup in Redis that finds nothing is a part of a miss: with one worker, no answer is in Redis alone.
        gateway_redis_hit=min(miss, Figures().gateway_redis_hit),
        redis_memory_hit=hits.node_cpu / len(hits.answers),
        redis_hit=node_miss / 4,
        redis_miss=node_miss,
        prefill_speed=1e12,
        token=_SERVICE_TIME,
        slots=1e6,
    )


def _simulated(arrivals: Sequence[Request], figures: Figures) -> Result:
    return simulate(arrivals, 512, _ONE, figures, LeastConnections, lambda: LruCache(1), _WHOLE)


def _arrivals(rate: float, seconds: float, seed: int, questions: range) -> list[Request]:
    chance = random.Random(seed)  # noqa: S311  # arrivals that can be repeated
    arrivals: list[Request] = []
    moment = 0.0
    while (moment := moment + chance.expovariate(rate)) < seconds:
        arrivals.append(Request(moment, chance.choice(questions), 60, 1, ()))
    return arrivals


async def _send(subject: Server, node: Server, arrivals: Sequence[Request]) -> _Run:
    """Each at its moment, on a connection that is free then."""
    before, after = distinct_parts()
    free: asyncio.LifoQueue[Client] = asyncio.LifoQueue()
    answers: list[Answer] = []

    async def ask(request: Request, due: float) -> None:
        client = await free.get()
        answer = await client.post(before + b"%0*d" % (NUMBER_DIGITS, request.identity) + after)
        free.put_nowait(client)
        if answer.status != 200:
            raise CannotMeasure(f"The gateway answered with status {answer.status}: {answer.body[:200]!r}")
        # From when it was due: what waits for a connection has waited.
        answers.append(replace(answer, sent=due))

    clients = [Client(subject) for _ in range(_CONNECTIONS)]
    try:
        for client in clients:
            await client.__aenter__()
            free.put_nowait(client)
        spent, node_spent = subject.cpu_seconds(), node.cpu_seconds()
        begun = time.monotonic()
        async with asyncio.timeout(arrivals[-1].time + 60.0), asyncio.TaskGroup() as tasks:
            for request in arrivals:
                due = begun + request.time
                await asyncio.sleep(due - time.monotonic())
                tasks.create_task(ask(request, due))
        seconds = time.monotonic() - begun
        return _Run(answers, seconds, subject.cpu_seconds() - spent, node.cpu_seconds() - node_spent)
    finally:
        for client in clients:
            await client.__aexit__(None, None, None)


def _is_hit(answer: Answer) -> bool:
    return answer.headers.get("x-keepgate-cache") == "hit"
