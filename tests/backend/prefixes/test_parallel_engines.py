"""Engines that divide a model among ranks share stored prefixes with engines that do not, and with no others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import writing
from tests.backend.prefixes.models import BLOCK

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 300
WHOLE = TOKENS // BLOCK * BLOCK
ENGINES = {
    "whole": ("--dtype", "float32"),
    "two ranks": ("--tensor-parallel", "2"),
    "two stages of two ranks": ("--tensor-parallel", "2", "--pipeline-parallel", "2"),
}
PAIRS = [("whole", "two ranks"), ("two ranks", "whole"), ("two stages of two ranks", "whole")]


@dataclass
class Folder:
    """Engines of one model that share a folder of stored blocks."""

    disk: Path
    secret: Path
    engines: dict[str, EngineProcess]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folder(launch: Start, secret: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    disk = tmp_path_factory.mktemp("disk") / "kv"
    shares = ("--prefix-disk", str(disk), "--prefix-secret-file", str(secret))
    engines = {name: launch(*shares, *options) for name, options in ENGINES.items()}
    start_all(engines.values())
    return Folder(disk, secret, engines)


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
async def test_blocks_are_the_same_for_any_division(writer: str, reader: str, folder: Folder) -> None:
    """What an engine has stored is restored by one that divides the model in another way, with the same answer."""
    prompt = fresh(TOKENS)
    async with writing(folder.disk, TOKENS // BLOCK):
        computed = await folder.engines[writer].ask(prompt)
    restored = await folder.engines[reader].ask(prompt)
    assert (computed.restored, restored.restored) == (0, WHOLE)
    (expected,), (got,) = computed.choices, restored.choices
    assert got["text"] == expected["text"]
    assert got["logprobs"]["token_logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-3)


async def test_blocks_of_other_numerics_are_not_mixed_in(folder: Folder, launch: Start) -> None:
    """An engine that computes in float16, as the default is, restores none of the ranks' blocks."""
    other = launch("--prefix-disk", str(folder.disk), "--prefix-secret-file", str(folder.secret), "--dtype", "float16")
    start_all([other])
    prompt = fresh(TOKENS)
    async with writing(folder.disk, TOKENS // BLOCK):
        await folder.engines["two ranks"].ask(prompt)
    assert (await other.ask(prompt)).restored == 0
