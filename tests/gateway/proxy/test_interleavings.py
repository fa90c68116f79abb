"""Random interleavings: each client gets its own answer, and no task or flight stays."""

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.waiting import until

# One client: question, tenant, shape, start, and after how long it disconnects (never: None).
visits = st.fixed_dictionaries(
    {
        "question": st.integers(0, 2),
        "tenant": st.sampled_from(["ann", "bob"]),
        "shape": st.sampled_from(["json", "stream", "usage"]),
        "start": st.integers(0, 6),
        "leaves": st.none() | st.integers(0, 25),
    }
)

SHAPES: dict[str, dict[str, Any]] = {
    "json": {},
    "stream": {"stream": True},
    "usage": {"stream": True, "stream_options": {"include_usage": True}},
}


class World:
    """A gateway, its upstream, and a number that makes each example's questions distinct."""

    def __init__(self, client: Client, mock: MockUpstream) -> None:
        self.client = client
        self.mock = mock
        self.example = 0


@pytest.fixture
async def world(stage: Stage) -> World:
    mock = await stage.mock(Reply(delay=0.001, pause=0.0005))
    world = World(await stage.gateway(mock), mock)
    # Connections and other permanent tasks exist from the start.
    await asyncio.gather(*(world.client.post(chat(f"warm {number}", stream=bool(number % 2))) for number in range(12)))
    return world


async def visit(world: World, plan: dict[str, Any]) -> None:
    for _ in range(plan["start"] * 5):
        await asyncio.sleep(0)
    question = f"question {world.example} {plan['question']} of the ones that are asked"
    client = world.client.tenant(plan["tenant"])
    asking = asyncio.create_task(client.post(chat(question, user=plan["tenant"], **SHAPES[plan["shape"]])))
    if plan["leaves"] is not None:
        for _ in range(plan["leaves"] * 4):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        if asking.cancelled():
            return
    answer = await asking
    assert (answer.status, answer.text) == (200, question)
    assert answer.headers["Content-Type"].startswith("application/json" if plan["shape"] == "json" else "text/event-")
    if plan["shape"] == "usage":
        assert answer.chunks[-1]["usage"]["total_tokens"] > 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans=st.lists(visits, min_size=1, max_size=14))
async def test_every_client_gets_its_own_answer_and_nothing_is_left(
    world: World, plans: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Each client of a random interleaving gets its own answer, and no flight, task or error stays."""
    world.example += 1
    world.mock.received.clear()
    cancelled_before = world.mock.cancelled
    await asyncio.gather(*(visit(world, plan) for plan in plans))
    await world.client.until("flights", 0)

    asked = Counter((plan["tenant"], plan["question"]) for plan in plans)
    calls = Counter(received.headers["Authorization"] for received in world.mock.received)
    assert set(calls) <= {f"Bearer {tenant}" for tenant, _ in asked}
    for received in world.mock.received:
        assert received.headers["Authorization"] == f"Bearer {received.fields['user']}"
    # A second call only if usage is missing in the first answer, or if an abandoned call was started again.
    with_usage = {(plan["tenant"], plan["question"]) for plan in plans if plan["shape"] == "usage"}
    given_up = sum(plan["leaves"] is not None for plan in plans)
    assert len(world.mock.received) <= len(asked) + len(with_usage) + given_up
    assert world.mock.cancelled - cancelled_before <= given_up
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_thousand_visits_leave_no_task(stage: Stage) -> None:
    """No task stays after a thousand clients, half of which disconnect before their answer."""
    mock = await stage.mock(Reply(delay=0.001))
    client = await stage.gateway(mock)
    await asyncio.gather(*(client.post(chat(f"warm {number}")) for number in range(25)))
    await client.until("flights", 0)
    before = len(asyncio.all_tasks())
    for burst in range(40):
        asking = [
            asyncio.create_task(client.post(chat(f"{burst} {number % 7}", stream=bool(number % 2))))
            for number in range(25)
        ]
        for number, task in enumerate(asking):
            if number % 2:
                await asyncio.sleep(0)
                task.cancel()
        for answer in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(answer, BaseException):
                assert isinstance(answer, asyncio.CancelledError)
            else:
                assert answer.status == 200
    await client.until("flights", 0)

    # A connection has a task; those of disconnected clients end a moment later.
    await until(lambda: len(asyncio.all_tasks()) <= before + 30)
