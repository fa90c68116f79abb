"""Limits of a key over the worker processes of one and of several gateways, as clients meet them."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.tenants.usage import SLOT_SECONDS
from gateway.upstreams.mock import Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import CHAT, chat
from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import DEADLINE, Serving, serving
from tests.waiting import until, until_steady

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


async def new_key(gateway: Serving, name: str, **limits: int) -> dict[str, Any]:
    key: dict[str, Any] = (await gateway.send("POST", "/v1/keys", {"name": name, "limits": limits})).json
    return key


async def processes_that_asked(raw: Any, key: dict[str, Any]) -> set[bytes]:
    """The processes whose requests with this key Redis has admitted."""
    window = await raw.hgetall(f"keepgate:{{limits:{key['id']}}}:key:{key['id']}:window")
    return {name.removeprefix(b"turn:").partition(b".")[0] for name in window if name.startswith(b"turn:")}


async def until_all_answer(gateways: Sequence[Serving], raw: Any, processes: int) -> None:
    """Return when so many processes have answered; workers start behind the first."""
    key = await new_key(gateways[0], "warm-up", requests_per_minute=1_000)

    async def all_answer() -> bool:
        for gateway in gateways:
            await gateway.send("POST", CHAT, chat("warm up"), Authorization=f"Bearer {key['secret']}")
        return len(await processes_that_asked(raw, key)) == processes

    await until(all_answer, DEADLINE)


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

        await until_all_answer(running, raw, gateways * workers)
        key = await new_key(running[0], "alice", requests_per_minute=LIMIT)

        seen = await ask_all(running, key["secret"])
        print(f"{gateways} x {workers} workers: {dict(seen.statuses)} in {seen.seconds:.1f} s")

        assert seen.seconds < MINUTE, "the machine was too slow: the first requests left the window"
        assert seen.statuses == {200: LIMIT, 429: REQUESTS - LIMIT}
        assert all(MINUTE - seen.seconds - 1 <= wait <= MINUTE + 1 for wait in seen.waits)
        assert len(await processes_that_asked(raw, key)) == gateways * workers


AT_ONCE = 12
# Expired reservations are noticed with the next request, which the test sends after a pause.
PAUSE = 0.5
LEASE = SLOT_SECONDS + 3.0


async def test_what_a_killed_worker_held_comes_back(stage: Stage, valkey: Valkey, raw: Any, tmp_path: Path) -> None:
    """Places and money of requests that died with their worker are free within the lease; those of others are not."""
    mock = await stage.mock(Reply(when="held", delay=DEADLINE))
    (tmp_path / "keepgate.yaml").write_text("costs: {prices: {mock: {input: 0, output: 1000000}}}")  # a dollar a token
    words = ("--config", str(tmp_path / "keepgate.yaml"), "--upstream", mock.url, "--redis", valkey.url)
    async with serving(tmp_path, *words, "--workers", "2", KEEPGATE_KEYS_REQUIRED="true") as gateway:
        await until_all_answer([gateway], raw, 2)
        keys = {
            "slots": await new_key(gateway, "slots", concurrent_requests=AT_ONCE),
            "reserved": await new_key(gateway, "reserved", budget_per_day=AT_ONCE),
        }

        async def ask(kind: str, content: str) -> int:
            """The status of a request that costs a dollar; 0 if it died."""
            secret = keys[kind]["secret"]
            try:
                answer = await gateway.send("POST", CHAT, chat(content, max_tokens=1), Authorization=f"Bearer {secret}")
            except aiohttp.ClientError:
                return 0
            return answer.status

        async def held(kind: str) -> int:
            """How many requests Redis counts as running."""
            key_id = keys[kind]["id"]
            return int(await raw.zcard(f"keepgate:{{limits:{key_id}}}:key:{key_id}:{kind}"))

        arrived = len(mock.received)
        asked = {kind: [asyncio.create_task(ask(kind, f"held {n}")) for n in range(AT_ONCE)] for kind in keys}
        await mock.wait_for(arrived + len(keys) * AT_ONCE, DEADLINE)
        for kind in keys:
            assert (await ask(kind, "hello"), await held(kind)) == (429, AT_ONCE)

        os.kill(gateway.child("gateway.processes.worker"), signal.SIGKILL)
        killed = time.monotonic()
        await until_steady(lambda: sum(task.done() for tasks in asked.values() for task in tasks))
        for kind, tasks in asked.items():
            alive = sum(not task.done() for task in tasks)
            assert 0 < alive < AT_ONCE
            while await ask(kind, "hello") != 200:
                assert time.monotonic() < killed + LEASE
                await asyncio.sleep(PAUSE)
            print(f"{kind}: {AT_ONCE - alive} of {AT_ONCE} came back after {time.monotonic() - killed:.1f} s")

            async def only_others_are_held() -> bool:
                return await held(kind) == alive  # noqa: B023  # it is called in this iteration alone

            await until(only_others_are_held)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
