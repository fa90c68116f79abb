"""Models of one name that compute differently never share blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import claiming, writing
from tests.backend.prefixes.models import BLOCK
from tests.cache.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 200


@dataclass
class EngineGroup:
    """Engines of one model name, on one folder, one Redis and one secret: no two of them compute the same."""

    index: str
    disk: Path
    engines: dict[str, EngineProcess]


@pytest.fixture(scope="module")
def group(
    launch: Start, index: Valkey, secret: Path, tiny: Path, alike: Path, tmp_path_factory: pytest.TempPathFactory
) -> EngineGroup:
    disk = tmp_path_factory.mktemp("disk") / "kv"
    local = ("--prefix-disk", str(disk), "--prefix-memory", "16MiB")
    shared = (*local, "--prefix-index", index.url, "--prefix-secret-file", str(secret))
    engines = {
        "first": launch(*shared),
        "other weights": launch(*shared, model=alike),
        "quantised": launch(*shared, "--quantization", "int8"),
        "small KV": launch(*shared, "--kv-dtype", "int8"),
    }
    start_all(engines.values())
    return EngineGroup(index.url, disk, engines)


async def test_models_of_one_name_that_differ_share_no_blocks(group: EngineGroup, plain: EngineProcess) -> None:
    """Engines of one model name with other weights, quantisation or KV precision share no block, and use their own."""
    prompt = fresh(TOKENS)
    names = list(group.engines)
    assert {engine.model for engine in group.engines.values()} == {"tiny"}
    # A tenant of its own for each: nothing that the others or this engine itself have is within its reach.
    alone = {
        name: await engine.ask(prompt, headers={"x-keepgate-namespace": f"only {name}"})
        for name, engine in group.engines.items()
    }
    assert [answer.restored for answer in alone.values()] == [0] * len(names)
    assert alone["first"].choices == (await plain.ask(prompt)).choices
    assert len({str(answer.choices) for answer in alone.values()}) == len(names)
    for name, engine in group.engines.items():
        async with claiming(group.index, TOKENS // BLOCK), writing(group.disk, TOKENS // BLOCK):
            answer = await engine.ask(prompt)
        assert answer.restored == 0, name
        assert answer.choices == alone[name].choices, name
    for name, engine in group.engines.items():
        again = await engine.ask(prompt)
        assert again.restored == TOKENS // BLOCK * BLOCK, name
        assert again.choices == alone[name].choices, name
    engine = group.engines["small KV"]
    engine.kill()
    engine.restart()
    restored = await engine.ask(prompt)
    assert restored.restored == TOKENS // BLOCK * BLOCK
    assert restored.choices == alone["small KV"].choices


async def test_replaced_weights_are_another_model(group: EngineGroup, alike: Path, tiny: Path, start: Start) -> None:
    """An engine whose weight files were replaced under the same path does not use the blocks of the old weights."""
    prompt = fresh(TOKENS)
    async with writing(group.disk, TOKENS // BLOCK):
        await group.engines["first"].ask(prompt)
    expected = await group.engines["other weights"].ask(prompt, headers={"x-keepgate-namespace": "apart"})
    engine = group.engines["first"]
    engine.stop()
    weights = tiny / "model.safetensors"
    held = weights.read_bytes()
    try:
        weights.write_bytes((alike / "model.safetensors").read_bytes())
        engine.restart()
        answer = await engine.ask(prompt)
    finally:
        engine.stop()
        weights.write_bytes(held)
    assert answer.restored == 0
    assert answer.choices == expected.choices
