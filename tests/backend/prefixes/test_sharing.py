"""Engines serve each other's prefixes and those of their former lives, and no answer differs for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import claiming, frames, until_met, writing
from tests.backend.prefixes.models import BLOCK
from tests.cache.entries.entry_examples import until
from tests.cache.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 500
WHOLE = TOKENS // BLOCK * BLOCK


@dataclass
class World:
    """Two engines with nothing but Redis and a secret in common, and two that share a folder and no Redis."""

    index: str
    near: EngineProcess
    far: EngineProcess
    disk: Path
    writer: EngineProcess
    reader: EngineProcess


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(launch: Start, index: Valkey, secret: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    disk = tmp_path_factory.mktemp("disk") / "kv"
    shares = ("--prefix-secret-file", str(secret))
    peer = ("--prefix-memory", "64MiB", "--prefix-index", index.url, *shares)
    local = ("--prefix-disk", str(disk), *shares)
    engines = [launch(*options) for options in (peer, peer, local, local)]
    start_all(engines)
    near, far, writer, reader = engines
    await until_met(index.url, near, far)
    return World(index.url, near, far, disk, writer, reader)


async def test_a_peers_blocks_are_fetched_through_redis(world: World, plain: EngineProcess) -> None:
    """An engine fetches a peer's whole blocks, found through Redis, and gives the same logprobs to the bit."""
    prompt = fresh(TOKENS)
    expected = await plain.ask(prompt)
    async with claiming(world.index, TOKENS // BLOCK):
        computed = await world.near.ask(prompt)
    fetched = await world.far.ask(prompt)
    assert (expected.restored, computed.restored, fetched.restored) == (0, 0, WHOLE)
    assert expected.choices == computed.choices == fetched.choices
    assert await world.far.counted("prefix_restored_tokens_total", tier="peers") >= WHOLE


async def test_fetched_blocks_serve_a_third_engine(
    world: World, plain: EngineProcess, start: Start, index: Valkey, secret: Path
) -> None:
    """An engine serves the blocks that it fetched to a third one after their first holder has stopped."""
    prompt = fresh(TOKENS)
    first = start("--prefix-memory", "64MiB", "--prefix-index", index.url, "--prefix-secret-file", str(secret))
    await until_met(world.index, first, world.near)
    async with claiming(world.index, TOKENS // BLOCK):
        await first.ask(prompt)
    async with claiming(world.index, TOKENS // BLOCK, holders=2):
        assert (await world.near.ask(prompt + fresh(40))).restored == WHOLE
    first.stop()
    other = prompt + fresh(40)
    fetched = await world.far.ask(other)
    assert fetched.restored == WHOLE
    assert fetched.choices == (await plain.ask(other)).choices


async def test_two_engines_share_a_folder(world: World, plain: EngineProcess) -> None:
    """Two engines share the blocks of one folder without Redis."""
    prompt = fresh(TOKENS)
    async with writing(world.disk, TOKENS // BLOCK):
        computed = await world.writer.ask(prompt)
    read = await world.reader.ask(prompt)
    assert (computed.restored, read.restored) == (0, WHOLE)
    assert read.choices == computed.choices == (await plain.ask(prompt)).choices
    assert await world.reader.counted("prefix_restored_tokens_total", tier="disk") >= WHOLE


async def test_a_killed_engine_restores_the_blocks_that_it_had_written(world: World, plain: EngineProcess) -> None:
    """An engine killed during writes restores the blocks that were written, and its answers are right."""
    prompts = [fresh(TOKENS) for _ in range(4)]
    before = set(frames(world.disk))
    async with writing(world.disk, TOKENS // BLOCK):
        for prompt in prompts[:-1]:
            await world.writer.ask(prompt)
        async with world.writer.post(prompts[-1], stream=True, max_tokens=200, ignore_eos=True) as response:
            await response.content.readline()
            world.writer.kill()
    kept = len(set(frames(world.disk)) - before)
    world.writer.restart()
    answers = [await world.writer.ask(prompt) for prompt in prompts]
    restored = [answer.restored for answer in answers]
    assert restored[0] == WHOLE
    assert sum(restored) <= kept * BLOCK
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.choices == (await plain.ask(prompt)).choices


async def test_memory_serves_what_the_engine_had_to_evict(start: Start, plain: EngineProcess) -> None:
    """Blocks that the engine's pool had to evict are restored from host memory, bit for bit."""
    engine = start("--kv-memory", "1MiB", "--prefix-memory", "64MiB")
    prompts = [fresh(TOKENS) for _ in range(6)]
    for number, prompt in enumerate(prompts, start=1):
        await engine.ask(prompt)

        async def is_kept(blocks: int = number * (TOKENS // BLOCK)) -> bool:
            return await engine.counted("prefix_blocks", tier="memory") >= blocks

        await until(is_kept, 20.0, 0.02)
    for prompt in prompts[:3]:
        answer = await engine.ask(prompt)
        assert answer.restored == WHOLE
        assert answer.choices == (await plain.ask(prompt)).choices
    assert await engine.counted("prefix_restored_tokens_total", tier="memory") == 3 * WHOLE
