"""Engines that share a store and are killed: all restored blocks and the final index are correct."""

import os
from pathlib import Path

from benchmarks.prefix.chaos import run_chaos
from tests.cache.valkey import Valkey


async def test_no_block_comes_back_wrong_and_the_index_agrees_with_the_tiers(valkey: Valkey, tmp_path: Path) -> None:
    """Four processes, kill -9, files that are cut and changed: every restored byte is compared, then every claim."""
    outcome = await run_chaos(valkey.url, tmp_path, "plain", 400, 3, 1, frozenset(os.sched_getaffinity(0)))

    assert outcome.wrong == []
    assert outcome.faults == []
    assert outcome.disagreements == []
    assert outcome.left_over == []
    assert outcome.most_bytes <= outcome.allowed_bytes
    # The engines have done enough operations.
    assert outcome.operations >= 400
    assert outcome.kills >= 3
    assert outcome.corrupted > 0
    assert outcome.claims > 0
    assert min(outcome.restored[place] for place in ("memory", "disk")) > 0
