"""A gateway with everything on that a team's operator has: virtual keys, limits, costs, and traces of 1 %."""

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.harness.client import Client
from benchmarks.harness.processes import CannotMeasure, Server, gateway

ADMIN_KEY = "for the benchmark"
EVERYTHING = """\
Everything is on: every request has a virtual key (`keys.required`) of a team, both with limits of requests, tokens,
concurrent requests and money by day and month, far away; costs are computed from a price of the model and added to the
ledger; 1 % of the requests are traced, to a file."""
_SETTINGS = {
    "admin_key": ADMIN_KEY,
    "keys_required": "true",
    "costs_prices": msgspec.json.encode({"bench": {"input": 2.0, "output": 8.0}}).decode(),
    "traces_exporter": "file",
    "traces_share": "0.01",
}
_LIMITS = {
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**12,
    "concurrent_requests": 10**6,
    "budget_per_day": 1e6,
    "budget_per_month": 1e6,
}


@asynccontextmanager
async def gateway_with_everything(
    *upstreams: str,
    on: frozenset[int],
    workers: int = 1,
    redis: str = "embedded",
    program: Sequence[str] = ("-m", "gateway"),
    **settings: str,
) -> AsyncIterator[Server]:
    """As `gateway`; the server has the key for its requests."""
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as folder:
        traces = str(Path(folder, "traces.jsonl"))
        everything = {**_SETTINGS, "traces_file": traces, **settings}
        async with gateway(*upstreams, on=on, workers=workers, redis=redis, program=program, **everything) as started:
            operator = replace(started, key=ADMIN_KEY)
            await _call(operator, "PUT", "/v1/teams/team", {"limits": _LIMITS})
            made = await _call(operator, "POST", "/v1/keys", {"name": "app", "team": "team", "limits": _LIMITS})
            yield replace(started, key=made["secret"])


async def _call(operator: Server, method: str, path: str, fields: Mapping[str, object]) -> dict[str, str]:
    async with Client(operator) as client:
        answer = await client.post(msgspec.json.encode(fields), path, method)
    if answer.status not in (200, 201):
        raise CannotMeasure(f"{method} {path} was answered with status {answer.status}: {answer.body[:500]!r}")
    decoded: dict[str, str] = msgspec.json.decode(answer.body)
    return decoded
