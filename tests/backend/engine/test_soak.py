"""A short run of the soak test; ``python -m tests.backend.engine.soak 3600`` runs it for an hour."""

from __future__ import annotations

from backend.engine.sequence import FinishReason
from tests.backend.engine.soak import Tally, soak

REQUESTS = 1000
ENDS = {FinishReason.LENGTH.value, FinishReason.STOP.value, FinishReason.EXPIRED.value, FinishReason.FAILED.value}


def covers_everything(tally: Tally) -> bool:
    """Whether requests have ended in every way, and sequences were preempted and shared blocks."""
    assert tally.engine is not None
    stats = tally.engine.stats()
    ends = ENDS | {"left", "refused"} <= set(tally.ends)
    return ends and stats.preemptions > 0 and stats.prefix_cache_hits > 0 and tally.ends.total() >= REQUESTS


async def test_random_requests_with_random_ends_leave_every_block_free() -> None:
    """Random requests with random ends leave every block free, and equal requests get equal answers."""
    assert covers_everything(await soak(60.0, seed=1, enough=covers_everything))
