"""Work that nobody waits for gives way to those who ask."""

import asyncio

from cache.semantic.service.precedence import Precedence


async def test_it_gives_way_until_nobody_asks() -> None:
    """However many ask at the same time; and not at all where nobody does."""
    precedence = Precedence()
    await precedence.give_way()
    with precedence.asking():
        with precedence.asking():
            waiting = asyncio.create_task(precedence.give_way())
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_it_gives_way_for_a_while_only() -> None:
    """Where somebody always asks, something is learned all the same."""
    precedence = Precedence()
    with precedence.asking():
        async with asyncio.timeout(10):
            await precedence.give_way()
