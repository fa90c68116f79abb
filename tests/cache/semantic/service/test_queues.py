"""Background work yields to lookups, and its queue is bounded."""

import asyncio

from cache.semantic.service.queues import LookupPriority, WorkQueue


async def test_background_work_waits_for_all_lookups() -> None:
    """Background work waits until no lookup is under way."""
    priority = LookupPriority()
    await priority.yield_to_lookups()
    with priority.looking_up():
        with priority.looking_up():
            waiting = asyncio.create_task(priority.yield_to_lookups())
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_background_work_waits_for_a_limited_time() -> None:
    """Background work goes on after a while although a lookup is still under way."""
    priority = LookupPriority()
    with priority.looking_up():
        async with asyncio.timeout(10):
            await priority.yield_to_lookups()


async def test_a_full_queue_drops_its_oldest_items() -> None:
    """A full queue drops its oldest items, and `idle` waits for the others only."""
    queue, done = WorkQueue[int](3), list[int]()

    async def do(item: int) -> None:
        done.append(item)

    assert [queue.add(number) for number in range(5)] == [True, True, True, False, False]
    assert len(queue) == 3
    working = asyncio.create_task(queue.work(do))
    async with asyncio.timeout(5):
        await queue.idle()
    working.cancel()

    assert done == [2, 3, 4]
    assert len(queue) == 0


async def test_items_under_work_count_and_are_never_dropped() -> None:
    """Items under work count towards the length of the queue and are never dropped."""
    queue, begun, goes_on = WorkQueue[int](1), asyncio.Semaphore(0), asyncio.Event()

    async def do(item: int) -> None:
        begun.release()
        await goes_on.wait()

    working = [asyncio.create_task(queue.work(do)) for _ in range(2)]
    for number in range(2):
        assert queue.add(number)
        await begun.acquire()
    assert queue.add(2)
    assert len(queue) == 3
    assert not queue.add(3)
    assert len(queue) == 3
    goes_on.set()
    async with asyncio.timeout(5):
        await queue.idle()
    for task in working:
        task.cancel()
