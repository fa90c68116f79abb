"""Tiers of both kinds, for what they promise alike."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from prefix_store.codecs.codec import Codec
from prefix_store.codecs.registry import PLAIN
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.policy import Policy
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.host_memory import HostMemory
from prefix_store.tiers.tier import Tier
from tests.prefix_store.tiers.blocks import CAPACITY, Make, format_of


@pytest.fixture(params=["host", "disk"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Tier] = []

    def make(
        codec: Codec = PLAIN,
        removed: Callable[[Sequence[bytes]], None] = lambda keys: None,
        policy: Callable[[], Policy] = LeastRecentlyUsed,
    ) -> Tier:
        form = format_of(codec)
        if request.param == "host":
            tier: Tier = HostMemory(form, CAPACITY * _rounded(form.frame_bytes), policy(), removed)
        else:
            tier = DiskTier(tmp_path / "kv", form, CAPACITY * form.frame_bytes, policy, removed)
        made.append(tier)
        return tier

    yield make
    for tier in made:
        await tier.close()


def _rounded(frame_bytes: int) -> int:
    return -(-frame_bytes // 64) * 64
