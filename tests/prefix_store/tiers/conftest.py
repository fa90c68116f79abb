"""Tiers of every kind, for the common contract."""

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from prefix_store.codecs.codec import Codec
from prefix_store.codecs.registry import PLAIN
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.policy import Policy
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.host_memory import HostMemory
from prefix_store.tiers.mooncake.mooncake_tier import MooncakeTier
from prefix_store.tiers.tier import Tier
from tests.prefix_store.mooncake_master import MooncakeMaster
from tests.prefix_store.tiers.blocks import CAPACITY, Make, format_of


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """A real master of Mooncake, which no test may break."""
    master = MooncakeMaster(tmp_path_factory.mktemp("mooncake"))
    master.start()
    yield master
    master.stop()


@pytest.fixture(params=["host", "disk", "mooncake"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Tiers of every kind."""
    async for made in _made(request, tmp_path):
        yield made


@pytest.fixture(params=["host", "disk"])
async def own(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """The tiers that evict and pin by themselves."""
    async for made in _made(request, tmp_path):
        yield made


async def _made(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        async def make(
            codec: Codec = PLAIN,
            removed: Callable[[Sequence[bytes]], None] = lambda keys: None,
            policy: Callable[[], Policy] = LeastRecentlyUsed,
        ) -> Tier:
            form = format_of(codec)
            tier: Tier
            if request.param == "host":
                tier = HostMemory(form, CAPACITY * _rounded(form.frame_bytes), policy(), removed)
            elif request.param == "disk":
                tier = DiskTier(tmp_path / "kv", form, CAPACITY * form.frame_bytes, policy, removed)
            else:
                master: MooncakeMaster = request.getfixturevalue("master")
                tier = MooncakeTier(master.settings(), form, secrets.token_bytes(16))
                await tier.connected()
            stack.push_async_callback(tier.close)
            return tier

        yield make


def _rounded(frame_bytes: int) -> int:
    return -(-frame_bytes // 64) * 64
