"""`keepgate serve --workers N`: several processes behind one port that look like one gateway."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.conftest import Stage
from tests.gateway.processes.serving import DEADLINE, Serving, serving, until_gone
from tests.waiting import until

# So many requests, each on its own connection, reach both of two workers, except once in 2 ** 23 runs.
MANY = 24


@pytest.fixture
async def mock(stage: Stage) -> MockUpstream:
    return await stage.mock()


@pytest.fixture
async def pair(mock: MockUpstream, tmp_path: Path) -> AsyncIterator[Serving]:
    """Two workers behind one port, both of which answer."""
    async with serving(tmp_path, "--upstream", mock.url, "--workers", "2") as gateway:
        await until_both_keep(gateway, "warm up")
        yield gateway


async def ask_many(gateway: Serving, content: str) -> list[str]:
    """The cache results of many requests, one after the other."""
    return [(await gateway.ask(content)).text for _ in range(MANY)]


async def figure(gateway: Serving, *path: str) -> Any:
    found: Any = (await gateway.stats())["layers"]["exact"]
    for name in path:
        found = found[name]
    return found


async def until_both_keep(gateway: Serving, content: str) -> None:
    """Sends requests until both workers have this answer in memory: each keeps what it has read from the store."""
    before = await figure(gateway, "tiers", "memory", "entries")

    async def both_keep() -> bool:
        await gateway.ask(content)
        return bool(await figure(gateway, "tiers", "memory", "entries") >= before + 2)

    await until(both_keep, DEADLINE, every=0)


def worker_of(gateway: Serving) -> int:
    return gateway.child("gateway.processes.worker")


async def test_both_workers_answer_from_one_store(pair: Serving, mock: MockUpstream) -> None:
    """An answer of one worker is a hit in the other, which reads it from the store once."""
    await until_all_counted(pair)
    before = await figure(pair, "tiers", "redis", "hits")
    await until_both_keep(pair, "hello")
    assert len([r for r in mock.received if b"hello" in r.body]) == 1
    await until_all_counted(pair)
    assert await figure(pair, "tiers", "redis", "hits") == before + 1


async def until_all_counted(gateway: Serving) -> None:
    """Return when both workers count every request; a worker publishes its counts within about a second."""
    agreed = 0
    async with asyncio.timeout(DEADLINE):
        while agreed < MANY:  # any worker may answer
            agreed = agreed + 1 if (await gateway.stats())["requests"] == gateway.asked else 0
            await asyncio.sleep(0 if agreed else 0.05)


async def test_stats_add_up_whichever_worker_answers(pair: Serving) -> None:
    """Every worker reports the same figures, in which each request is counted once."""
    await until_all_counted(pair)
    before = await figure(pair)
    # The second worker may miss as well: an answer is written to the store after the response.
    seen = Counter([(await pair.ask("count me")).cache for _ in range(MANY)])
    assert seen.keys() == {"miss", "hit"}
    await until_all_counted(pair)
    for _ in range(MANY):
        after = await figure(pair)
        assert after["misses"] - before["misses"] == seen["miss"]
        assert after["hits"] - before["hits"] == seen["hit"]
    metrics = (await pair.send("GET", "/metrics")).body.decode()
    counted = [float(line.rpartition(" ")[2]) for line in metrics.splitlines() if "keepgate_requests_total{" in line]
    assert sum(counted) == pair.asked


async def test_a_purge_in_one_worker_reaches_the_other(pair: Serving, mock: MockUpstream) -> None:
    """A purge of one entry or of all in one worker takes effect in the other."""
    await until_both_keep(pair, "hello")
    await until_both_keep(pair, "stay")
    entry = (await pair.ask("hello")).entry
    mock.replies.append(Reply(text="new"))
    assert (await pair.send("DELETE", f"/v1/cache/entries/{entry}")).status == 200
    await until_all_say(pair, "hello", "new")
    assert set(await ask_many(pair, "stay")) == {"stay"}
    assert (await pair.send("DELETE", "/v1/cache")).status == 200
    await until_all_say(pair, "stay", "new")


async def until_all_say(gateway: Serving, content: str, text: str) -> None:
    """Waits until the purge has reached both workers, and both have the new answer."""

    async def all_say() -> bool:
        return set(await ask_many(gateway, content)) == {text}

    await until(all_say, DEADLINE, every=0)


async def test_a_killed_worker_is_replaced(pair: Serving) -> None:
    """A killed worker is replaced, its counters stay, and its entries are counted no more."""
    await until_both_keep(pair, "hello")
    await until_all_counted(pair)
    kept = await figure(pair, "tiers", "memory", "entries")
    dead = worker_of(pair)
    os.kill(dead, signal.SIGKILL)
    await pair.until_said("a worker ended with status -9; starting another")
    assert (await pair.ask("hello")).text == "hello"
    assert await figure(pair, "tiers", "memory", "entries") == kept // 2
    await until_all_counted(pair)
    await until(lambda: any("gateway.processes.worker" in command for command in pair.children().values()), DEADLINE)
    assert worker_of(pair) != dead
    await until_both_keep(pair, "again")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_workers_end_with_their_parent(pair: Serving, number: signal.Signals, tmp_path: Path) -> None:
    """The workers end with their parent for any signal, and the next start removes leftovers."""
    children = pair.children()
    assert len(children) == 2
    counters = set((tmp_path / "run").iterdir())
    await pair.signal(number)
    assert pair.status == (0 if number == signal.SIGTERM else -9)
    await until_gone(*children)
    assert (tmp_path / "run").exists() == (number == signal.SIGKILL)
    port = pair.url.rpartition(":")[2]
    async with serving(tmp_path, "--upstream", "mock:", "--port", port, "--workers", "2") as gateway:
        assert (await gateway.ask("warm up")).cache == "hit"
        assert not counters & set((tmp_path / "run").iterdir())
