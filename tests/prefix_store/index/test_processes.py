"""Processes that hold and read blocks and are killed: the index is correct in the end."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from random import Random

from benchmarks.prefix.claims import claims_by_owner
from prefix_store.index.index import open_index
from tests.cache.valkey import Valkey
from tests.prefix_store.index.blocks import PATIENT, new_namespace
from tests.prefix_store.index.engine import chains

_ENGINES = 4
_KILLS = 4


@contextlib.asynccontextmanager
async def engine(valkey: Valkey, namespace: bytes, number: int, seed: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.prefix_store.index.engine"),
        *(valkey.url, namespace.hex(), f"engine-{number}", str(seed)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_working(process: asyncio.subprocess.Process) -> None:
    """Returns when an engine has made some operations."""
    assert process.stdout is not None
    assert await process.stdout.readline() == b"working\n"


async def held_by(process: asyncio.subprocess.Process) -> set[bytes]:
    """Stops an engine; returns the blocks that it holds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    return {bytes.fromhex(key) for key in json.loads(await process.stdout.readline())}


async def test_what_killed_engines_said_is_believed_of_nobody(valkey: Valkey) -> None:
    """After kills and restarts under the same names the index has exactly the blocks that are held."""
    namespace = new_namespace()
    chance = Random(7)  # noqa: S311 (a test's)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(90):
        index = await stack.enter_async_context(open_index(valkey.url, namespace, deadline=PATIENT, heartbeat=0.1))
        engines = [await stack.enter_async_context(engine(valkey, namespace, n, n)) for n in range(_ENGINES)]
        for seed in range(_KILLS):
            number = chance.randrange(_ENGINES)
            await until_working(engines[number])
            engines[number].kill()
            await engines[number].wait()
            engines[number] = await stack.enter_async_context(engine(valkey, namespace, number, 100 + seed))
        for process in engines:
            await until_working(process)
        truth = dict(
            zip((f"engine-{n}" for n in range(_ENGINES)), await asyncio.gather(*map(held_by, engines)), strict=True)
        )
        assert sum(map(len, truth.values())) > 0

        await index.next_heartbeat()
        said = await claims_by_owner(valkey.url, index)
        assert said == {name: keys for name, keys in truth.items() if keys}
        for keys in chains(namespace):
            expected = 0
            while expected < len(keys) and any(keys[expected] in held for held in truth.values()):
                expected += 1
            match = await index.match(keys)
            assert match.blocks == expected
            place = 0
            for run in match.runs:
                for key in keys[place : place + run.blocks]:
                    assert {holder.owner.name for holder in run.holders} == {n for n in truth if key in truth[n]}
                place += run.blocks
