"""A short run of what ``python -m tests.backend.soak`` does for an hour."""

from __future__ import annotations

from backend.engine.sequence import FinishReason
from tests.backend.engine.soak import soak


async def test_random_requests_with_random_ends_leave_every_block_free() -> None:
    """Whatever comes and goes, nothing is lost, and the same question gets the same answer."""
    tally = await soak(20.0, seed=1)
    assert tally.engine is not None
    stats = tally.engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    ended = {FinishReason.LENGTH, FinishReason.STOP, FinishReason.EXPIRED, FinishReason.FAILED}
    assert {reason.value for reason in ended} | {"left", "refused"} <= set(tally.ends)
