"""Resident memory of the gateway: at rest, and after a million distinct requests."""

import asyncio

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, Server, cores, gateway, upstream
from benchmarks.harness.request_bodies import distinct_parts
from benchmarks.harness.wrk import DistinctRequests, load

_CONNECTIONS = 32
_CACHE = "64MiB"
_CACHE_BYTES = 64 * 2**20
_AT_REST_SECONDS = 2.0
_STEP_SECONDS = 10
# What may come on top of rest and cache: connections, buffers, metrics, and what the allocator does not give back.
_BESIDE_CACHE = 64 * 2**20
_METHOD = """\
VmRSS of the gateway's process, one worker, embedded Valkey, `cache.memory` set to 64 MiB. At rest is two seconds after
the start, before any request. Then 32 connections send chats of which no two are alike; every answer (700 B) is stored
in memory and in Valkey. The cache is full after a few tens of thousands, from there on memory must stand still: the
growth is that between half of the requests and all of them. The bound is memory at rest plus the cache plus 64 MiB."""


async def measure(quick: bool) -> Figure:
    total = 20_000 if quick else 1_000_000
    async with upstream() as origin, gateway(origin.url, on=cores().subject, cache_memory=_CACHE) as subject:
        await asyncio.sleep(_AT_REST_SECONDS)
        at_rest = subject.resident_bytes()
        requests = DistinctRequests(distinct_parts())
        sent, half, half_bytes = 0, 0, 0
        curve: dict[str, float] = {}
        while sent < total:
            sent += await _some(subject, requests, 1 if quick else _STEP_SECONDS)
            now = subject.resident_bytes()
            curve[f"MB after {sent:,}"] = now / 1e6
            if not half and sent >= total / 2:
                half, half_bytes = sent, now
    bound = (at_rest + _CACHE_BYTES + _BESIDE_CACHE) / 1e6
    rows = (
        Row(what="at rest", unit="MB", rounds=(at_rest / 1e6,), target=Target("most", 120.0)),
        Row(
            what=f"after {sent:,} distinct requests, cache of {_CACHE}",
            unit="MB",
            rounds=(now / 1e6,),
            target=Target("most", round(bound, 1)),
            beside=(curve,),
        ),
        Row(what=f"growth from {half:,} to {sent:,} requests", unit="MB", rounds=((now - half_bytes) / 1e6,)),
    )
    return Figure(figure="memory", title="Memory of the gateway", method=_METHOD, rows=rows)


async def _some(subject: Server, requests: DistinctRequests, seconds: int) -> int:
    script = requests.script(at_most=seconds * 50_000, pause=0.0)
    run = await load(subject, script, connections=_CONNECTIONS, seconds=seconds)
    if run.requests > seconds * 50_000:
        raise CannotMeasure("The requests were not distinct: more were sent than numbers had been set aside.")
    return run.requests
