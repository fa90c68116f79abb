"""Restored prefixes are computed again and compared, and those that differ are reported and removed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from backend.engine.model_runner import BLOCK_SIZE
from backend.prefixes.audit import AuditFigures
from prefix_store.codecs.registry import CODECS
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.store.config import StoreConfig
from prefix_store.tiers.tier import Tier
from tests.backend.conftest import COMPLETIONS, Served, StartServer
from tests.prefix_store.tiers.waiting import until

PROMPT = [*range(100, 200)]
BLOCKS = len(PROMPT) // BLOCK_SIZE


@pytest.fixture
async def ask(start_server: StartServer, tmp_path: Path) -> Callable[..., Awaitable[Asking]]:
    async def start(codec: str = "plain", every: int = 1) -> Asking:
        config = StoreConfig(disk=tmp_path / "kv", disk_codec=CODECS[codec], audit_every=every)
        return Asking(await start_server(prefix_store=config))

    return start


class Asking:
    """Asks one server the same thing again and again, as a conversation."""

    def __init__(self, served: Served) -> None:
        self.served = served

    @property
    def figures(self) -> AuditFigures:
        return self.served.state.prefixes.audits

    @property
    def disk(self) -> Tier:
        opened = self.served.state.opened_store
        assert opened is not None
        return opened.store.tiers["disk"]

    async def __call__(self) -> tuple[int, str]:
        """Tokens that were not computed, and the answer."""
        body = {"model": self.served.state.model.name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        headers = {"x-keepgate-reuse": "conversation"}
        async with self.served.client.post(COMPLETIONS, json=body, headers=headers) as response:
            answer = await response.json()
            return int(response.headers["x-keepgate-prefix-tokens"]), str(answer["choices"][0]["text"])

    async def kept(self) -> None:
        await until(lambda: self.disk.counts.writes >= BLOCKS, "the blocks are kept")

    async def chain(self) -> list[BlockId]:
        keys = self.served.state.tenants.keys([])
        return (await self.served.state.prefixes.where(PROMPT, keys)).chain.blocks


async def test_a_restored_prefix_is_compared_bit_by_bit(ask: Callable[..., Awaitable[Asking]]) -> None:
    """The audit of a prefix that was restored exactly finds no difference and keeps its blocks."""
    asking = await ask()
    first = await asking()
    await asking.kept()
    await asking.served.forget_own_blocks()
    assert await asking() == (BLOCKS * BLOCK_SIZE, first[1])
    await until(lambda: asking.figures.audited == 1, "the audit is done")
    assert asking.figures == AuditFigures(audited=1)
    assert await asking.disk.lookup(await asking.chain()) == BLOCKS


async def test_a_prefix_that_is_not_what_the_model_computes_is_removed(
    ask: Callable[..., Awaitable[Asking]], caplog: pytest.LogCaptureFixture
) -> None:
    """The audit removes a prefix of valid frames that the model did not compute, and the next answer is right."""
    asking = await ask()
    _, right = await asking()
    await asking.kept()
    blocks = await asking.chain()
    await asking.disk.discard(blocks, 0)
    noise = np.random.default_rng(1)
    wrong = [[noise.standard_normal(asking.disk.format.layout.shape).astype(np.float16)] for _ in blocks]
    assert await asking.disk.write(blocks, wrong, Access(0.0)) == BLOCKS
    await asking.served.forget_own_blocks()
    cached, answer = await asking()
    assert (cached, answer != right) == (BLOCKS * BLOCK_SIZE, True)
    await until(lambda: asking.figures.drifted == 1, "the drift is found")
    assert asking.figures.largest_error > 0.01
    assert "is not what the model computes" in caplog.text
    assert await asking() == (0, right)


async def test_a_loss_within_its_bounds_is_no_drift(ask: Callable[..., Awaitable[Asking]]) -> None:
    """The audit measures the loss of a lossy codec and reports no drift while it is within its bounds."""
    asking = await ask("int8")
    await asking()
    await asking.kept()
    await asking.served.forget_own_blocks()
    assert (await asking())[0] == BLOCKS * BLOCK_SIZE
    await until(lambda: asking.figures.audited == 1, "the audit is done")
    assert asking.figures.drifted == 0
    assert 0 < asking.figures.largest_divergence < 0.01


async def test_every_nth_restore_is_audited(ask: Callable[..., Awaitable[Asking]]) -> None:
    """With `audit_every=2` every second restore is audited, and with 0 none is."""
    asking = await ask(every=2)
    await asking()
    await asking.kept()
    for _ in range(2):
        await asking.served.forget_own_blocks()
        await asking()
    await until(lambda: asking.figures.audited == 1, "the audit is done")
    await asking.served.forget_own_blocks()
    await asking()
    assert asking.figures == AuditFigures(audited=1)
    never = await ask(every=0)
    await asking.served.forget_own_blocks()
    assert (await never())[0] == BLOCKS * BLOCK_SIZE
    assert never.figures == AuditFigures()
