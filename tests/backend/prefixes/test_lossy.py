"""Blocks kept in one byte a number serve engines with that codec, and no exact engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import EngineProcess, fresh
from tests.backend.prefixes.keeping import claiming, writing
from tests.backend.prefixes.models import BLOCK
from tests.cache.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 500
WHOLE = TOKENS // BLOCK * BLOCK
BOUNDS = {"int8": 0.4, "fp8": 0.8}
"""How far the logprobs of a first token may be off, in nats; random weights make more of a loss than trained ones."""


def first_token(choices: list[Any]) -> dict[str, float]:
    """Its logprobs by what they are of."""
    top: dict[str, float] = choices[0]["logprobs"]["top_logprobs"][0]
    return top


@pytest.fixture(scope="module")
def shared(index: Valkey, secret: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of engines that share a folder, Redis and secret."""
    disk = tmp_path_factory.mktemp("disk") / "kv"
    return ("--prefix-disk", str(disk), "--prefix-index", index.url, "--prefix-secret-file", str(secret))


@pytest.fixture(scope="module")
def exact(start: Start, shared: tuple[str, ...]) -> EngineProcess:
    """It keeps blocks as they are."""
    return start(*shared)


@pytest.fixture(scope="module", params=BOUNDS)
def lossy(request: pytest.FixtureRequest, start: Start, shared: tuple[str, ...]) -> Iterator[EngineProcess]:
    """One that keeps blocks of the same model in less room on the same disk, and as they are in its memory."""
    engine = start(*shared, "--prefix-disk-codec", request.param, "--prefix-memory", "32MiB")
    yield engine
    engine.stop()


@pytest.fixture
def disk(shared: tuple[str, ...]) -> Path:
    return Path(shared[1])


@pytest.fixture
def bound(request: pytest.FixtureRequest) -> float:
    codec: str = request.node.callspec.params["lossy"]
    return BOUNDS[codec]


async def test_lossy_blocks_are_close_and_never_serve_an_exact_engine(
    lossy: EngineProcess, exact: EngineProcess, plain: EngineProcess, disk: Path, bound: float
) -> None:
    """Lossy blocks give logprobs within a bound, and neither they nor blocks after them serve an exact engine."""
    prompt, ending = fresh(TOKENS), fresh(100)
    expected, longer = await plain.ask(prompt), await plain.ask(prompt + ending)
    async with writing(disk, TOKENS // BLOCK):
        assert (await lossy.ask(prompt)).choices == expected.choices
    lossy.kill()
    lossy.restart()
    restored = await lossy.ask(prompt)
    assert restored.restored == WHOLE
    wanted, got = first_token(expected.choices), first_token(restored.choices)
    off = [abs(wanted[token] - got[token]) for token in wanted.keys() & got.keys()]
    assert off, "which tokens are the likeliest is a matter of chance with random weights, but not of all five"
    assert 0 < max(off) < bound
    own = await exact.ask(prompt)
    assert own.restored == 0
    assert own.choices == expected.choices
    # What was computed after a loss has it too, and is kept where the exact engine looks.
    assert (await lossy.ask(prompt + ending)).restored >= WHOLE
    assert (await exact.ask(prompt + ending)).choices == longer.choices


async def test_exact_blocks_are_not_under_the_keys_of_lossy_ones(
    lossy: EngineProcess, exact: EngineProcess, plain: EngineProcess, disk: Path
) -> None:
    """A lossy engine does not read an exact engine's blocks from a shared folder; it writes its own beside them."""
    prompt = fresh(TOKENS)
    async with writing(disk, TOKENS // BLOCK):
        expected = await exact.ask(prompt)
    before = await lossy.counted("prefix_restored_tokens_total", tier="disk")
    async with writing(disk, TOKENS // BLOCK):
        own = await lossy.ask(prompt)
    assert await lossy.counted("prefix_restored_tokens_total", tier="disk") == before
    assert own.choices == expected.choices == (await plain.ask(prompt)).choices


async def test_only_exact_blocks_come_from_a_lossy_engines_memory(
    lossy: EngineProcess, exact: EngineProcess, plain: EngineProcess, index: Valkey
) -> None:
    """An exact engine that fetches blocks from a lossy engine's memory answers bit for bit the same."""
    prompt = fresh(TOKENS)
    expected = await plain.ask(prompt)
    async with claiming(index.url, TOKENS // BLOCK):
        assert (await lossy.ask(prompt)).restored == 0
    assert (await exact.ask(prompt)).choices == expected.choices
    assert await lossy.counted("integrity_problems_total") == 0
