"""Valkey stopped with SIGSTOP under load: who notices, and for how long."""

import asyncio
import os
import signal
import statistics
import time
from dataclasses import dataclass

from benchmarks.harness.client import Answer, Client
from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, Server, cores, gateway, upstream
from benchmarks.harness.request_bodies import NUMBER_DIGITS, chat, distinct_parts

_CLIENTS = 16
_SERVICE_TIME = 0.01
_DEADLINE = 0.02  # cache.redis_deadline, as shipped
_NOTICED = 0.6 * _DEADLINE  # a request that took this much longer than usual has waited for the store
_RECOVERY_DEADLINE = 30.0
_METHOD = """\
Sixteen clients ask without a pause, every second request a miss (upstream of 10 ms), every second one a hit. The
embedded Valkey is stopped with SIGSTOP and later continued with SIGCONT; answers say themselves whether the store was
there (`Cache-Status: … detail=store-unavailable`). "Usual" is the median before the freeze, of misses and of hits
each. The first row counts answers other than a whole 200. A request has paid a deadline when it took 12 ms longer than
usual and the store did not answer it; the requests in flight at that moment may all have, those after it must not.
Recovery is the time from SIGCONT to the first miss that asked the store again."""


@dataclass(frozen=True, slots=True)
class _Phases:
    """Monotonic times of the freeze, the thaw and the first miss after it that asked the store, and all answers."""

    frozen: float
    thawed: float
    recovered: float
    answers: list[Answer]
    failures: int

    def usual(self) -> dict[str, float]:
        """Median seconds before the freeze, of misses and of hits."""
        before = [answer for answer in self.answers if answer.ended < self.frozen]
        return {kind: statistics.median(a.seconds for a in before if _kind(a) == kind) for kind in ("miss", "hit")}


async def measure(quick: bool) -> Figure:
    rounds, seconds = (1, 1.0) if quick else (5, 4.0)
    async with (
        upstream(service_time=_SERVICE_TIME) as origin,
        gateway(origin.url, on=cores().subject) as subject,
    ):
        store = _store_of(subject)
        beside = [_in_numbers(await _freeze(subject, store, number, seconds)) for number in range(rounds)]
    table = (
        ("failed requests", "requests", "failed", Target("most", 0.0)),
        ("requests that paid a deadline, of 16 in flight", "requests", "paid", Target("most", float(_CLIENTS))),
        ("span within which they began", "ms", "span ms", Target("most", _DEADLINE * 1e3)),
        ("slowest extra latency of a request that paid", "ms", "slowest extra ms", Target("most", 30.0)),
        ("slowest extra latency after that, still frozen, p99", "ms", "extra afterwards p99 ms", None),
        ("recovery after SIGCONT", "ms", "recovery ms", None),
    )
    rows = tuple(
        Row(
            what=what,
            unit=unit,
            rounds=tuple(float(entry[key]) for entry in beside),
            target=target,
            summary="maximum",
            beside=tuple(beside) if number == 0 else (),
        )
        for number, (what, unit, key, target) in enumerate(table)
    )
    return Figure(figure="frozen_redis", title="Redis stopped with SIGSTOP under load", method=_METHOD, rows=rows)


def _store_of(subject: Server) -> int:
    children = subject.children()
    if len(children) != 1:
        raise CannotMeasure(f"The gateway has {len(children)} children where its store alone was expected.")
    return children[0]


async def _freeze(subject: Server, store: int, number: int, seconds: float) -> _Phases:
    stop = asyncio.Event()
    clients = [asyncio.create_task(_client(subject, (number + 1) * 10**8 + n * 10**6, stop)) for n in range(_CLIENTS)]
    await asyncio.sleep(seconds)
    frozen = time.monotonic()
    os.kill(store, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        thawed = time.monotonic()
        os.kill(store, signal.SIGCONT)
    recovered = await _recovered(subject, (number + 1) * 10**8 + _CLIENTS * 10**6)
    stop.set()
    answers: list[Answer] = []
    failures = 0
    for outcome in await asyncio.gather(*clients):
        answers += outcome[0]
        failures += outcome[1]
    return _Phases(frozen, thawed, recovered, answers, failures)


async def _client(subject: Server, first: int, stop: asyncio.Event) -> tuple[list[Answer], int]:
    """Answers, and how many requests failed."""
    hot = chat("the same question every time")
    answers: list[Answer] = []
    failures = 0
    async with Client(subject) as client:
        while not stop.is_set():
            for body in (_distinct(first + len(answers)), hot):
                answer = await client.post(body)
                answers.append(answer)
                failures += answer.status != 200 or not answer.body.endswith(b"}")
    return answers, failures


async def _recovered(subject: Server, first: int) -> float:
    """When the first miss began that asked the store again."""
    async with asyncio.timeout(_RECOVERY_DEADLINE), Client(subject) as client:
        while True:
            answer = await client.post(_distinct(first))
            if _kind(answer) == "miss" and not _went_without_store(answer):
                return answer.sent
            first += 1


def _distinct(number: int) -> bytes:
    before, after = distinct_parts()
    return before + f"{number:0{NUMBER_DIGITS}d}".encode() + after


def _kind(answer: Answer) -> str:
    return answer.headers.get("x-keepgate-cache", "")


def _went_without_store(answer: Answer) -> bool:
    return "store-unavailable" in answer.headers.get("cache-status", "")


def _in_numbers(phases: _Phases) -> dict[str, float]:
    during = [a for a in phases.answers if a.ended > phases.frozen and a.sent < phases.thawed]
    refused = [a for a in during if _went_without_store(a)]
    usual = phases.usual()
    paid = [a for a in refused if a.seconds - usual["miss"] > _NOTICED and a.sent < phases.frozen + 2 * _DEADLINE]
    last = max((a.sent for a in paid), default=phases.frozen)
    afterwards = sorted(a.seconds - usual[_kind(a)] for a in during if a.sent > last + 1e-9)
    if not refused or len(afterwards) < 2:
        raise CannotMeasure("The freeze did not reach the gateway.")
    return {
        "failed": float(phases.failures),
        "requests": float(len(phases.answers)),
        "requests while frozen": float(len(during)),
        "usual miss ms": usual["miss"] * 1e3,
        "paid": float(len(paid)),
        "span ms": (last - min((a.sent for a in paid), default=last)) * 1e3,
        "slowest extra ms": max((a.seconds - usual["miss"] for a in paid), default=0.0) * 1e3,
        "extra afterwards p99 ms": statistics.quantiles(afterwards, n=100)[-1] * 1e3,
        "slowest afterwards ms": afterwards[-1] * 1e3,
        "recovery ms": (phases.recovered - phases.thawed) * 1e3,
    }
