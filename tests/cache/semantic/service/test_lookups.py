"""Background work yields to lookups."""

import asyncio

from cache.semantic.service.lookups import RunningLookups


async def test_background_work_waits_for_all_lookups() -> None:
    """Background work waits until no lookup is under way."""
    lookups = RunningLookups()
    await lookups.yield_to_lookups()
    with lookups.running("a"):
        with lookups.running("a"):
            waiting = asyncio.create_task(lookups.yield_to_lookups())
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_background_work_waits_for_a_limited_time() -> None:
    """Background work goes on after a while although a lookup is still under way."""
    lookups = RunningLookups()
    with lookups.running("a"):
        async with asyncio.timeout(10):
            await lookups.yield_to_lookups()


def test_a_client_leaves_a_lookup_that_runs() -> None:
    """Until the last one of its key has ended; of others nobody has left."""
    lookups = RunningLookups()
    lookups.leave("a")
    with lookups.running("a"):
        assert not lookups.has_left("a")
        with lookups.running("a"):
            lookups.leave("a")
        assert lookups.has_left("a")
        assert not lookups.has_left("b")
    assert not lookups.has_left("a")
