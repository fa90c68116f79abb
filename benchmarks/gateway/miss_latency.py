"""What a miss costs on top of the upstream: every request distinct, Redis on, 32 connections."""

from benchmarks.harness.everything import EVERYTHING, gateway_with_everything
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import Server, bare_relay, cores, upstream
from benchmarks.harness.request_bodies import distinct_parts
from benchmarks.harness.wrk import DistinctRequests, Run, load

_CONNECTIONS = 32
_METHOD = f"""\
wrk holds 32 connections and sends chats of 300 B of which no two are alike; the upstream answers each after a fixed
service time, and each connection then pauses for a random time of up to twice as long. Without the pauses 32 answers
would arrive at the same moment for ever, and the figure would be the time to work through such a heap. The same load
goes straight to the upstream and through the gateway by turns; a row is the difference between the two latencies.
Every answer is stored in memory and in the embedded Valkey. The service time sets the rate; the gateway has one core;
the load, the upstream and Valkey share the other. Beside it, in the same rounds, what a handler adds that copies bytes
from an aiohttp client to an aiohttp server and does nothing else: a target in milliseconds is one for Zen 4 cores.
{EVERYTHING}"""


async def measure(quick: bool) -> Figure:
    rounds, seconds = (2, 1) if quick else (5, 4)
    rows: list[Row] = []
    for service_time, is_target in ((0.05, True), (0.2, False), (0.02, False)):
        async with (
            upstream(service_time=service_time) as origin,
            gateway_with_everything(origin.url, on=cores().subject) as subject,
            bare_relay(origin.url) as reference,
        ):
            rows += await _compare(origin, subject, reference, service_time, is_target, rounds, seconds)
    return Figure(figure="miss_latency", title="Added latency on a miss", method=_METHOD, rows=tuple(rows))


async def _compare(
    origin: Server,
    subject: Server,
    reference: Server,
    service_time: float,
    is_target: bool,
    rounds: int,
    seconds: int,
) -> list[Row]:
    requests = DistinctRequests(distinct_parts())
    pause = 2 * service_time

    async def run(server: Server, lasting: int) -> Run:
        script = requests.script(seconds * 20_000, pause, subject)
        return await load(server, script, connections=_CONNECTIONS, seconds=lasting)

    # Connections to the upstream are opened once, and the code is warm.
    for server in (subject, reference):
        await run(server, 1)
    pairs: list[tuple[Run, Run]] = []
    copied: list[Run] = []
    for _ in range(rounds):
        direct, through, copy = [await run(server, seconds) for server in (origin, subject, reference)]
        pairs.append((direct, through))
        copied.append(copy)
    beside = tuple(_in_numbers(direct, through) for direct, through in pairs)
    name = f"upstream of {service_time * 1e3:g} ms, about {_CONNECTIONS / (service_time + pause / 2):.0f} requests/s"
    targets = (
        (Target("most", 1.0), Target("most", 5.0), Target("most", 1.5), Target("most", 2.0), Target("most", 0.8))
        if is_target
        else (None,) * 5
    )
    p50 = tuple((through.p50 - direct.p50) * 1e3 for direct, through in pairs)
    p99 = tuple((through.p99 - direct.p99) * 1e3 for direct, through in pairs)
    copying = tuple((copy.p50 - direct.p50) * 1e3 for copy, (direct, _) in zip(copied, pairs, strict=True))
    ratios = tuple(ours / its for ours, its in zip(p50, copying, strict=True))
    more = tuple((through.p99 - copy.p99) * 1e3 for copy, (_, through) in zip(copied, pairs, strict=True))
    cpu = tuple(through.cpu_per_request * 1e3 for _, through in pairs)
    return [
        Row(what=f"p50, {name}", unit="ms", rounds=p50, target=targets[0], beside=beside),
        Row(what=f"p99, {name}", unit="ms", rounds=p99, target=targets[1]),
        Row(what=f"p50 of the handler that only copies, {name}", unit="ms", rounds=copying),
        Row(what=f"p50, against that handler, {name}", unit=RATIO, rounds=ratios, target=targets[2]),
        Row(what=f"p99, more than that handler, {name}", unit="ms", rounds=more, target=targets[3]),
        Row(what=f"CPU time of a miss, {name}", unit="ms", rounds=cpu, target=targets[4]),
    ]


def _in_numbers(direct: Run, through: Run) -> dict[str, float]:
    return {
        "requests per second": through.per_second,
        "p50 ms": through.p50 * 1e3,
        "p50 ms, direct": direct.p50 * 1e3,
        "p99 ms": through.p99 * 1e3,
        "p99 ms, direct": direct.p99 * 1e3,
        "CPU µs per miss": through.cpu_per_request * 1e6,
        "share of a core": through.cpu_share,
    }
