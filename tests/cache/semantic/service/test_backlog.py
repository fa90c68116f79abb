"""Work that waits is bounded, and can be waited for however much of it was dropped."""

import asyncio

from cache.semantic.service.backlog import Backlog


async def test_the_newest_are_worked_on_and_their_end_can_be_waited_for() -> None:
    """What had to go is not waited for."""
    backlog, done = Backlog[int](3), list[int]()

    async def do(item: int) -> None:
        done.append(item)

    assert [backlog.add(number) for number in range(5)] == [True, True, True, False, False]
    assert len(backlog) == 3
    working = asyncio.create_task(backlog.work(do))
    async with asyncio.timeout(5):
        await backlog.idle()
    working.cancel()

    assert done == [2, 3, 4]
    assert len(backlog) == 0


async def test_what_is_being_worked_on_counts_and_is_never_dropped() -> None:
    """Two at once, and one that waits."""
    backlog, begun, goes_on = Backlog[int](1), asyncio.Semaphore(0), asyncio.Event()

    async def do(item: int) -> None:
        begun.release()
        await goes_on.wait()

    working = [asyncio.create_task(backlog.work(do)) for _ in range(2)]
    for number in range(2):
        assert backlog.add(number)
        await begun.acquire()
    assert backlog.add(2)
    assert len(backlog) == 3
    assert not backlog.add(3)
    assert len(backlog) == 3
    goes_on.set()
    async with asyncio.timeout(5):
        await backlog.idle()
    for task in working:
        task.cancel()
