"""`keepgate serve --replicas N`: several backends side by side, with prompts going where their beginning is known."""

import asyncio
import os
import re
import signal
from itertools import count
from pathlib import Path
from typing import Any

from tests.gateway.client import CHAT
from tests.gateway.processes.serving import DEADLINE, Serving, processes, serving
from tests.waiting import until

MODEL = "SmolLM2-135M-Instruct"
OPTIONS = ("--replicas=2", "--kv-memory=64MiB", "--prefix-disk-size=0", "--redis=none")
BACKENDS = ["in-repo backend 1", "in-repo backend 2"]


def conversation(topic: str, turn: int) -> dict[str, Any]:
    """A chat with a long beginning of its own and a short end of each turn."""
    beginning = f"We talk about {topic}. " * 40
    messages = [{"role": "user", "content": f"{beginning} Turn {turn}."}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 2}


async def say(gateway: Serving, topic: str, turn: int) -> None:
    """A turn of a conversation, which must be answered."""
    answer = await gateway.send("POST", CHAT, conversation(topic, turn))
    assert answer.status == 200, answer.body


async def sent_to(gateway: Serving) -> dict[str, float]:
    """How many tokens of prompts each backend has got."""
    exposition = (await gateway.send("GET", "/metrics")).body.decode()
    found = re.findall(
        r'^keepgate_upstream_prompt_tokens_total\{.*upstream="(in-repo[^"]*)".*\} (\S+)$', exposition, re.M
    )
    counts: dict[str, float] = {}
    for name, tokens in found:
        counts[name] = counts.get(name, 0.0) + float(tokens)
    return counts


async def upstream_of(gateway: Serving, topic: str, turn: int) -> str:
    """Which backend answers a turn of a conversation, while nothing else is asked."""
    before = await sent_to(gateway)
    await say(gateway, topic, turn)
    after = await sent_to(gateway)
    (name,) = (name for name, tokens in after.items() if tokens > before.get(name, 0.0))
    return name


def backends(gateway: Serving) -> list[int]:
    """The processes of the backends that run."""
    return [pid for pid, command in gateway.children().items() if "-m backend" in command]


async def until_all_are_ready(gateway: Serving) -> None:
    for number in (1, 2):
        await gateway.until_said(f"(replica {number} of 2)")


async def all_workers_know(gateway: Serving) -> bool:
    """Whether each of some new connections, which reach either worker, finds a backend."""
    return all([(await gateway.send("GET", "/ready")).status == 200 for _ in range(12)])


async def test_a_conversation_stays_with_one_replica(tmp_path: Path) -> None:
    """Conversations are divided among the replicas, and each turn goes to the one that has the turns before."""
    async with serving(tmp_path, *OPTIONS) as gateway:
        await until_all_are_ready(gateway)
        topics = ["otters", "bridges", "clouds", "violins"]
        first = [await upstream_of(gateway, topic, 0) for topic in topics]
        assert sorted(set(first)) == BACKENDS
        for turn in (1, 2):
            assert [await upstream_of(gateway, topic, turn) for topic in topics] == first
        children = gateway.children()
        assert await gateway.signal(signal.SIGTERM) == 0
        assert not processes().keys() & children.keys()


async def test_a_replica_that_dies_is_restarted_and_costs_no_request(tmp_path: Path) -> None:
    """While one replica is killed, all requests are answered; it is started again, in every worker."""
    async with serving(tmp_path, *OPTIONS, "--workers=2") as gateway:
        await until_all_are_ready(gateway)
        await until(lambda: all_workers_know(gateway), DEADLINE)
        running = backends(gateway)
        assert len(running) == 2
        killed = asyncio.Event()

        answered = 0

        async def client(number: int) -> None:
            nonlocal answered
            turn, turns_after = 0, 0
            while turns_after < 4:
                await say(gateway, f"topic {number}", turn)
                turn, answered = turn + 1, answered + 1
                turns_after += killed.is_set()

        clients = [asyncio.create_task(client(number)) for number in range(4)]
        await until(lambda: answered >= 4 or any(task.done() for task in clients), DEADLINE)
        os.kill(running[0], signal.SIGKILL)
        killed.set()
        await asyncio.gather(*clients)
        await gateway.until_said("of the backend was killed by signal 9; starting it again in 1 s")
        await gateway.until_said("(replica", times=3)
        assert len(backends(gateway)) == 2

        before, topics = await sent_to(gateway), count()

        async def both_answer() -> bool:
            await say(gateway, f"new topic {next(topics)}", 0)
            after = await sent_to(gateway)
            return all(after.get(name, 0) > before.get(name, 0) for name in BACKENDS)

        await until(both_answer, DEADLINE)


async def test_replicas_do_not_share_a_name(tmp_path: Path) -> None:
    """What names a single backend is refused for several."""
    async with serving(tmp_path, *OPTIONS, ready=False, KEEPGATE_BACKEND_PREFIX_NAME="gpu-1") as gateway:
        assert await gateway.ended() == 1
        assert gateway.lines[-1] == (
            "keepgate: backend.prefix_name: is that of one backend, and backend.replicas is 2; omit it"
        )
        assert gateway.children() == {}


async def test_a_wrong_number_of_replicas_starts_nothing(tmp_path: Path) -> None:
    """It is named in one line, with what would be right."""
    async with serving(tmp_path, "--replicas", "0", ready=False) as gateway:
        assert await gateway.ended() == 2
        assert gateway.lines == ["keepgate: command line: --replicas: expected a whole number from 1 to 64, got '0'"]
