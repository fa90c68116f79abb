"""Exact hits per second, against a bare aiohttp + uvloop handler that returns the same bytes; of two workers."""

import asyncio
import tempfile
from pathlib import Path

from benchmarks.harness import request_bodies as bodies
from benchmarks.harness.client import post
from benchmarks.harness.everything import EVERYTHING, gateway_with_everything
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, Server, bare_server, cores, gateway, limited, upstream
from benchmarks.harness.wrk import Run, load, same_request

_CONNECTIONS = 32
_WITHOUT_FIGURES = """
from cache.index.redis_index import RedisIndex
from gateway.commands.cli import main
from gateway.telemetry.recent_requests import RecentRequests
from gateway.telemetry.statistics import Statistics

class NoRecentRequests(RecentRequests):
    def __init__(self, redis):
        super().__init__(redis)
        self.note = lambda record: None

import gateway.processes.app
gateway.processes.app.RecentRequests = NoRecentRequests
Statistics.count = RedisIndex.hit = lambda *_: None
main()
"""
_SHARE = 0.25
_TARGET = Target("least", 0.8, aim=1.0)
_METHOD = f"""\
One worker on one core, wrk with one thread and 32 kept-alive connections on the other. The reference is a
`web.Application` of aiohttp on uvloop whose handler reads the body and returns the bytes of the gateway's own answer;
rounds alternate between the two. In one row a header changes with every request, as tracing headers do. {EVERYTHING}
That is so in the last three rows alone. In one of them, rounds alternate with a gateway in which the statistics, the
counts of the index and the list of last requests are switched off, and the ratio is that of hits in a second of CPU
time. Two workers and the load do not fit on two cores: in the last row each worker may use a quarter of a core, in a
control group of its own, and rounds alternate between one worker and two."""


async def measure(quick: bool) -> Figure:
    rounds, seconds = (2, 1) if quick else (5, 3)
    kinds = (
        ("chat, 300 B", bodies.chat(), False),
        ("chat with 37 tools, 26 KB", bodies.chat_with_tools(), False),
        ("streamed chat, 300 B", bodies.chat(stream=True), False),
        ("chat, 300 B, one header varies", bodies.chat(), True),
    )
    async with upstream() as origin, gateway(origin.url, on=cores().subject) as subject:
        rows = [await _compare(subject, *kind, rounds, seconds) for kind in kinds]
    async with upstream() as origin, gateway_with_everything(origin.url, on=cores().subject) as subject:
        what = "chat, 300 B, everything on"
        rows.append(await _compare(subject, what, bodies.chat(), False, rounds, seconds, Target("least", 0.5)))
    rows.append(await _compare_figures(bodies.chat(), 6 * rounds))
    rows.append(await _compare_workers(bodies.chat(), rounds, seconds))
    return Figure(figure="exact_hits", title="Exact hits per second", method=_METHOD, rows=tuple(rows))


async def _compare_figures(body: bytes, rounds: int) -> Row:
    ratios: list[float] = []
    beside: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        body_file = Path(folder, "body")
        await asyncio.to_thread(body_file.write_bytes, body)
        async with (
            upstream() as origin,
            gateway_with_everything(origin.url, on=cores().subject) as counting,
            gateway_with_everything(origin.url, on=cores().subject, program=("-c", _WITHOUT_FIGURES)) as silent,
        ):
            servers = {"on": counting, "off": silent}
            for server in servers.values():
                await load(server, same_request(body_file, key=server.key), connections=_CONNECTIONS, seconds=1)
            for number in range(rounds):
                runs: dict[str, Run] = {}
                for name in ("on", "off") if number % 2 else ("off", "on"):
                    script = same_request(body_file, key=servers[name].key)
                    runs[name] = await load(servers[name], script, connections=_CONNECTIONS, seconds=1)
                ratios.append(runs["off"].cpu_per_request / runs["on"].cpu_per_request)
                beside.append({f"{name}, CPU µs per hit": run.cpu_per_request * 1e6 for name, run in runs.items()})
    what = "statistics by model and key on against off, everything else on"
    return Row(what=what, unit=RATIO, rounds=tuple(ratios), target=Target("least", 0.97), beside=tuple(beside))


async def _compare_workers(body: bytes, rounds: int, seconds: int) -> Row:
    ratios: list[float] = []
    beside: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        body_file = Path(folder, "body")
        await asyncio.to_thread(body_file.write_bytes, body)
        async with (
            upstream() as origin,
            gateway_with_everything(origin.url, on=cores().subject) as one,
            gateway_with_everything(origin.url, on=cores().subject, workers=2) as two,
        ):
            for server in (one, two):
                await load(server, same_request(body_file, key=server.key), connections=_CONNECTIONS, seconds=1)
            with limited((one.pid, two.pid, *two.workers), _SHARE):
                for _ in range(rounds):
                    alone, both = [
                        await load(
                            server,
                            same_request(body_file, key=server.key),
                            connections=_CONNECTIONS,
                            seconds=seconds,
                        )
                        for server in (one, two)
                    ]
                    ratios.append(both.per_second / alone.per_second)
                    beside.append({"one, hits per second": alone.per_second, "two, hits per second": both.per_second})
    what = "two workers against one, everything on, a quarter of a core each"
    return Row(what=what, unit=RATIO, rounds=tuple(ratios), target=Target("least", 1.8), beside=tuple(beside))


async def _compare(
    subject: Server,
    what: str,
    body: bytes,
    varies: bool,
    rounds: int,
    seconds: int,
    target: Target = _TARGET,
) -> Row:
    await post(subject, body)  # computes the answer, unless it is known
    answer = await post(subject, body)
    if answer.headers.get("x-keepgate-cache") != "hit":
        raise CannotMeasure(f"{what}: asked for again, it is no hit: {answer.headers}")
    ratios: list[float] = []
    beside: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        body_file, answer_file = Path(folder, "body"), Path(folder, "answer")
        await asyncio.to_thread(body_file.write_bytes, body)
        await asyncio.to_thread(answer_file.write_bytes, answer.body)
        script = same_request(body_file, varies, subject.key)
        async with bare_server(answer_file, answer.headers["content-type"]) as reference:
            for _ in range(rounds):
                bare = await load(reference, script, connections=_CONNECTIONS, seconds=seconds)
                hits = await load(subject, script, connections=_CONNECTIONS, seconds=seconds)
                ratios.append(hits.per_second / bare.per_second)
                beside.append(_in_numbers(bare, hits))
    return Row(what=what, unit=RATIO, rounds=tuple(ratios), target=target, beside=tuple(beside))


def _in_numbers(bare: Run, hits: Run) -> dict[str, float]:
    return {
        "hits per second": hits.per_second,
        "reference per second": bare.per_second,
        "CPU µs per hit": hits.cpu_per_request * 1e6,
        "CPU µs, reference": bare.cpu_per_request * 1e6,
        "p50 ms": hits.p50 * 1e3,
        "p99 ms": hits.p99 * 1e3,
    }
