"""Engines share blocks through a Mooncake store, and answer without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import DEADLINE, EngineProcess, fresh
from tests.backend.prefixes.models import BLOCK
from tests.cache.entries.entry_examples import until
from tests.prefix_store.mooncake_master import MooncakeMaster

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 500
WHOLE = TOKENS // BLOCK * BLOCK


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    master = MooncakeMaster(tmp_path_factory.mktemp("mooncake"))
    master.start()
    yield master
    master.stop()


async def computed(engine: EngineProcess, prompt: list[int]) -> None:
    """Has a prompt computed, and waits until the store has its blocks."""
    before = await engine.counted("prefix_writes_total", tier="mooncake")
    assert (await engine.ask(prompt)).restored == 0

    async def is_kept() -> bool:
        return await engine.counted("prefix_writes_total", tier="mooncake") - before >= len(prompt) // BLOCK

    await until(is_kept)


async def connected(engine: EngineProcess) -> None:
    """Returns when the engine has connected to the store, which shows in its writes alone."""

    async def keeps() -> bool:
        await engine.ask(fresh(2 * BLOCK))
        return await engine.counted("prefix_writes_total", tier="mooncake") > 0

    await until(keeps)


async def test_two_engines_share_blocks_through_mooncake(
    start: Start, plain: EngineProcess, store: MooncakeMaster, secret: Path
) -> None:
    """An engine restores another's blocks from Mooncake bit for bit, and computes while the store is frozen or gone."""
    shares = ("--prefix-secret-file", str(secret))
    near, far = (start("--prefix-mooncake", str(store.settings()), *shares) for _ in range(2))
    await connected(near)
    await connected(far)
    prompt = fresh(TOKENS)
    expected = await plain.ask(prompt)
    await computed(near, prompt)
    fetched = await far.ask(prompt)
    assert fetched.restored == WHOLE
    assert fetched.choices == expected.choices
    tier = (await far.described())["tiers"]["mooncake"]
    assert (tier["blocks"], tier["bytes"], tier["capacity_bytes"]) == (None, None, None)
    assert tier["tokens_saved"] == WHOLE
    others = fresh(TOKENS)
    expected = await plain.ask(others)
    await computed(near, others)
    store.freeze()
    frozen = await far.ask(others)
    assert (frozen.restored, frozen.choices) == (0, expected.choices)
    assert frozen.seconds < DEADLINE
    store.thaw()
    store.stop()
    gone = await far.ask(fresh(TOKENS))
    assert gone.seconds < DEADLINE
    store.start()

    async def is_shared() -> bool:
        prompt = fresh(TOKENS)
        await near.ask(prompt)
        return (await far.ask(prompt)).restored == WHOLE

    await until(is_shared, within=60.0)


async def test_an_engine_whose_store_is_not_there_serves_and_stops(
    start: Start, plain: EngineProcess, tmp_path: Path
) -> None:
    """An engine without its Mooncake master serves, and the thread that tries to connect does not delay its stop."""
    engine = start("--prefix-mooncake", str(MooncakeMaster(tmp_path).settings()))
    prompt = fresh(TOKENS)
    assert (await engine.ask(prompt)).choices == (await plain.ask(prompt)).choices
    assert engine.stop() == 0


async def test_an_engine_whose_store_hangs_stops(start: Start, tmp_path: Path) -> None:
    """An engine whose Mooncake master hangs stops with status 0 within the deadline."""
    master = MooncakeMaster(tmp_path)
    master.start()
    engine = start("--prefix-mooncake", str(master.settings()))
    await connected(engine)
    master.freeze()
    await engine.ask(fresh(TOKENS))
    assert engine.stop() == 0
    master.stop()


async def test_an_engine_stops_while_a_neighbour_hangs(
    start: Start, plain: EngineProcess, secret: Path, tmp_path: Path
) -> None:
    """An engine computes a prompt whose blocks are on a frozen host, and stops though that fetch still runs."""
    master = MooncakeMaster(tmp_path)
    master.start()
    shares = ("--prefix-secret-file", str(secret))
    near = start("--prefix-mooncake", str(master.settings()), *shares)
    far = start("--prefix-mooncake", str(master.settings(global_segment_size=0)), *shares)
    await connected(near)
    await connected(far)
    prompt = fresh(TOKENS)
    await computed(near, prompt)
    near.freeze()
    hung = await far.ask(prompt)
    assert (hung.restored, hung.choices) == (0, (await plain.ask(prompt)).choices)
    assert far.stop() == 0
    near.thaw()
    assert near.stop() == 0
    master.stop()
