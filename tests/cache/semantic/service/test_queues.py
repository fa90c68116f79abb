"""Background work yields to lookups, and its queue is bounded."""

import asyncio

from cache.semantic.service.queues import LookupPriority, WorkQueue


async def test_it_gives_way_until_nobody_asks() -> None:
    """However many ask at the same time; and not at all where nobody does."""
    priority = LookupPriority()
    await priority.yield_to_lookups()
    with priority.looking_up():
        with priority.looking_up():
            waiting = asyncio.create_task(priority.yield_to_lookups())
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_it_gives_way_for_a_while_only() -> None:
    """Where somebody always asks, something is learned all the same."""
    priority = LookupPriority()
    with priority.looking_up():
        async with asyncio.timeout(10):
            await priority.yield_to_lookups()


async def test_the_newest_are_worked_on_and_their_end_can_be_waited_for() -> None:
    """What had to go is not waited for."""
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


async def test_what_is_being_worked_on_counts_and_is_never_dropped() -> None:
    """Two at once, and one that waits."""
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
