"""Redis may hang, die and forget: every answer is right and in time, and sharing resumes by itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis.asyncio

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import claimed, claiming, until_met
from tests.backend.prefixes.models import BLOCK
from tests.cache.entries.entry_examples import until
from tests.cache.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 300
BLOCKS = TOKENS // BLOCK
SOON = 30.0
"""Seconds until a Redis that is back is used again: a few heartbeats, on a busy machine."""


@dataclass
class Pair:
    """Two engines with nothing but Redis and a secret in common."""

    index: Valkey
    near: EngineProcess
    far: EngineProcess

    async def is_right(self, plain: EngineProcess, prompt: list[int]) -> None:
        """Both engines answer an extended prompt and a new one as an engine without a store does."""
        for asked in (prompt + fresh(20), fresh(TOKENS)):
            expected = await plain.ask(asked)
            for answer in await asyncio.gather(self.near.ask(asked), self.far.ask(asked)):
                assert answer.choices == expected.choices


@pytest.fixture(scope="module")
def pair(launch: Start, index: Valkey, secret: Path) -> Pair:
    options = ("--prefix-memory", "64MiB", "--prefix-index", index.url, "--prefix-secret-file", str(secret))
    engines = [launch(*options), launch(*options)]
    start_all(engines)
    return Pair(index, *engines)


async def kept(pair: Pair) -> list[int]:
    """A prompt that the near engine has and of which the index knows."""
    prompt = fresh(TOKENS)
    async with claiming(pair.index.url, BLOCKS):
        await pair.near.ask(prompt)
    return prompt


async def test_a_frozen_redis_delays_no_answer(pair: Pair, plain: EngineProcess) -> None:
    """Answers are right and within the deadline while Redis hangs, and Redis is used again when it resumes."""
    prompt = await kept(pair)
    pair.index.freeze()
    try:
        await pair.is_right(plain, prompt)
    finally:
        pair.index.thaw()
    await until_met(pair.index.url, pair.near, pair.far)


async def test_a_flushed_redis_is_filled_again(pair: Pair, plain: EngineProcess) -> None:
    """After a flush of Redis answers are right, and engines claim the blocks that they still have again."""
    prompt = await kept(pair)
    before = await claimed(pair.index.url)
    async with redis.asyncio.Redis.from_url(pair.index.url) as client:
        await client.flushall()
    await pair.is_right(plain, fresh(TOKENS))

    async def known_again() -> bool:
        return await claimed(pair.index.url) >= before

    await until(known_again, SOON, 0.1)
    await until_met(pair.index.url, pair.near, pair.far)
    assert (await pair.far.ask(prompt)).restored == BLOCKS * BLOCK


async def test_a_redis_that_restarts_empty_is_used_again(pair: Pair, plain: EngineProcess) -> None:
    """Answers are right while Redis is gone, and an empty Redis that starts again is used."""
    prompt = await kept(pair)
    await pair.index.kill()
    await pair.is_right(plain, prompt)
    await pair.index.start()
    await until_met(pair.index.url, pair.near, pair.far)


async def test_an_engine_starts_without_its_redis(
    pair: Pair, plain: EngineProcess, start: Start, secret: Path, index: Valkey
) -> None:
    """An engine starts without its Redis, uses its own blocks, and shares blocks once Redis is there."""
    await pair.index.kill()
    options = ("--prefix-memory", "64MiB", "--prefix-index", index.url, "--prefix-secret-file", str(secret))
    alone = start(*options)
    prompt = fresh(TOKENS)
    assert (await alone.ask(prompt)).choices == (await plain.ask(prompt)).choices
    assert (await alone.ask(prompt)).restored == BLOCKS * BLOCK
    await pair.index.start()
    await until_met(index.url, alone, pair.far)
