"""Waits from outside until blocks have been kept, which happens after the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio

from tests.backend.prefixes.engine_process import EngineProcess, fresh
from tests.backend.prefixes.models import BLOCK
from tests.cache.entries.entry_examples import until

_CLAIM_BYTES = 11
_WITHIN = 20.0
"""Seconds; far more than keeping takes, and less than a test may."""
_TOKENS = 300
_MET_WITHIN = 30.0


async def claimed(url: str, holders: int = 1) -> int:
    """Blocks of which the index knows so many holders, or tiers that hold it."""
    async with redis.asyncio.Redis.from_url(url) as client:
        names = [name async for name in client.scan_iter(b"keepgate:kv:*", count=1000)]
        async with client.pipeline(transaction=False) as lengths:
            for name in names:
                lengths.strlen(name)
            return sum(length >= holders * _CLAIM_BYTES for length in await lengths.execute())


@asynccontextmanager
async def claiming(url: str, blocks: int, holders: int = 1) -> AsyncIterator[None]:
    """Leaves when the index knows so many holders of so many more blocks than at the beginning."""
    before = await claimed(url, holders)
    yield

    async def known() -> bool:
        return await claimed(url, holders) >= before + blocks

    await until(known, _WITHIN, 0.02)


async def until_met(url: str, holder: EngineProcess, asking: EngineProcess) -> None:
    """Returns when `asking` is served what `holder` computes: engines learn of each other some heartbeats after their
    start, and leave each other alone for a while after a failure.
    """

    async def served() -> bool:
        prompt = fresh(_TOKENS)  # a new one each time, so that it is fetched or computed
        async with claiming(url, _TOKENS // BLOCK):
            await holder.ask(prompt)
        return (await asking.ask(prompt)).restored == _TOKENS // BLOCK * BLOCK

    await until(served, _MET_WITHIN, 0.1)


async def until_idle(engine: EngineProcess) -> None:
    """Returns when the engine has no sequence and holds no block."""

    async def is_idle() -> bool:
        held = [await engine.counted(name) for name in ("running_sequences", "waiting_sequences", "kv_blocks_held")]
        return not any(held)

    await until(is_idle, _WITHIN, 0.02)


def frames(disk: Path) -> list[Path]:
    """The files of all blocks in a folder, the oldest first."""
    files = [(file.stat().st_mtime_ns, file) for file in (disk / "blocks").glob("*/*") if file.is_file()]
    return [file for _, file in sorted(files)]


@asynccontextmanager
async def writing(disk: Path, blocks: int) -> AsyncIterator[list[Path]]:
    """Leaves when the folder has so many more blocks than at the beginning; what it gave has their files then."""
    before = set(frames(disk))
    new: list[Path] = []
    yield new

    async def written() -> bool:
        return len(set(frames(disk)) - before) >= blocks

    await until(written, _WITHIN, 0.02)
    new += [file for file in frames(disk) if file not in before]
