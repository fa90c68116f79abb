"""Limits of a key over the worker processes of one and of several gateways, as clients meet them."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cache.valkey import Valkey
from tests.gateway.client import CHAT, chat
from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import DEADLINE, Serving, serving
from tests.waiting import until

LIMIT = 100
REQUESTS = 1_000
# Each with requests of its own: the kernel deals them out to the workers.
CONNECTIONS = 50
# No 60 seconds have more than the limit, wherever they begin; requests of a shorter time share one window.
MINUTE = 60.0


@dataclass
class Seen:
    """What clients were answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=list)
    """Retry-After of the refusals, in seconds."""
    seconds: float = 0.0


async def ask_all(gateways: Sequence[Serving], secret: str) -> Seen:
    """Sends all requests over many connections, spread over the gateways. Each has an answer before any asks again."""
    seen = Seen()
    all_answered = asyncio.Barrier(CONNECTIONS)

    async def ask_on_one_connection(number: int) -> None:
        url = gateways[number % len(gateways)].url + CHAT
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            for request in range(REQUESTS // CONNECTIONS):
                # Every other one was asked before, on this connection: hits count as misses do.
                body = chat(f"{number}.{request // 2}")
                async with session.post(url, json=body, headers={"Authorization": f"Bearer {secret}"}) as answer:
                    await answer.read()
                    seen.statuses[answer.status] += 1
                    if answer.status == 429:
                        seen.waits.append(int(answer.headers["Retry-After"]))
                if request == 0:
                    await all_answered.wait()

    began = time.monotonic()
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for number in range(CONNECTIONS):
            tasks.create_task(ask_on_one_connection(number))
    seen.seconds = time.monotonic() - began
    return seen


@pytest.mark.parametrize(("gateways", "workers"), [(1, 4), (2, 2)])
async def test_a_limit_is_exact_over_all_workers(
    stage: Stage, valkey: Valkey, raw: Any, tmp_path: Path, gateways: int, workers: int
) -> None:
    """Of 1,000 requests to four processes, as many are answered in a minute as the limit says; others hear when."""
    mock = await stage.mock()
    words = ("--upstream", mock.url, "--workers", str(workers), "--redis", valkey.url)
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(serving(tmp_path / str(number), *words, KEEPGATE_KEYS_REQUIRED="true"))
            for number in range(gateways)
        ]

        async def all_work() -> bool:
            return bool(await raw.zcard("keepgate:workers") == gateways * workers)

        await until(all_work, DEADLINE, every=0.05)
        limits = {"requests_per_minute": LIMIT}
        made = await running[0].send("POST", "/v1/keys", {"name": "alice", "limits": limits})
        key = made.json

        seen = await ask_all(running, key["secret"])
        print(f"{gateways} x {workers} workers: {dict(seen.statuses)} in {seen.seconds:.1f} s")

        assert seen.seconds < MINUTE, "the machine was too slow: the first requests left the window"
        assert seen.statuses == {200: LIMIT, 429: REQUESTS - LIMIT}
        assert all(MINUTE - seen.seconds - 1 <= wait <= MINUTE + 1 for wait in seen.waits)
        window = await raw.hgetall(f"keepgate:{{limits:{key['id']}}}:key:{key['id']}:window")
        asked = {name.split(b":")[1].split(b".")[0] for name in window if name.startswith(b"turn:")}
        assert len(asked) == gateways * workers, "a process was sent none of the requests"
