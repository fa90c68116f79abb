"""The slots of an upstream, and the queue in front of them."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.slots import QueueFull, Slots

FOREVER = 1e9


async def turns(count: int = 5) -> None:
    """Let every task that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_without_a_limit_never_wait() -> None:
    """With no limit a slot is there at once."""
    slots = Slots(None, 0)
    for _ in range(1000):
        await slots.take(0, FOREVER)
    assert (slots.is_full, slots.waiting, slots.taken) == (False, 0, 1000)


async def test_the_queue_is_in_order_of_priority_then_of_arrival() -> None:
    """Lower priorities come first, and equal ones in the order in which they came."""
    slots = Slots(1, 10)
    await slots.take(0, FOREVER)
    served: list[str] = []

    async def request(name: str, priority: int) -> None:
        await slots.take(priority, FOREVER)
        served.append(name)
        slots.release()

    tasks = []
    for name, priority in [("a5", 5), ("b0", 0), ("c5", 5), ("d-1", -1), ("e0", 0)]:
        tasks.append(asyncio.create_task(request(name, priority)))
        await turns()
    slots.release()
    await asyncio.gather(*tasks)
    assert served == ["d-1", "b0", "e0", "a5", "c5"]
    assert (slots.taken, slots.waiting) == (0, 0)


async def test_a_full_queue_refuses_at_once() -> None:
    """With as many waiting as may wait, the next one is refused without a wait."""
    slots = Slots(1, 1)
    await slots.take(0, FOREVER)
    waiting = asyncio.create_task(slots.take(0, FOREVER))
    await turns()
    with pytest.raises(QueueFull):
        await slots.take(-5, FOREVER)
    slots.release()
    await waiting
    assert (slots.taken, slots.waiting) == (1, 0)


async def test_a_deadline_ends_the_wait() -> None:
    """At its deadline a request leaves the queue, and takes no slot later."""
    slots = Slots(1, 5)
    await slots.take(0, FOREVER)
    with pytest.raises(TimeoutError):
        await slots.take(0, asyncio.get_running_loop().time() + 0.01)
    slots.release()
    assert (slots.taken, slots.waiting) == (0, 0)


async def test_a_slot_given_in_the_turn_of_a_cancellation_is_passed_on() -> None:
    """Who is cancelled just when a slot is granted gives it to the next one in the queue."""
    slots = Slots(1, 5)
    await slots.take(0, FOREVER)
    first, second = (asyncio.create_task(slots.take(0, FOREVER)) for _ in range(2))
    await turns()
    slots.release()
    first.cancel()
    await asyncio.wait([first, second], timeout=5)
    assert first.cancelled()
    assert second.done()
    assert not second.cancelled()
    assert slots.taken == 1


STEPS = st.lists(st.tuples(st.sampled_from(["take", "release", "cancel", "turn"]), st.integers(0, 7)), max_size=60)


@given(steps=STEPS, limit=st.integers(1, 3), most=st.integers(0, 4))
def test_no_slot_is_lost_or_given_twice(steps: list[tuple[str, int]], limit: int, most: int) -> None:
    """However requests come, end and are cancelled: never more than the limit, and at the end all slots are free."""
    asyncio.run(_follow(steps, limit, most))


async def _follow(steps: list[tuple[str, int]], limit: int, most: int) -> None:
    slots = Slots(limit, most)
    holding: list[int] = []
    waiting: dict[int, tuple[int, asyncio.Task[None]]] = {}
    order: list[tuple[int, int]] = []  # priority and number of those in the queue

    async def request(number: int, priority: int) -> None:
        try:
            await slots.take(priority, FOREVER)
        except QueueFull:
            assert len(holding) == limit
            return
        finally:
            waiting.pop(number, None)
            if (priority, number) in order:
                order.remove((priority, number))
        assert not [other for other in order if other < (priority, number)], "another one is before it"
        holding.append(number)
        assert len(holding) <= limit

    for number, (step, value) in enumerate(steps):
        if step == "take":
            waiting[number] = (value % 3, asyncio.create_task(request(number, value % 3)))
            await turns(2)  # in the first it joins the queue; until the second those go on who had a slot before
            if number in waiting:
                order.append((value % 3, number))
        elif step == "release" and holding:
            holding.pop(value % len(holding))
            slots.release()
        elif step == "cancel" and waiting:
            number = list(waiting)[value % len(waiting)]
            waiting[number][1].cancel()
        else:
            await turns()
    await turns()
    for _, task in list(waiting.values()):
        task.cancel()
    await turns()
    assert (slots.waiting, slots.taken) == (0, len(holding))
    for _ in range(len(holding)):
        slots.release()
    assert slots.taken == 0
