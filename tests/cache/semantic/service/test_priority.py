"""Background work yields to lookups."""

import asyncio

from cache.semantic.service.priority import LookupPriority


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
