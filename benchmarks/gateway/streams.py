"""Two thousand streams at once through one worker: whether each arrives as it was sent, and what one costs."""

import asyncio

import msgspec

from benchmarks.harness.client import Client
from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, Server, bare_relay, cores, gateway, stream_load
from benchmarks.harness.stream_load import StreamReport, StreamRun

_RATE = 20.0
_WARM_UP = 64
_SAMPLE_SECONDS = 0.1
_METHOD = """\
2,000 clients at once read a stream each through one worker; the upstream sends 20 events a second on every one, of
about 230 B, each with the number of its stream and its own in the text. Every byte is compared with what was sent.
Where a process cannot keep up, several events arrive in one write: that is counted, and no fault. Memory is the growth
of the process's resident set from before the streams, after a warm-up with 64 of them, to its maximum, divided by
streams. Every answer is recorded and stored in memory: that is included. The reference is an aiohttp handler that
copies bytes from its client to its response. The load and the upstream are one process, which has a core of its own."""


async def measure(quick: bool) -> Figure:
    streams, events, rounds = (200, 40, 1) if quick else (2_000, 300, 3)
    ours: list[_Outcome] = []
    bare: list[_Outcome] = []
    for number in range(rounds):
        async with stream_load() as origin:
            async with bare_relay(origin.url) as reference:
                bare.append(await _measure(origin, reference, streams, events, f"round {number}, reference"))
            async with gateway(origin.url, on=cores().subject, redis="none") as subject:
                ours.append(await _measure(origin, subject, streams, events, f"round {number}"))
    what = f"{streams:,} streams of {events} events, {_RATE:.0f} a second each"
    rows = (
        Row(
            what=f"{what}: streams with a fault",
            unit="",
            rounds=tuple(float(len(outcome.report.faults)) for outcome in ours),
            target=Target("most", 0.0),
            summary="maximum",
            beside=tuple(outcome.in_numbers() for outcome in ours),
        ),
        Row(
            what="memory of a stream",
            unit="KB",
            rounds=tuple(outcome.memory / streams / 1e3 for outcome in ours),
            target=Target("most", 60.0),
        ),
        Row(
            what="memory of a stream, in the handler that only copies",
            unit="KB",
            rounds=tuple(outcome.memory / streams / 1e3 for outcome in bare),
            beside=tuple(outcome.in_numbers() for outcome in bare),
        ),
        Row(what="delay of an event, p50", unit="ms", rounds=tuple(o.report.delay_p50 * 1e3 for o in ours)),
        Row(what="delay of an event, p99", unit="ms", rounds=tuple(o.report.delay_p99 * 1e3 for o in ours)),
        Row(
            what="delay of an event, p99, in the handler that only copies",
            unit="ms",
            rounds=tuple(o.report.delay_p99 * 1e3 for o in bare),
        ),
    )
    return Figure(figure="streams", title="Many streams at once", method=_METHOD, rows=rows)


class _Outcome(msgspec.Struct, frozen=True):
    report: StreamReport
    memory: int
    cpu: float

    def in_numbers(self) -> dict[str, float]:
        return {
            "CPU µs per event": self.cpu / max(1, self.report.events) * 1e6,
            "share of a core": self.cpu / self.report.seconds,
            "events per write": self.report.events / max(1, self.report.writes),
            "seconds": self.report.seconds,
        }


async def _measure(origin: Server, subject: Server, streams: int, events: int, occasion: str) -> _Outcome:
    await _perform(origin, StreamRun(subject.port, _WARM_UP, 20, _RATE, f"{occasion}, warm-up"))
    before, cpu = subject.resident_bytes(), subject.cpu_seconds()
    running = asyncio.create_task(_perform(origin, StreamRun(subject.port, streams, events, _RATE, occasion)))
    most = before
    while not running.done():
        await asyncio.wait([running], timeout=_SAMPLE_SECONDS)
        most = max(most, subject.resident_bytes())
    return _Outcome(await running, most - before, subject.cpu_seconds() - cpu)


async def _perform(origin: Server, run: StreamRun) -> StreamReport:
    async with Client(origin) as client:
        answer = await client.post(msgspec.json.encode(run), "/run")
    if answer.status != 200:
        raise CannotMeasure(f"The load ended with status {answer.status}.")
    return msgspec.json.decode(answer.body, type=StreamReport)
